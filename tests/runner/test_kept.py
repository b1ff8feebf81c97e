"""Dialogues that take turns each go on from their own state, in memory and on disk."""

import stat

import pytest

from eagle3.runner import load
from eagle3.runner.kept import SUFFIX, WORTH, KeptDialogues

OPTIONS = {"max_new_tokens": 12, "ngram": False}


@pytest.fixture(scope="module")
def other(artifact):
    """The artifact, opened a second time."""
    with load(artifact, defer=True) as model:
        yield model


@pytest.fixture(scope="module")
def dialogues(model):
    """Three dialogues of three turns, each by itself: prompts, answers and reused positions."""
    starts = "def add(first, second):\n    return", "class Reader:\n    pass\n", "import os\nimport sys\n"
    found = []
    for number, start in enumerate(starts):
        given, turns = model.encode(start * 20), []
        text = given[: 60 + 20 * number]
        model.forget()
        for turn in range(3):
            result = model.generate(text, **OPTIONS)
            turns.append((list(text), result.token_ids, result.stats.reused_prompt_tokens))
            text = text + result.token_ids + given[5 * turn : 40 + 5 * turn]
        found.append(turns)
    return found


def play(kept, models, dialogues, turns):
    """Let dialogues take turns. Checks the answers, and returns the reused positions of each turn beside those of the
    dialogue by itself."""
    reused = []
    for number, turn in enumerate(turns):
        model, (text, answer, alone) = models[number % len(models)], dialogues[turn[0]][turn[1]]
        kept.prepare(model, text)
        result = model.generate(text, **OPTIONS)
        assert result.token_ids == answer
        reused.append((result.stats.reused_prompt_tokens, alone))
    return reused


IN_TURN = [(dialogue, turn) for turn in range(3) for dialogue in range(3)]


@pytest.mark.parametrize("models", [1, 2])
def test_dialogues_that_take_turns_reuse_what_each_reuses_by_itself(model, other, dialogues, models):
    lines, used = [], [model, other][:models]
    for each in used:
        each.forget()
    kept = KeptDialogues(1 << 30, lines.append)
    kept.open(model)
    reused = play(kept, used, dialogues, IN_TURN)
    assert all(found == alone for found, alone in reused[3:]) and reused[-1][0] > 100 and not lines
    assert len(kept._kept) <= 3 + models  # a later state of a dialogue takes the place of an earlier one
    kept.close([model])


def test_the_least_recently_used_goes_first(model, dialogues):
    model.forget()
    probe = KeptDialogues(1 << 30, print)
    play(probe, [model], dialogues, [(0, 0), (1, 0)])
    size = probe._kept[0].bytes
    model.forget()
    kept = KeptDialogues(2 * size + size // 2, print)
    reused = play(kept, [model], dialogues, [*IN_TURN[:3], (0, 1), (1, 1), (0, 2)])
    assert [found == alone for found, alone in reused[3:]] == [True, False, True] and reused[4][0] == 0
    assert sum(each.bytes for each in kept._kept) <= 2 * size + size // 2
    none = KeptDialogues(size // 2, print)
    model.forget()
    assert all(found == 0 for found, _ in play(none, [model], dialogues, [(0, 0), (1, 0), (0, 1), (1, 1)])[:3])
    assert not none._kept


def test_dialogues_outlive_the_process_in_a_folder(model, other, dialogues, tmp_path):
    lines, folder = [], tmp_path / "sessions"
    model.forget()
    kept = KeptDialogues(1 << 30, lines.append, folder)
    kept.open(model)
    play(kept, [model], dialogues, IN_TURN[:5])
    kept.close([model])
    files = sorted(folder.iterdir())
    assert len(files) == 3 and not lines
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    other.forget()
    again = KeptDialogues(1 << 30, lines.append, folder)
    again.open(other)
    assert all(found == alone for found, alone in play(again, [other], dialogues, [(2, 1), (0, 2), (1, 2)]))
    again.close([other])
    smaller = KeptDialogues(kept._kept[0].bytes + 1, lines.append, folder)
    smaller.open(other)
    assert len(list(folder.iterdir())) == 1 and not lines


def test_a_damaged_file_is_reported_and_the_prompt_computed_anew(model, dialogues, tmp_path):
    lines = []
    model.forget()
    kept = KeptDialogues(1 << 30, lines.append, tmp_path)
    kept.open(model)
    play(kept, [model], dialogues, [(0, 0)])
    kept.close([model])
    (file,) = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    data[-5000] ^= 1
    file.write_bytes(data)
    (tmp_path / f"foreign{SUFFIX}").write_bytes(data[:8] + bytes(32) + data[40:])
    model.forget()
    again = KeptDialogues(1 << 30, lines.append, tmp_path)
    again.open(model)
    assert play(again, [model], dialogues, [(0, 1)])[0][0] == 0
    assert "foreign" in lines[0] and "belongs to another artifact" in lines[0]
    assert len(lines) == 2 and lines[1].startswith(f"computed anew: {file} is damaged")
    again.close([])
    assert [path.name for path in tmp_path.iterdir()] == [f"foreign{SUFFIX}"]


def test_a_few_tokens_are_not_kept(model, dialogues):
    model.forget()
    model.generate([1, 2, 3], max_new_tokens=WORTH - 5, ignore_eos=True)
    kept = KeptDialogues(1 << 30, print)
    kept.prepare(model, dialogues[0][0][0])
    assert not kept._kept
