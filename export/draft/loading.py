"""Loads a draft head of any kind."""

import torch

from eagle3.export.configuration.config import NO_HEAD
from eagle3.export.draft.common.description import DraftDescription
from eagle3.export.draft.common.head import Head
from eagle3.export.draft.common.loading import filled, unfilled_head
from eagle3.export.draft.kinds import KINDS
from eagle3.export.draft.no_head import NoHead
from eagle3.targets import TapTarget
from eagle3.targets.attention import AttentionFactory


def unfilled(draft: DraftDescription, max_seq_len: int = 1, proposals: int = 1) -> Head:
    """Return the head on the meta device, without the parts that no checkpoint holds."""
    if draft.kind == NO_HEAD:
        return NoHead()
    return unfilled_head(KINDS[draft.kind].load().Head, draft, max_seq_len, proposals)


def load_draft(
    draft: DraftDescription,
    max_seq_len: int,
    dtype: torch.dtype,
    attention: AttentionFactory,
    target: TapTarget,
    proposals: int = 1,
) -> Head:
    """Load a draft head. It shares ``target``'s embedding and lm_head if it has none of its own."""
    return filled(unfilled(draft, max_seq_len, proposals), draft, dtype, attention, target)
