"""Reads a draft checkpoint of any kind and system into a ``DraftDescription``. The kind that recognizes the
configuration reads it; otherwise it is read as an EAGLE head, or refused by name."""

from pathlib import Path
from typing import Any

from eagle3.export.checkpoints import open_source
from eagle3.export.checkpoints.json_fields import Fields, read_object
from eagle3.export.draft.common.description import DraftDescription
from eagle3.export.draft.kinds import EAGLE3, KINDS, kind_of
from eagle3.export.draft.kinds.eagle.rope_reading import NO_FLAGS, RopeFlags
from eagle3.export.draft.other_heads import refuse_named_heads, refuse_other_forms, refuse_other_heads


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
