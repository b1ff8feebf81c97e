"""With ``min_tokens`` nothing ends a text before it has this number of tokens, with and without speculation."""

from dataclasses import replace

import pytest
import torch
from scripted import VOCABULARY, scripted_metadata
from scripted_logits import LogitsSession, random_logits
from transformers import MinNewTokensLengthLogitsProcessor

from eagle3.runner.contract import Metadata
from eagle3.runner.hosts.session import Step
from eagle3.runner.loop.choice import Greedy, MinTokens
from eagle3.runner.model import Model
from eagle3.runner.options import Options
from eagle3.runner.text.text import Text, TextStream
from eagle3.targets import TARGETS

PROMPT, LEAST = [3, 1, 4], 9
ENDS = (2, 5, 7, 11)


def model(seed: int = 5, **fields) -> Model:
    metadata = replace(scripted_metadata(), has_logits=True, eos_ids=ENDS[:3], **fields)
    logits = random_logits(seed, VOCABULARY, VOCABULARY)[0]
    return Model(metadata, lambda: LogitsSession(metadata, logits, logits[:7], torch.arange(VOCABULARY)))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 2.0, "seed": 3}, {"repetition_penalty": 1.5}])
@pytest.mark.parametrize("seed", range(3))
def test_no_end_token_comes_before_min_tokens_and_the_first_one_after_ends_the_text(seed, sampling):
    asked = {"max_new_tokens": 30, "min_tokens": LEAST, "stop_token_ids": ENDS[3:], **sampling}
    expected = model(seed).generate(PROMPT, chain_len=0, **asked)
    tokens = expected.token_ids
    assert not {*tokens[:LEAST]} & {*ENDS} and not {*tokens[:-1]} & {*ENDS}
    assert expected.finish_reason == "length" or tokens[-1] in ENDS
    for chain_len in (1, 2, 3, "auto"):
        assert model(seed).generate(PROMPT, chain_len=chain_len, **asked).token_ids == tokens
    without = model(seed).generate(PROMPT, chain_len=0, **asked | {"min_tokens": 0}).token_ids
    assert len(without) <= LEAST or without == tokens


def test_without_min_tokens_some_texts_end_before_that_number():
    lengths = [
        len(model(seed).generate(PROMPT, max_new_tokens=30, stop_token_ids=ENDS[3:]).token_ids) for seed in range(8)
    ]
    assert min(lengths) < LEAST


def test_min_tokens_masks_the_logits_as_transformers_does():
    logits = torch.randn(1, 4, VOCABULARY, generator=torch.Generator().manual_seed(1))
    logits[0, :, ENDS] += 4
    least, before = 3, 1
    choice = MinTokens(Greedy(), least, ENDS)
    choice.accept([0] * before)
    found = choice.target(Step(logits.argmax(-1), None, logits), [0, 0, 0])
    process = MinNewTokensLengthLogitsProcessor(0, least, list(ENDS))
    expected = [
        int(process(torch.zeros(1, before + row, dtype=torch.long), logits[:, row]).argmax()) for row in range(4)
    ]
    assert found.tolist() == [expected]
    assert expected != logits.argmax(-1)[0].tolist()


def test_no_stop_string_ends_a_text_before_min_tokens():
    text = Text(TARGETS["gemma4-tiny"].checkpoint)
    ids = text.tokenizer.encode("one, two, three, four", add_special_tokens=False).ids
    commas = [index for index, token in enumerate(ids) if "," in text.decode([token])]
    stream = TextStream(text, [","], least=commas[0] + 1)
    written = "".join(stream.push([token]) for token in ids) + stream.finish()
    assert (written, stream.kept) == (text.decode(ids[: commas[1]]), commas[1] + 1)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"min_tokens": -1}, "min_tokens is -1, but must be a whole number, 0 or more"),
        ({"min_tokens": None}, "min_tokens is None"),
        ({"min_tokens": 9, "max_new_tokens": 8}, "min_tokens is 9, but max_new_tokens 8"),
        ({"min_tokens": 1, "structured_outputs": {"regex": "a"}}, "leave min_tokens out"),
    ],
)
def test_invalid_values_of_min_tokens_are_refused(asked, says):
    with pytest.raises(ValueError, match=says):
        Options.of(**asked)


def test_min_tokens_without_logits_is_refused_with_what_it_needs():
    metadata: Metadata = replace(model().metadata, has_logits=False)
    with pytest.raises(ValueError, match="min_tokens needs logits"):
        Options.of(min_tokens=3).check(metadata)
    Options.of(min_tokens=3, ignore_eos=True).check(metadata)
