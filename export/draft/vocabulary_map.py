"""Checks the map from a draft head's own ids to the target's: ``d2t``, and ``t2d``, which must agree with it."""

import torch
from torch import Tensor

from eagle3.export.draft.common.description import DraftDescription


def largest_id(draft: DraftDescription) -> int:
    """Return the largest target id that the head's ``d2t`` maps to."""
    return int(_ids(draft)[0].max())


def _ids(draft: DraftDescription) -> tuple[Tensor, Tensor]:
    """Return the target's id of each draft id, and the values in the file: offsets, or ids if the description says
    so."""
    (name,) = (name for name, own in draft.tensor_names.items() if own == "d2t")
    held = draft.source.tensor(name).long()
    return held if draft.d2t_holds_ids else held + torch.arange(len(held)), held


def check_vocabulary_map(draft: DraftDescription, vocabulary: int) -> None:
    """Raise ValueError if ``d2t`` or ``t2d`` is wrong.

    ``d2t`` is an offset: target id = draft id + d2t[draft id], in range and unique. ``t2d``, if there is one, must be
    true at exactly these target ids.
    """
    ids, offsets = _ids(draft)
    told = draft.source.tensor(draft.selector) if draft.selector else None
    if ids.min() < 0 or ids.max() >= vocabulary or ids.unique().numel() != ids.numel():
        raise ValueError(
            f"{draft.folder}: d2t maps draft ids to {int(ids.min())}..{int(ids.max())}, "
            f"{ids.numel() - ids.unique().numel()} of them twice, but must map to different ids in "
            f"0..{vocabulary - 1}: d2t holds offsets (target id - draft id), not ids"
        )
    if told is not None:
        _check_selector(draft, told, ids, offsets, vocabulary)
    elif _could_be_ids(offsets, vocabulary):
        raise ValueError(
            f"{draft.folder}: d2t could hold ids or offsets (its values ascend without repeats), and there is no t2d "
            "to decide: d2t holds offsets (target id - draft id); add t2d, or write d2t minus 0, 1, 2, ..."
        )


def _check_selector(draft: DraftDescription, told: Tensor, ids: Tensor, offsets: Tensor, vocabulary: int) -> None:
    if told.shape != (vocabulary,):
        raise ValueError(f"{draft.folder}: t2d is {list(told.shape)}, but the target has {vocabulary} tokens")
    named = told.bool().nonzero()[:, 0]
    if torch.equal(named, ids.sort().values):
        return
    if torch.equal(named, offsets.sort().values):
        raise ValueError(f"{draft.folder}: d2t holds target ids, but must hold offsets: subtract 0, 1, 2, ... from it")
    both = torch.isin(ids, named).sum()
    raise ValueError(
        f"{draft.folder}: t2d names {len(named)} target ids, d2t maps to {len(ids)}, and {int(both)} are the same: the "
        "two belong to different heads, or one is damaged"
    )


def _could_be_ids(offsets: Tensor, vocabulary: int) -> bool:
    """Return True if ``d2t`` could also hold ids. Offsets of a real map repeat, because adjacent target ids have the
    same offset; ids never repeat."""
    ascending = bool((offsets.diff() > 0).all())
    return len(offsets) > 2 and ascending and int(offsets.min()) >= 0 and int(offsets.max()) < vocabulary
