"""Reads a draft checkpoint of any kind and system into a ``DraftDescription``. The kind that recognizes the
configuration reads it; otherwise it is read as an EAGLE head, or refused by name.

It also finds tables of a draft head that are copies of its target's, as several trainers save them. The head then uses
the target's, and the artifact holds one copy. An embedding of Gemma 4 31B takes 2.8 GB in bfloat16.
"""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.export.checkpoints import open_source
from eagle3.export.checkpoints.json_fields import Fields, read_object
from eagle3.export.checkpoints.safetensors_file import HeaderAlone
from eagle3.export.checkpoints.source import Source, TensorHeader
from eagle3.export.draft.common.description import DraftDescription
from eagle3.export.draft.kinds import EAGLE3, KINDS, kind_of
from eagle3.export.draft.kinds.eagle.description import EagleDescription
from eagle3.export.draft.kinds.eagle.rope_reading import NO_FLAGS, RopeFlags
from eagle3.export.draft.other_heads import refuse_named_heads, refuse_other_forms, refuse_other_heads
from eagle3.targets.spec import Skeleton


def read_draft(
    folder: Path,
    dialect: str | None = None,
    norm_before_residual: bool | None = None,
    rope: RopeFlags = NO_FLAGS,
) -> DraftDescription:
    """Describe the draft head in ``folder``.

    Args:
        dialect: a name of ``DIALECTS``; None for the first that recognizes the checkpoint
        norm_before_residual: None for the checkpoint's value
        rope: the values of the flags for the head's RoPE. These three arguments are only for EAGLE heads

    Raises:
        FileNotFoundError: the folder lacks a file
        ValueError: the folder holds no draft head, an unsupported one, or one that contradicts itself
    """
    refuse_other_forms(folder)
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: --draft needs the folder of a draft head")
    fields, source = Fields(file, read_object(file)), open_source(folder)
    fields.texts("architectures")
    if (kind := kind_of(fields)) is not None:
        flags: dict[str, Any] = {"--draft-dialect": dialect, "--norm-before-residual": norm_before_residual}
        flags |= {"--draft-rope-theta": rope.theta, "--draft-partial-rotary": rope.part}
        if flag := next((flag for flag, value in flags.items() if value is not None), None):
            raise ValueError(f"{flag} is for EAGLE heads, but {folder} is a head of the kind {kind}: leave it out")
        return KINDS[kind].load().read(fields, source)
    refuse_named_heads(fields)
    refuse_other_heads(fields, source.headers())
    return KINDS[EAGLE3].load().read(fields, source, dialect, norm_before_residual, rope)


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
