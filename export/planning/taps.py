"""Which hidden states of the target a draft head fuses: the first thing that goes wrong in silence.

A layer id means the input of that layer in SafeAILab, vLLM and speculators, its output in SGLang, SpecForge and
TensorRT-LLM, under the same key. A wrong tap loads, runs and accepts about 1%.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from eagle3.export.draft.description import DraftDescription

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Taps:
    """``layers`` are transformers' ``hidden_states`` indices; none: the head takes the final state. ``origin`` says for
    a person where they come from, ``doubt`` what may be wrong with them."""

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
    """Flags first, then the checkpoint's ids, then 2, n//2, n-3.

    ``convention`` says what explicit ids mean, ``input`` or ``output``; None: flags mean inputs, a checkpoint's ids
    what its dialect means. Raises ValueError for ids that no target of this depth has.
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
                f"the draft's fc takes {draft.taps_width // hidden} taps of {hidden} and its config.json does not say "
                "which: type --aux-layers with their ids"
            )
        return _checked(Taps((2, layers // 2, layers - 3), "2, n//2, n-3, since the checkpoint names none"), layers)
    meaning, doubt = (convention or "input", None) if given or convention else _meaning(draft, ids, layers)
    origin = f"{','.join(map(str, ids))} of {'--aux-layers' if given else 'config.json'}, read as {meaning}s of layers"
    taps = tuple(tap + 1 for tap in ids) if meaning == "output" else tuple(ids)
    return _checked(Taps(taps, origin, doubt), layers)


def _meaning(draft: DraftDescription, ids: tuple[int, ...], layers: int) -> tuple[str, str | None]:
    """What a checkpoint's ids mean, and a doubt where its dialect alone says so."""
    if draft.dialect == "speculators":
        return "input", None
    if max(ids) >= layers or ids == (2, layers // 2, layers - 3):
        return "input", None  # no layer has the output of the former; the latter are every input convention's default
    if ids == (1, layers // 2 - 1, layers - 4):
        return "output", None  # and these every output convention's
    other = "input" if draft.aux_convention == "output" else "output"
    return draft.aux_convention, (
        f"the draft's layer ids {','.join(map(str, ids))} are taken as {draft.aux_convention}s of layers, as heads of "
        f"{draft.dialect} mean them: type --aux-convention {other} if hardly anything is accepted"
    )


def _checked(taps: Taps, layers: int) -> Taps:
    ids = taps.layers
    if list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] > layers:
        raise ValueError(
            f"aux layers {','.join(map(str, ids))} ({taps.origin}) must ascend, be unique and lie within the target's "
            f"{layers} layers: type --aux-layers" + (", or --aux-convention input" if "outputs" in taps.origin else "")
        )
    return taps
