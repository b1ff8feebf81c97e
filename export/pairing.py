"""Whether a draft head fits a target: taps, widths, vocabularies. A wrong pair loads, runs and accepts about 1%."""

from typing import Any

from eagle3.export.draft import DraftDescription
from eagle3.export.draft.vocabulary_map import check_vocabulary_map
from eagle3.export.tensors import check_draft


def choose_taps(
    draft: DraftDescription, target_config: Any, given: tuple[int, ...] | None, convention: str | None
) -> tuple[int, ...]:
    """The layers whose inputs are tapped: flags first, then the checkpoint's, then 2, n//2, n-3.

    ``convention`` says what explicit ids mean: the ``input`` of a layer (SafeAILab, vLLM, speculators) or its
    ``output`` (SGLang, TensorRT-LLM). Raises ValueError for ids that no target of this depth has.
    """
    layers = target_config.num_hidden_layers
    ids = given or draft.aux_layers
    explicit = ids is not None
    ids = ids if explicit else (2, layers // 2, layers - 3)
    taps = tuple(tap + 1 for tap in ids) if explicit and convention == "output" else tuple(ids)
    if list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] > layers:
        raise ValueError(
            f"aux layers {','.join(map(str, ids))} (convention {convention or 'input'}) must ascend, be unique and lie "
            f"within the target's {layers} layers: type --aux-layers"
            + (", or --aux-convention input" if convention == "output" else "")
        )
    return taps


def check_pair(draft: DraftDescription, target_config: Any, taps: tuple[int, ...]) -> None:
    """Raise ValueError where the draft's tensors cannot belong to this target."""
    hidden, vocabulary = target_config.hidden_size, target_config.vocab_size
    trained_for = f"; the head names {draft.verifier} as its target" if draft.verifier else ""
    if draft.taps_width != len(taps) * hidden:
        if draft.taps_width % hidden:
            raise ValueError(
                f"the draft's fc takes {draft.taps_width} features, no multiple of the target's hidden size {hidden}: "
                f"likely not a matched pair{trained_for}"
            )
        raise ValueError(
            f"the draft's fc takes {draft.taps_width} features = {draft.taps_width // hidden} taps of {hidden}, but "
            f"{len(taps)} aux layers are named ({','.join(map(str, taps))}): type --aux-layers with "
            f"{draft.taps_width // hidden} ids"
        )
    if draft.target_vocab_size != vocabulary:
        raise ValueError(
            f"the draft is for a vocabulary of {draft.target_vocab_size}, the target has {vocabulary}: "
            f"likely not a matched pair{trained_for}"
        )
    if draft.has_embedding:
        rows, width = draft.headers["embed_tokens.weight"].shape
        if (rows, width) != (vocabulary, draft.hidden_size):
            raise ValueError(
                f"the draft's embed_tokens is {rows} x {width}, but target vocabulary x draft hidden size is "
                f"{vocabulary} x {draft.hidden_size}: likely not a matched pair{trained_for}"
            )
    elif draft.hidden_size != hidden:
        raise ValueError(
            f"the draft has no embedding and its hidden size {draft.hidden_size} is not the target's {hidden}, "
            "so it cannot share the target's: the checkpoint lacks embed_tokens.weight"
        )
    check_draft(draft)
    if draft.maps_vocabulary:
        check_vocabulary_map(draft, vocabulary)
    elif draft.draft_vocab_size != vocabulary:
        raise ValueError(
            f"the draft speaks {draft.draft_vocab_size} tokens, the target {vocabulary}, and no d2t maps them"
        )
