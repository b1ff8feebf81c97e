"""Checks that several kinds of heads have in common: of widths that a target must have, and of tensors' names."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.export.checkpoints.json_fields import Fields
from eagle3.export.checkpoints.source import TensorHeader
from eagle3.export.draft.common.description import DraftDescription

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def check_pair(
    draft: DraftDescription, target_config: "PreTrainedConfig", taps: tuple[int, ...], trained_for: str
) -> None:
    """Raise ValueError if the taps, the embedding or the lm_head of the head do not fit the target's widths."""
    hidden, vocabulary = target_config.hidden_size, target_config.vocab_size
    if draft.takes_final_state and draft.taps_width != hidden:
        raise ValueError(
            f"the draft takes a final state of {draft.taps_width}, the target's hidden size is {hidden}: likely not a "
            f"matched pair{trained_for}"
        )
    if not draft.takes_final_state and draft.taps_width != len(taps) * hidden:
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
    if draft.shares_lm_head and draft.hidden_size != hidden:
        raise ValueError(
            f"the draft has no lm_head and its hidden size {draft.hidden_size} is not the target's {hidden}, "
            "so it cannot share the target's: the checkpoint lacks lm_head.weight"
        )


SELECTOR = "t2d"


def check_named_once(folder: Path, names: Mapping[str, str]) -> None:
    """Raise ValueError if ``names`` maps two tensors of a checkpoint to the same name in the module."""
    own = list(names.values())
    twice = next((name for name, each in names.items() if own.count(each) > 1), None)
    if twice is not None:
        raise ValueError(f"{folder} has {names[twice]} twice, once as {twice}: which one is meant?")


def shared_lm_head(fields: Fields, own: Mapping[str, TensorHeader], vocabulary: int) -> bool:
    """Return True if the head uses the target's lm_head. Raises ValueError if its vocabulary is not the target's."""
    folder = fields.file.parent
    spoken = fields.count("draft_vocab_size")
    head = own.get("lm_head.weight")
    if head is None and spoken not in (None, vocabulary):
        raise ValueError(
            f"{folder}: no lm_head.weight, and draft_vocab_size {spoken} is not the target's vocabulary of "
            f"{vocabulary}, so that the target's cannot stand in for it: is a shard missing?"
        )
    if head is not None and spoken is not None and head.shape[:1] != (spoken,):
        raise ValueError(
            f"{folder}: draft_vocab_size is {spoken} in config.json, but lm_head.weight has {head.shape[0]} rows: the "
            "two are of different heads, or one is damaged"
        )
    return head is None
