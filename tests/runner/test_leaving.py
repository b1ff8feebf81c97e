"""A generation that is abandoned in any way frees the model at once, and does not affect the next generation."""

import gc
import threading
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import islice
from random import Random

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from scripted import VOCABULARY, ScriptedSession, greedy_sequence, scripted_metadata
from scripted_logits import LogitsSession, random_logits

from eagle3.runner.conversation import Conversation
from eagle3.runner.model import BusyError, Model

PROMPT = [3, 1, 4]
SAMPLED = {"temperature": 0.8, "seed": 11, "logprobs": 1}


@pytest.fixture
def model():
    """A function that returns a model with a scripted session, which takes token ids only."""
    metadata = replace(scripted_metadata(), has_logits=True)
    ids, logits = torch.arange(VOCABULARY), random_logits(5, 13, VOCABULARY)[0]
    return Model(metadata, lambda: LogitsSession(metadata, logits, logits[:7], ids))


@pytest.fixture(scope="module")
def text_model(artifact, session):
    return Model(session.metadata, lambda: session, artifact)


@pytest.fixture(scope="module", autouse=True)
def no_garbage_collection():
    """Free memory by reference counts alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Left(Exception):
    pass


def by_break(pieces):
    for _ in pieces():
        break


def by_an_exception_through_a_function(pieces):
    def consume():
        for number, _ in enumerate(pieces()):
            if number == 2:
                raise Left

    with pytest.raises(Left):
        consume()


def by_an_interruption(pieces):
    with suppress(KeyboardInterrupt):
        for _ in pieces():
            raise KeyboardInterrupt


def by_next(pieces):
    next(pieces())


def by_a_generator_that_is_dropped(pieces):
    def texts():
        yield from (piece.text for piece in pieces())

    next(texts())


def by_another_thread(pieces):
    thread = threading.Thread(target=by_break, args=(pieces,))
    thread.start()
    thread.join()


LEAVING = [
    by_break,
    by_an_exception_through_a_function,
    by_an_interruption,
    by_next,
    by_a_generator_that_is_dropped,
    by_another_thread,
]


@pytest.mark.parametrize("options", [{}, SAMPLED | {"chain_len": "auto"}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("leave", LEAVING)
def test_an_abandoned_stream_frees_the_model_at_once(model, leave, options):
    expected = model.generate(PROMPT, max_new_tokens=30, **options)
    leave(lambda: model.stream(PROMPT, max_new_tokens=60, **options))
    assert model.current is None
    assert model.generate(PROMPT, max_new_tokens=30, **options).token_ids == expected.token_ids


@pytest.mark.parametrize("leave", [by_break, by_an_interruption, by_a_generator_that_is_dropped])
def test_an_abandoned_reply_keeps_its_tokens_and_the_dialogue_continues(text_model, session, artifact, leave):
    dialogue = Conversation(text_model, max_new_tokens=12, ignore_eos=True)
    leave(lambda: dialogue.say("class Reader:"))
    assert text_model.current is None
    turn, answer = dialogue.messages
    assert turn == {"role": "user", "content": "class Reader:"}
    assert answer == {"role": "assistant", "content": dialogue.result.text} and dialogue.result.token_ids
    assert dialogue.result.finish_reason == "abort"
    following = dialogue.ask("x = 1")
    asked = [turn, answer, {"role": "user", "content": "x = 1"}]
    alone = Model(session.metadata, lambda: session, artifact).generate(asked, max_new_tokens=12, ignore_eos=True)
    text_model.forget()  # the session is shared
    assert following.token_ids == alone.token_ids


def test_a_stream_in_a_variable_keeps_the_model_until_it_is_closed_or_deleted(model):
    expected = model.generate(PROMPT, max_new_tokens=30).token_ids
    for end in (lambda held: held[0].close(), lambda held: held.pop()):
        held = [model.stream(PROMPT, max_new_tokens=30)]
        for _ in held[0]:
            break
        with pytest.raises(BusyError, match="end, close or delete it"):
            model.generate(PROMPT)
        assert model.current is held[0]
        end(held)
        assert model.generate(PROMPT, max_new_tokens=30).token_ids == expected


def test_a_stream_in_an_unreachable_cycle_is_closed_when_the_model_is_needed(model):
    holder = [model.stream(PROMPT, max_new_tokens=30)]
    holder.append(holder)
    next(holder[0])
    del holder
    assert model.current is not None
    assert model.generate(PROMPT, max_new_tokens=5).token_ids


def test_a_model_is_busy_during_another_threads_generation(model):
    """A stream whose thread is computing a piece is not closed."""
    entered, leave = threading.Event(), threading.Event()

    @contextmanager
    def waiting(session, verify=model.session.target_verify):
        def wait(tokens, input_pos):
            entered.set()
            assert leave.wait(20)
            return verify(tokens, input_pos)

        session.target_verify = wait
        yield
        del session.target_verify

    with waiting(model.session):
        found = []
        thread = threading.Thread(target=lambda: found.append(model.generate(PROMPT, max_new_tokens=9).token_ids))
        thread.start()
        assert entered.wait(20)
        with pytest.raises(BusyError):
            model.generate(PROMPT)
        with pytest.raises(BusyError):
            model.close()
        leave.set()
        thread.join()
    assert found == [model.generate(PROMPT, max_new_tokens=9).token_ids]


@pytest.mark.parametrize("next_turn", [lambda dialogue: dialogue.ask("x = 1"), lambda dialogue: dialogue.reset()])
def test_an_unfinished_reply_in_a_variable_ends_with_the_next_turn(text_model, next_turn):
    dialogue = Conversation(text_model, "A module.", max_new_tokens=12, ignore_eos=True)
    answer = dialogue.say("class Reader:")
    next(answer)
    next_turn(dialogue)
    messages = list(dialogue.messages)
    assert [message["role"] for message in messages] in (["system", *["user", "assistant"] * 2], ["system"])
    assert list(answer) == []
    del answer
    assert dialogue.messages == messages


def test_a_model_can_be_closed_while_a_stream_is_unfinished(model):
    model.session.close = lambda: None
    stream = model.stream(PROMPT)
    next(stream)
    model.close()
    assert list(stream) == [] and stream.result.finish_reason == "abort"


@settings(max_examples=100, deadline=None)
@given(random=st.randoms(use_true_random=True))
def test_the_recorded_cache_contents_are_right_after_any_abandoned_generation(random: Random):
    """The scripted session refuses to read entries that were never written or belong to another prefix."""

    def greedy(prefix):
        return (7 * prefix[-1] + 3 * len(prefix) + prefix[0]) % VOCABULARY

    def proposal(prefix):
        return greedy(prefix) if (len(prefix) + prefix[-1]) % 3 else 0

    window = random.choice([0, 0, 8])
    metadata = scripted_metadata(window=window, draft_window=random.choice([0, window]))
    session = ScriptedSession(metadata, greedy, proposal)
    model, said = Model(metadata, lambda: session), [1]
    for _ in range(random.randint(2, 6)):
        session.has_decode, session.has_speculate = random.random() < 0.5, random.random() < 0.5
        prompt = said[: random.randint(1, len(said))] + random.choices(range(VOCABULARY), k=random.randint(0, 8))
        prompt = prompt[-40:]
        leave, pieces = random.choice([None, *LEAVING]), []
        chain_len = random.choice([None, 0, 1, 2, 3, "auto"])
        note(f"{prompt} {leave} {chain_len} {vars(model.cached)}")
        if leave in (None, by_an_exception_through_a_function):
            tokens = model.generate(prompt, max_new_tokens=20, chain_len=chain_len).token_ids
            assert tokens == greedy_sequence(greedy, prompt, 20)
        else:

            def stream(prompt=prompt, chain_len=chain_len, pieces=pieces):
                for piece in islice(model.stream(prompt, max_new_tokens=20, chain_len=chain_len), 12):
                    pieces.append(piece)
                    yield piece

            leave(stream)
            tokens = sum((piece.token_ids for piece in pieces), [])
            assert tokens == greedy_sequence(greedy, prompt, 20)[: len(tokens)]
        assert model.current is None
        said = prompt + tokens
