"""Makes and loads the module of a draft head."""

from collections.abc import Callable
from typing import Any

import torch
from transformers.initialization import no_init_weights

from eagle3.export.draft.common.description import DraftDescription
from eagle3.export.draft.common.head import Head
from eagle3.targets import TapTarget
from eagle3.targets.attention import AttentionFactory
from eagle3.targets.loading import load_tensors


def unfilled_head(make: Callable[..., Head], draft: DraftDescription, max_seq_len: int, proposals: int) -> Head:
    """Return a head of the class ``make`` on the meta device, without the parts that no checkpoint holds. Initial
    values are not computed: they would be overwritten, and computing them on the meta device is slow."""
    with no_init_weights(), torch.device("meta"):
        return make(draft, max_seq_len, proposals)


def load_head(
    make: Callable[..., Any],
    draft: DraftDescription,
    max_seq_len: int,
    dtype: torch.dtype,
    attention: AttentionFactory,
    target: TapTarget,
    proposals: int = 1,
) -> Head:
    """Load a head of the class ``make``. It shares ``target``'s embedding and lm_head if it has none of its own."""
    return filled(unfilled_head(make, draft, max_seq_len, proposals), draft, dtype, attention, target)


def filled(
    head: Head, draft: DraftDescription, dtype: torch.dtype, attention: AttentionFactory, target: TapTarget
) -> Head:
    """Load the tensors of an unfilled head and attach the parts that no checkpoint holds."""
    load_tensors(head, draft.source.tensors(), dtype, key_map=draft.tensor_names.get)
    return head.attach(draft, attention, dtype, target).eval().requires_grad_(False)
