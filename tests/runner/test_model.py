"""The library gives the results of the loop, whatever was cached, stopped, abandoned or requested at the same time."""

import json

import pytest
import torch
from scripted import VOCABULARY, ScriptedSession, scripted_metadata

from eagle3.runner import load
from eagle3.runner.contract import EXPORT_RECORD
from eagle3.runner.conversation import Conversation
from eagle3.runner.loop.generation import complete
from eagle3.runner.model import Model

TEXT = "def main(argv=None):\n    "
SEEDED = {"temperature": 0.8, "seed": 11}


@pytest.fixture(scope="module")
def model(artifact):
    with load(artifact) as model:
        yield model


@pytest.fixture
def fresh(session, artifact):
    """A model with empty caches, with the session that all tests share."""
    return Model(session.metadata, lambda: session, artifact)


def some_tokens(length, seed=0):
    return torch.randint(4, 2048, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_load_and_generate_in_three_lines_give_text(model, session):
    result = model.generate(TEXT, max_new_tokens=40)
    expected = complete(session, model.text.encode(TEXT), max_new_tokens=40)
    assert result.token_ids == expected.token_ids
    assert result.text == model.text.decode(expected.token_ids)
    assert (result.finish_reason, result.prompt_token_ids) == ("length", model.text.encode(TEXT))
    json.dumps(result.as_json())


def test_pieces_join_to_the_result(fresh):
    with fresh.stream(TEXT, max_new_tokens=50) as stream:
        pieces = list(stream)
    assert "".join(piece.text for piece in pieces) == stream.result.text
    assert sum((piece.token_ids for piece in pieces), []) == stream.result.token_ids


@pytest.mark.parametrize(("chain_len", "options"), [(0, {}), ("auto", {}), (1, SEEDED), (2, SEEDED)])
def test_the_text_does_not_depend_on_the_chain_length(fresh, model, chain_len, options):
    expected = model.generate(TEXT, max_new_tokens=60, **options)
    result = fresh.generate(TEXT, max_new_tokens=60, chain_len=chain_len, **options)
    assert result.token_ids == expected.token_ids


@pytest.mark.parametrize(
    ("right", "options", "noted"),
    [
        (False, {}, True),
        (True, {}, False),
        (False, {"max_new_tokens": 15}, False),
        (False, {"chain_len": 2}, False),
    ],
)
def test_far_fewer_accepted_proposals_than_at_the_export_are_noted(tmp_path, right, options, noted):
    def greedy(prefix):
        return (5 * prefix[-1] + len(prefix)) % VOCABULARY

    def wrong(prefix):
        return (greedy(prefix) + (len(prefix) % 5 > 0)) % VOCABULARY

    (tmp_path / EXPORT_RECORD).write_text(json.dumps({"check": {"mean_acceptance_length": 2.5}}))
    metadata = scripted_metadata()
    for folder in (tmp_path, tmp_path / "elsewhere", None):
        model = Model(metadata, lambda: ScriptedSession(metadata, greedy, greedy if right else wrong), folder)
        result = model.generate([1, 2, 3], ngram=False, **({"max_new_tokens": 50} | options))
        note = model.acceptance_note(result)
        assert (note is not None) == (noted and folder == tmp_path), note
        accepted, rounds = result.stats.num_accepted_tokens, result.stats.num_drafts
        assert note is None or f"{accepted / rounds:.2f} a round in {rounds} rounds, 1.50 on" in note


def test_a_drawn_seed_is_returned_and_repeats_the_text(fresh):
    first = fresh.generate(TEXT, max_new_tokens=30, temperature=1.2)
    again = fresh.generate(TEXT, max_new_tokens=30, temperature=1.2, seed=first.options.seed)
    assert first.token_ids == again.token_ids
    assert first.as_json()["seed"] == first.options.seed
    assert len({tuple(fresh.generate(TEXT, max_new_tokens=30, temperature=1.2).token_ids) for _ in range(4)}) > 1


def test_text_after_a_stop_string_is_neither_returned_nor_kept(fresh):
    whole = fresh.generate(TEXT, max_new_tokens=60, **SEEDED)
    end = next(i for i in range(20, len(whole.text)) if whole.text.find(whole.text[i : i + 4]) == i)
    stop = whole.text[end : end + 4]
    result = fresh.generate(TEXT, max_new_tokens=60, stop=stop, **SEEDED)
    assert (result.text, result.finish_reason, result.stop_reason) == (whole.text[:end], "stop", stop)
    assert result.token_ids == whole.token_ids[: len(result.token_ids)]
    assert stop in fresh.text.decode(result.token_ids)
    assert stop not in fresh.text.decode(result.token_ids[:-1])
    assert result.stats.generation_tokens == len(result.token_ids)


def test_end_tokens_are_the_artifacts_and_those_of_the_options(fresh):
    tokens = fresh.generate(TEXT, max_new_tokens=40, **SEEDED).token_ids
    stop = next(token for token in tokens if tokens.index(token) > 5)
    result = fresh.generate(TEXT, max_new_tokens=40, stop_token_ids=[stop], **SEEDED)
    assert result.token_ids == tokens[: tokens.index(stop) + 1]
    assert (result.finish_reason, result.stop_reason) == ("stop", stop)


def test_the_cached_beginning_of_a_prompt_is_not_computed_again(fresh, session):
    first = fresh.generate(some_tokens(150), max_new_tokens=30)
    said = first.prompt_token_ids + first.token_ids
    for prompt, reused in ((said + [7, 8, 9], len(said) - 1), (said, None), (said[:160] + [5], 159)):
        result = fresh.generate(prompt, max_new_tokens=20)
        assert result.token_ids == complete(session, prompt, max_new_tokens=20).token_ids
        fresh.forget()  # the session is shared: complete() has overwritten what the model remembers
        fresh.generate(prompt[:150], max_new_tokens=30)
        if reused is not None:
            assert result.stats.reused_prompt_tokens >= reused - 1


def test_five_turns_of_a_dialogue_equal_five_separate_prompts(artifact, session):
    """The dialogue exceeds the sliding window of 64 and reaches the context's end."""
    turns = ["class Reader:", "def read(self):", "x = 1", "import os", "for i in range(3):"]
    with load(artifact) as model:
        dialogue, reused = Conversation(model, "A module.", max_new_tokens=120, ignore_eos=True), []
        for turn in turns:
            said = dialogue.ask(turn)
            fresh = Model(session.metadata, lambda: session, artifact)
            alone = fresh.generate(dialogue.messages[:-1], max_new_tokens=120, ignore_eos=True)
            assert alone.stats.reused_prompt_tokens == 0
            assert said.token_ids == alone.token_ids
            reused.append(said.stats.reused_prompt_tokens)
        assert reused[0] == 0 and all(count > 64 for count in reused[1:])
        with pytest.raises(ValueError, match="the prompt has .* tokens, the artifact's context 1024"):
            for turn in turns:
                dialogue.ask(turn)


def test_two_artifacts_can_be_open_in_one_process(artifact):
    with load(artifact) as one, load(artifact / "model.pte") as other:
        streams = one.stream(TEXT, max_new_tokens=30), other.stream(TEXT[:10], max_new_tokens=30)
        for _ in range(5):
            for stream in streams:
                next(stream)
        assert streams[0].result.token_ids != streams[1].result.token_ids


def test_a_closed_model_is_reported_as_closed(artifact):
    model = load(artifact)
    model.close()
    with pytest.raises(ValueError, match="closed"):
        model.generate(TEXT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temprature": 1}, "'temprature' is no option of a generation: the options are chain_len"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -0.1}, "temperature"),
        ({"stop": ""}, "stop"),
        ({"chain_len": 4}, "chain length 4, but the artifact verifies at most 3"),
        ({"chain_len": "fast"}, "chain_len is 'fast'"),
        ({"logit_bias": {5000: 1.0}}, "5000"),
        ({"logprobs": -1}, "logprobs is -1"),
    ],
)
def test_invalid_options_are_refused_before_anything_runs(options, message, fresh):
    with pytest.raises(ValueError, match=message):
        fresh.stream(TEXT, **options)


@pytest.mark.parametrize("prompt", ["", [], [5000], [True], [{"role": "user"}], 7])
def test_an_invalid_prompt_type_is_refused(prompt, fresh):
    with pytest.raises(ValueError):
        fresh.stream(prompt)
