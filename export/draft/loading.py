"""Loads a draft head of any kind."""

import torch
from transformers.initialization import no_init_weights

from eagle3.export.configuration.config import NO_HEAD
from eagle3.export.draft.description import DraftDescription
from eagle3.export.draft.kinds import KINDS
from eagle3.export.draft.kinds.head import Head
from eagle3.export.draft.no_head import NoHead
from eagle3.targets import TapTarget
from eagle3.targets.attention import AttentionFactory
from eagle3.targets.loading import load_tensors


def unfilled(draft: DraftDescription, max_seq_len: int = 1, proposals: int = 1) -> Head:
    """Return the head on the meta device, without the parts that no checkpoint holds. Initial values that nobody reads
    would be computed there, by way of SymPy."""
    if draft.kind == NO_HEAD:
        return NoHead()
    with no_init_weights(), torch.device("meta"):
        return KINDS[draft.kind].load().Head(draft, max_seq_len, proposals)


def load_draft(
    draft: DraftDescription,
    max_seq_len: int,
    dtype: torch.dtype,
    attention: AttentionFactory,
    target: TapTarget,
    proposals: int = 1,
) -> Head:
    """Load a draft head. It shares ``target``'s embedding and lm_head if it has none of its own."""
    head = unfilled(draft, max_seq_len, proposals)
    load_tensors(head, draft.source.tensors(), dtype, key_map=draft.tensor_names.get)
    return head.attach(draft, attention, dtype, target).eval().requires_grad_(False)
