"""A conversation goes on in the other runner: the file of one is the other's."""

import stat

import pytest
from native_runs import SAME, run

from eagle3.runner import load

PROMPT = "def add(first, second):\n    return first + second\n\n" * 60


def turns_of(model, length: int, **options):
    """The turns of a dialogue: prompt and result."""
    given = model.text.encode(PROMPT)
    text, turns = given[:length], []
    for turn in range(4):
        turns.append((list(text), model.generate(text, ngram=False, **options)))
        text = text + turns[-1][1].token_ids + given[100 + 9 * turn : 140 + 15 * turn]
    return turns


@pytest.mark.parametrize(
    ("length", "options"), [(600, {"max_new_tokens": 24}), (20, {"max_new_tokens": 24, "temperature": 0.8, "seed": 5})]
)
def test_turns_by_one_runner_and_the_other_are_those_of_a_dialogue_that_never_stopped(
    built, model, artifact, tmp_path, length, options
):
    file = tmp_path / "kept"
    model.forget()
    for number, (text, expected) in enumerate(turns_of(model, length, **options)):
        if number in (1, 2):  # one resumes the other's file, and its own
            code, (mine,), said = run(built, artifact, [text], session=file, **options)
            assert code == 0 and said.count(f"{file}: ") == 2, said
            assert mine["token_ids"] == expected.token_ids
            counts = expected.stats.counts()
            assert {key: mine["stats"][key] for key in SAME} == {key: counts[key] for key in SAME}
        else:
            if number:
                model.forget()
                assert model.resume(file).note == "messages"
            result = model.generate(text, ngram=False, **options)
            assert result.token_ids == expected.token_ids
            assert result.stats.counts() == expected.stats.counts()
            model.save(file, "messages")
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_both_runners_write_the_same_file(built, model, artifact, tmp_path):
    prompt = model.text.encode(PROMPT)[:300]
    model.forget()
    model.generate(prompt, max_new_tokens=9, ngram=False)
    model.save(tmp_path / "theirs")
    run(built, artifact, [prompt], session=tmp_path / "mine", max_new_tokens=9)
    mine, theirs = ((tmp_path / name).read_bytes() for name in ("mine", "theirs"))
    head = 104 + 8 * (len(prompt) + 9)
    assert len(mine) == len(theirs) and mine[:head] == theirs[:head]  # the caches differ in the last bits


def test_files_are_refused_in_the_same_words(built, model, artifact, tmp_path):
    file = tmp_path / "kept"
    model.generate([1, 2, 3], max_new_tokens=9)
    model.save(file)
    data = file.read_bytes()
    flipped = [0, 9, 45, 53, 60, 70, 80, 90, 98, 104, 111, 500, 100_000, len(data) - 1]
    cases = [data[:at] + bytes([data[at] ^ 128]) + data[at + 1 :] for at in flipped]
    for case in (*cases, b"", data[:50], data[:200], data[:-1], data + b"0", b"text, no conversation"):
        file.write_bytes(case)
        with pytest.raises(ValueError) as refused:
            model.resume(file)
        code, _, error = run(built, artifact, [[3]], session=file)
        assert code == 1 and error.strip() == f"Error: {refused.value}"
        assert file.read_bytes() == case
    code, _, error = run(built, artifact, [[3]], session=tmp_path / "none" / "kept", max_new_tokens=1)
    assert code == 1 and error.strip() == f"Error: {tmp_path / 'none' / 'kept'}: No such file or directory"


def test_a_dialogue_changes_runners_on_all_kinds_of_artifacts(built, family_exports, tmp_path):
    """Heads with a cache and without; sinks, recurrent layers, windows. Each state has several pieces."""
    options = {"max_new_tokens": 8, "ignore_eos": True}
    for folder in sorted(family_exports.iterdir()):
        artifact, file = folder / "out", tmp_path / folder.name
        with load(artifact) as model:
            if not model.metadata.state_groups:
                code, _, said = run(built, artifact, [[3]], session=file)
                assert code == 1 and "no method read_state" in said
                continue
            text, turns = [(7 * i + i * i) % model.metadata.vocab_size for i in range(20)], []
            for turn in range(4):
                turns.append((list(text), model.generate(text, ngram=False, **options)))
                text = text + turns[-1][1].token_ids + text[2 : 5 + turn]
            for number, (text, expected) in enumerate(turns):
                reused = expected.stats.reused_prompt_tokens
                if number % 3:
                    code, (mine,), said = run(built, artifact, [text], session=file, **options)
                    assert code == 0 and mine["token_ids"] == expected.token_ids, (folder.name, said)
                    assert mine["stats"]["reused_prompt_tokens"] == reused
                    continue
                model.generate(text[::-1], max_new_tokens=5, ngram=False)
                model.forget()
                if number:
                    model.resume(file)
                result = model.generate(text, ngram=False, **options)
                assert (result.token_ids, result.stats.reused_prompt_tokens) == (expected.token_ids, reused), (
                    folder.name
                )
                model.save(file)
            assert reused > 20
