"""Refuses a draft head that does not fit its target: widths, vocabularies, tokenizers, training. A wrong pair loads,
runs and accepts about 1%."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.export.checkpoints.json_fields import read_object
from eagle3.export.checks.tensors import check_draft
from eagle3.export.draft.description import DraftDescription
from eagle3.export.draft.vocabulary_map import check_vocabulary_map, largest_id

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def check_pair(draft: DraftDescription, target_config: "PreTrainedConfig", taps: tuple[int, ...]) -> None:
    """Raise ValueError where the draft's tensors cannot belong to this target."""
    hidden, vocabulary = target_config.hidden_size, target_config.vocab_size
    trained_for = f"; the head names {draft.verifier} as its target" if draft.verifier else ""
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
    if draft.target_vocab_size != vocabulary:
        raise ValueError(
            f"the draft is for a vocabulary of {draft.target_vocab_size}, the target has {vocabulary}: "
            f"likely not a matched pair{trained_for}"
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
    check_draft(draft)
    if draft.maps_vocabulary:
        check_vocabulary_map(draft, vocabulary)
    elif draft.draft_vocab_size != vocabulary:
        raise ValueError(
            f"the draft speaks {draft.draft_vocab_size} tokens, the target {vocabulary}, and no d2t maps them"
        )


def within_vocabulary(draft: DraftDescription, vocabulary: int) -> DraftDescription:
    """The head for a target whose file leaves out the last rows of its vocabulary, which no token has.

    Raises ValueError for a head that speaks one of them.
    """
    if vocabulary == draft.target_vocab_size:
        return draft
    most = largest_id(draft) if draft.maps_vocabulary else draft.draft_vocab_size - 1
    if not draft.shares_lm_head and most >= vocabulary:
        raise ValueError(
            f"the draft speaks ids up to {most}, but the target's file has rows for {vocabulary} tokens alone: name "
            "its Hugging Face folder"
        )
    return replace(draft, target_vocab_size=vocabulary)


def check_trained_for(draft: DraftDescription, checkpoint: Path) -> None:
    """Raise ValueError where the head names another family than the target's, or has another tokenizer."""
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
    """Names of models without what is asked of them: Gemma4ForCausalLM and Gemma4ForConditionalGeneration are one."""
    names = architectures if isinstance(architectures, Iterable) and not isinstance(architectures, str) else ()
    return {re.sub(r"(For[A-Z]\w*|LMHeadModel|TextModel|Model)$", "", name) for name in names if isinstance(name, str)}


def _check_tokenizers(draft: Path, target: Path) -> None:
    """The same ids must be the same tokens; one may have more of them."""
    if draft.read_bytes() == target.read_bytes():
        return
    from tokenizers import Tokenizer

    def read(file: Path) -> dict[int, str]:
        try:
            return {id: token for token, id in Tokenizer.from_file(str(file)).get_vocab().items()}
        except Exception as error:  # tokenizers has no class of its own for it
            raise ValueError(
                f"{file} is no tokenizer that the tokenizers library reads ({error}): copy it again"
            ) from error

    spoken, known = read(draft), read(target)
    differ = sorted(id for id in spoken.keys() & known.keys() if spoken[id] != known[id])
    if differ:
        id = differ[0]
        raise ValueError(
            f"the tokenizers of draft and target differ in {len(differ)} ids, the first {id}: {spoken[id]!r} in "
            f"{draft}, {known[id]!r} in {target}: not a matched pair, or one tokenizer.json was copied from elsewhere"
        )
