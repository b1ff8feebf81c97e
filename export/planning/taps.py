"""Chooses the taps: the hidden states of the target that a draft head fuses. A wrong tap causes no error. Under the
same key, a layer id means the input of that layer in SafeAILab, vLLM and speculators, and its output in SGLang,
SpecForge and TensorRT-LLM. A head with a wrong tap loads and runs, and about 1% of its tokens are accepted.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from eagle3.export.draft.common.description import DraftDescription

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Taps:
    """The chosen taps. ``layers`` has their indices in transformers' ``hidden_states``; an empty tuple means that the
    head takes the final state. ``origin`` says in words which file or flag gave them, and ``doubt`` why they may be
    wrong."""

    layers: tuple[int, ...]
    origin: str
    doubt: str | None = None

    def __str__(self) -> str:
        if not self.layers:
            return "the target's final state after its norm"
        return f"hidden_states {', '.join(map(str, self.layers))} ({self.origin})"


def choose_taps(
    draft: DraftDescription, target_config: "PreTrainedConfig", given: tuple[int, ...] | None, convention: str | None
) -> Taps:
    """Choose the taps from the flags, or else from the checkpoint's ids, or else 2, n//2 and n-3.

    ``convention`` says whether explicit ids mean the ``input`` or the ``output`` of a layer. If it is None, ids of
    flags mean inputs, and ids of a checkpoint have the meaning of their dialect. Raises ValueError for ids that a
    target of this depth does not have.
    """
    layers, hidden = target_config.num_hidden_layers, target_config.hidden_size
    if draft.takes_final_state:
        if given or convention:
            raise ValueError(
                "the head takes the target's final state and no taps: leave --aux-layers and --aux-convention out"
            )
        return Taps((), "the head's kind")
    ids = given or draft.aux_layers
    if ids is None:
        if draft.taps_width % hidden == 0 and draft.taps_width != 3 * hidden:
            raise ValueError(
                f"the draft's fc takes {draft.taps_width // hidden} taps of {hidden}, but its config.json does not say "
                "which: type --aux-layers with their ids"
            )
        return _checked(Taps((2, layers // 2, layers - 3), "2, n//2, n-3, since the checkpoint names none"), layers)
    meaning, doubt = (convention or "input", None) if given or convention else _meaning(draft, ids, layers)
    origin = f"{','.join(map(str, ids))} of {'--aux-layers' if given else 'config.json'}, read as {meaning}s of layers"
    taps = tuple(tap + 1 for tap in ids) if meaning == "output" else tuple(ids)
    return _checked(Taps(taps, origin, doubt), layers)


def spread_taps(draft: DraftDescription, layers: int) -> tuple[int, ...] | None:
    """Return as many taps as the head has, spread evenly over ``layers`` layers; None for a head without taps."""
    count = 3 if draft.aux_layers is None else len(draft.aux_layers)
    return None if draft.takes_final_state else tuple(round((tap + 1) * layers / (count + 1)) for tap in range(count))


def _meaning(draft: DraftDescription, ids: tuple[int, ...], layers: int) -> tuple[str, str | None]:
    """Return whether a checkpoint's ids mean inputs or outputs, and a doubt if only the dialect decides that."""
    if draft.convention_known:
        return draft.aux_convention, None
    if max(ids) >= layers or ids == (2, layers // 2, layers - 3):
        return "input", None  # no layer has the index n, and 2, n//2, n-3 is the default of dialects that mean inputs
    if ids == (1, layers // 2 - 1, layers - 4):
        return "output", None  # this is the default of dialects that mean outputs
    other = "input" if draft.aux_convention == "output" else "output"
    return draft.aux_convention, (
        f"the draft's layer ids {','.join(map(str, ids))} are taken as {draft.aux_convention}s of layers, as usual in "
        f"heads of {draft.dialect}: type --aux-convention {other} if hardly anything is accepted"
    )


def _checked(taps: Taps, layers: int) -> Taps:
    ids = taps.layers
    if list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] > layers:
        raise ValueError(
            f"aux layers {','.join(map(str, ids))} ({taps.origin}) must ascend, be unique and lie within the target's "
            f"{layers} layers: type --aux-layers" + (", or --aux-convention input" if "outputs" in taps.origin else "")
        )
    return taps
