"""Refuses a draft head that does not fit its target in widths, vocabulary, tokenizer or training. A head paired with a
wrong target loads and runs, but only about 1% of its proposals are accepted."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.export.checkpoints.json_fields import read_object
from eagle3.export.draft.common.description import DraftDescription
from eagle3.export.draft.kinds import KINDS
from eagle3.export.draft.vocabulary_map import check_vocabulary_map, largest_id
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
