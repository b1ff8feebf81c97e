"""A conversation that is cut and resumed continues as one that never stopped, and no damaged file is taken up."""

import json
import os
import random
import stat
import subprocess
import sys
from dataclasses import replace

import pytest
from commands import fail_command

from eagle3.runner import Conversation, load
from eagle3.runner.commands.run import main
from eagle3.runner.loop.cached_tokens import CachedTokens
from eagle3.runner.model import BusyError, Model
from eagle3.runner.session_file import DIGEST_BYTES, HEAD, resume, save

TURNS = ("def read(path):", "class Reader:\n    pass", "import os\nimport sys")
GREEDY, SAMPLED = {"max_new_tokens": 24}, {"max_new_tokens": 24, "temperature": 0.8, "seed": 3}


def prompts(model, length: int, **options) -> list[tuple[list[int], list[int], int]]:
    """The turns of a dialogue with a model: prompt, answer, reused positions."""
    given = model.text.encode("def add(first, second):\n    return first + second\n\n" * 80)
    text, turns = given[:length], []
    for turn in range(3):
        result = model.generate(text, **options)
        turns.append((list(text), result.token_ids, result.stats.reused_prompt_tokens))
        text = text + result.token_ids + given[100 + 9 * turn : 130 + 15 * turn]
    return turns


@pytest.fixture(scope="module")
def other(artifact):
    """The artifact, opened a second time."""
    with load(artifact, defer=True) as model:
        yield model


@pytest.mark.parametrize(("length", "options"), [(9, GREEDY), (700, GREEDY), (60, SAMPLED)])
def test_a_dialogue_cut_after_each_turn_continues_as_one_that_never_stopped(model, other, tmp_path, length, options):
    """Between the turns the caches are another dialogue's. The rings of gemma4-tiny's sliding layers have 128 slots, so
    that 700 tokens have overwritten them."""
    model.forget()
    turns, file = prompts(model, length, **options), tmp_path / "kept"
    for text, answer, reused in turns:
        if file.exists():
            saved = other.resume(file)
            assert (saved.bytes, saved.note) == (file.stat().st_size, "über")
        result = other.generate(text, **options)
        assert (result.token_ids, result.stats.reused_prompt_tokens) == (answer, reused)
        other.save(file, "über")
        other.generate([5, *text[: 300 + reused]], max_new_tokens=9)
    assert turns[-1][2] > length


@pytest.fixture(scope="module")
def kept(model, tmp_path_factory):
    """A file with a short conversation, and its next prompt."""
    file = tmp_path_factory.mktemp("kept") / "conversation"
    model.forget()
    turns = prompts(model, 9, **GREEDY)
    model.forget()
    model.generate(turns[0][0], **GREEDY)
    model.save(file)
    return file, turns[1][0]


def test_no_damaged_or_cut_file_is_taken_up(model, kept, tmp_path):
    """Flips a bit or cuts a file at 200 places: more of them in the head, the tokens and the checksum."""
    file, after = kept
    data, chosen = file.read_bytes(), random.Random(7)
    ends = [*range(HEAD.size + 24), *range(len(data) - DIGEST_BYTES, len(data))]
    places = chosen.sample(ends, 90) + chosen.sample(range(len(data)), 110)
    model.forget()
    model.generate(after, **GREEDY)
    held = list(model.cached.tokens)
    damaged = tmp_path / "damaged"
    for number, place in enumerate(places):
        if number % 4:
            damaged.write_bytes(data[:place] + bytes([data[place] ^ 1 << number % 8]) + data[place + 1 :])
        else:
            damaged.write_bytes(data[:place])
        with pytest.raises(ValueError) as refused:
            model.resume(damaged)
        assert str(damaged) in str(refused.value) and "\n" not in str(refused.value)
        assert model.cached.tokens == held
    damaged.write_bytes(data + b"\0")
    with pytest.raises(ValueError, match="damaged or cut"):
        model.resume(damaged)
    assert model.generate(after, **GREEDY).stats.reused_prompt_tokens > len(after) - 5


def test_a_file_of_another_artifact_is_refused(session, artifact, kept):
    other = Model(session.metadata, lambda: session, artifact, lambda: "ab" * 32)
    with pytest.raises(ValueError, match="belongs to another artifact .sha256 .*this one has abababababab"):
        other.resume(kept[0])
    with pytest.raises(ValueError, match="no artifact"):
        Model(session.metadata, lambda: session).save(kept[0])


def test_a_file_is_for_its_owner_alone_and_appears_whole(model, kept, tmp_path, monkeypatch):
    file = tmp_path / "folder" / "conversation"
    file.parent.mkdir()
    model.resume(kept[0])
    before = os.umask(0)
    try:
        saved = model.save(file)
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and file.read_bytes() == kept[0].read_bytes()
    assert saved.bytes == file.stat().st_size and saved.tokens == len(model.cached.tokens)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        model.save(file)
    assert list(file.parent.iterdir()) == [file] and file.read_bytes() == kept[0].read_bytes()


def test_a_running_generation_keeps_its_caches(model, kept):
    with model.stream([1, 2, 3], max_new_tokens=9) as stream:
        next(stream)
        with pytest.raises(BusyError):
            model.resume(kept[0])
        with pytest.raises(BusyError):
            model.save(kept[0])


def test_an_empty_conversation_is_kept_too(model, kept, tmp_path):
    model.forget()
    model.save(tmp_path / "empty", "a note")
    model.resume(kept[0])
    assert model.resume(tmp_path / "empty").note == "a note" and not model.cached.tokens
    assert model.generate(kept[1], **GREEDY).stats.reused_prompt_tokens == 0


def test_an_artifact_without_sessions_refuses_in_a_line(session, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "metadata", replace(session.metadata, state=None))
    for call in (save, resume):
        with pytest.raises(ValueError, match="no method read_state, .*without --no-sessions"):
            call(tmp_path / "file", session, CachedTokens(), "ab" * 32)


def test_a_conversation_is_taken_up_with_its_messages(model, artifact, tmp_path):
    whole, file = Conversation(model, "Be brief.", max_new_tokens=20), tmp_path / "dialogue"
    model.forget()
    answers = [whole.ask(turn) for turn in TURNS]
    for number, turn in enumerate(TURNS):
        model.forget()
        part = Conversation(model, "Be brief." if number != 1 else None, max_new_tokens=20)
        if number:
            part.resume(file)
        answer = part.ask(turn)
        assert answer.token_ids == answers[number].token_ids
        assert answer.stats.reused_prompt_tokens == answers[number].stats.reused_prompt_tokens
        part.save(file)
    assert part.messages == whole.messages
    part.reset()
    assert part.messages == whole.messages[:1]
    other = Conversation(model, "Be long.")
    with pytest.raises(ValueError, match="another system prompt"):
        other.resume(file)
    assert len(other.messages) == 1 and not model.cached.tokens
    model.save(file, "no messages")
    with pytest.raises(ValueError, match="holds no messages: Model.resume"):
        other.resume(file)


def test_the_command_continues_a_dialogue_in_another_process(model, artifact, tmp_path):
    whole, file = Conversation(model, max_new_tokens=20), tmp_path / "dialogue"
    model.forget()
    first = whole.ask(TURNS[0])
    whole.save(file)
    expected = whole.ask(TURNS[1])
    model.forget()
    flags = artifact, "--chat", "--session", file, "--max-new-tokens", "20", "--json", "--prompt"
    command = [sys.executable, "-c", "from eagle3.runner.commands.run import main; main()", *flags, TURNS[1]]
    done = subprocess.run(command, capture_output=True, text=True)
    result = json.loads(done.stdout)
    assert result["token_ids"] == expected.token_ids
    assert result["stats"]["reused_prompt_tokens"] == expected.stats.reused_prompt_tokens
    sizes = (len(each.prompt_token_ids) + len(each.token_ids) for each in (first, expected))
    assert done.stderr.splitlines() == [f"{file}: {size} tokens, 1.2 MB" for size in sizes]
    model.resume(file)
    assert model.cached.tokens == [*expected.prompt_token_ids, *expected.token_ids]


def test_the_command_refuses_what_it_cannot_keep(model, artifact, tmp_path):
    file, text = tmp_path / "dialogue", ("--chat", "--prompt", "x")
    for flags in ((*text, "--verify-lossless"), ("--prompt", "x"), ("--chat", "--prompts", __file__)):
        code, says = fail_command(main, artifact, "--session", file, *flags)
        assert code == 2 and "--session keeps a dialogue" in says
    code, says = fail_command(main, artifact, *text, "--session", tmp_path / "none" / "dialogue")
    assert code == 1 and f"{tmp_path / 'none'} is no folder" in says
    file.write_bytes(b"cut")
    code, says = fail_command(main, artifact, *text, "--session", file)
    assert code == 1 and f"{file} is no conversation" in says and file.read_bytes() == b"cut"
