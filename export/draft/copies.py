"""Finds tables of a draft head that are copies of its target's, as several trainers save them. The head then uses the
target's, and the artifact holds one copy. An embedding of Gemma 4 31B has 2.8 GB in bfloat16."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from eagle3.export.checkpoints.safetensors_file import HeaderAlone
from eagle3.export.checkpoints.source import Source, TensorHeader
from eagle3.export.draft.common.description import DraftDescription
from eagle3.export.draft.kinds.eagle.description import EagleDescription
from eagle3.targets.spec import Skeleton

TABLES = EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
SAMPLE = 64
"""The number of rows, spread over a table, that are compared first."""
ROWS = 4096


def without_copies(
    draft: DraftDescription,
    source: Source,
    headers: Mapping[str, TensorHeader],
    skeleton: Skeleton,
    tables: Collection[str] = TABLES,
) -> DraftDescription:
    """Return the head without those of its ``tables`` whose values equal the target's exactly, even if the dtypes
    differ.

    Args:
        source, headers: the target's checkpoint and the headers of its tensors that are read. Quantized tensors are not
            compared
    """
    if isinstance(draft, EagleDescription) and (draft.ties_lm_head or draft.mask_token_id is not None):
        return draft  # the embedding is the head's own
    targets, copied = _tables_of(headers, skeleton), set()
    for table in tables:
        own, theirs = draft.headers.get(table), targets.get(table)
        if own is None or theirs is None or f"{table.removesuffix('weight')}bias" in draft.headers:
            continue
        (name,) = (name for name, each in draft.tensor_names.items() if each == table)
        held = headers[theirs]
        if own.quantized or held.quantized or own.shape != held.shape:
            continue
        with suppress(HeaderAlone):  # a dry run has not fetched the values
            if _same(draft.source.tensor(name), source.tensor(theirs)):
                copied.add(table)
    if not copied:
        return draft
    return replace(
        draft,
        tensor_names={name: each for name, each in draft.tensor_names.items() if each not in copied},
        headers={each: header for each, header in draft.headers.items() if each not in copied},
        shares_lm_head=draft.shares_lm_head or LM_HEAD in copied,
        copies=tuple(sorted(table.removesuffix(".weight") for table in copied)),
    )


def _tables_of(headers: Mapping[str, TensorHeader], skeleton: Skeleton) -> dict[str, str]:
    """Map ``EMBEDDING`` and ``LM_HEAD`` to the names of these tables in the target's checkpoint; if they are tied, both
    map to the embedding."""
    found: dict[str, str] = {}
    for name in headers:
        own = skeleton.key_map(name) or ""
        found |= {table: name for table in TABLES if own == table or own.endswith(f".{table}")}
    if LM_HEAD not in found and EMBEDDING in found and skeleton.tie_map:
        found[LM_HEAD] = found[EMBEDDING]
    return found


def _same(one: Tensor, other: Tensor) -> bool:
    """Return True for equal tables. Tables that differ usually differ in the sample, so the rest is not read."""
    step = max(1, len(one) // SAMPLE)
    if not torch.equal(one[::step].float(), other[::step].float()):
        return False
    starts = range(0, len(one), ROWS)
    return all(torch.equal(one[at : at + ROWS].float(), other[at : at + ROWS].float()) for at in starts)
