"""Refuses a draft head that does not fit its target in widths, vocabulary, tokenizer or training. A head paired with a
wrong target loads and runs, but only about 1% of its proposals are accepted."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle3.export.checkpoints.json_fields import read_object
from eagle3.export.draft.common.description import DraftDescription
from eagle3.export.draft.kinds import KINDS
from eagle3.export.planning.tensors import check_draft
from eagle3.export.planning.tokenizer import read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def check_pair(draft: DraftDescription, target_config: "PreTrainedConfig", taps: tuple[int, ...]) -> None:
    """Raise ValueError if the draft's tensors cannot belong to this target."""
    vocabulary = target_config.vocab_size
    trained_for = f"; the head names {draft.verifier} as its target" if draft.verifier else ""
    KINDS[draft.kind].load().check_pair(draft, target_config, taps, trained_for)
    if draft.target_vocab_size != vocabulary:
        raise ValueError(
            f"the draft is for a vocabulary of {draft.target_vocab_size}, the target has {vocabulary}: "
            f"likely not a matched pair{trained_for}"
        )
    check_draft(draft)
    if draft.maps_vocabulary:
        check_vocabulary_map(draft, vocabulary)
    elif draft.draft_vocab_size != vocabulary:
        raise ValueError(
            f"the draft has {draft.draft_vocab_size} tokens, the target {vocabulary}, and there is no d2t tensor to "
            "map them"
        )


def within_vocabulary(draft: DraftDescription, vocabulary: int) -> DraftDescription:
    """Return the head for a target whose file leaves out the last rows of the vocabulary, which no token uses.

    Raises ValueError for a head that can propose one of those ids.
    """
    if vocabulary == draft.target_vocab_size:
        return draft
    most = draft.draft_vocab_size - 1
    if draft.maps_vocabulary:
        most = largest_id(draft)
    if not draft.shares_lm_head and most >= vocabulary:
        raise ValueError(
            f"the draft has ids up to {most}, but the target's file has rows for only {vocabulary} tokens: name "
            "its Hugging Face folder"
        )
    return replace(draft, target_vocab_size=vocabulary)


def check_trained_for(draft: DraftDescription, checkpoint: Path) -> None:
    """Raise ValueError if the head was trained for another family of models or with another tokenizer."""
    own, named = _families(read_object(checkpoint / "config.json").get("architectures")), draft.verifier_architectures
    if own and named and not own & _families(named):
        raise ValueError(
            f"the draft was trained for {draft.verifier} ({', '.join(named)}), but {checkpoint} is of "
            f"{', '.join(sorted(own))}: not a matched pair: type --draft with a head for this target"
        )
    files = [folder / "tokenizer.json" for folder in (draft.folder, checkpoint)]
    if all(file.is_file() for file in files):
        _check_tokenizers(*files)


def _families(architectures: object) -> set[str]:
    """Return the architectures' names without their task: Gemma4ForCausalLM and Gemma4ForConditionalGeneration are one
    family."""
    names = architectures if isinstance(architectures, Iterable) and not isinstance(architectures, str) else ()
    return {re.sub(r"(For[A-Z]\w*|LMHeadModel|TextModel|Model)$", "", name) for name in names if isinstance(name, str)}


def _check_tokenizers(draft: Path, target: Path) -> None:
    """Raise ValueError if an id stands for different tokens in the two tokenizers; one may have more ids than the
    other."""
    if draft.read_bytes() == target.read_bytes():
        return
    spoken, known = ({id: token for token, id in read_tokenizer(file).get_vocab().items()} for file in (draft, target))
    differ = sorted(id for id in spoken.keys() & known.keys() if spoken[id] != known[id])
    if differ:
        id = differ[0]
        raise ValueError(
            f"the tokenizers of draft and target differ in {len(differ)} ids, the first {id}: {spoken[id]!r} in "
            f"{draft}, {known[id]!r} in {target}: not a matched pair, or one tokenizer.json was copied from elsewhere"
        )


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
