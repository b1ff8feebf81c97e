"""A file of prompts: all prompts are checked first, earlier results are kept, and each prompt has noise of its own."""

import json
from collections import Counter

import pytest
from batch_prompts import PROMPTS
from commands import fail_command, run_command

from eagle3.runner.commands import batch
from eagle3.runner.commands.batch import run_batch
from eagle3.runner.commands.run import main
from eagle3.runner.conversation import Conversation
from eagle3.runner.model import Model
from eagle3.runner.text.prompts import mixed_seed

LONG = {"prompt": "x = 1\n" * 2000}


@pytest.fixture
def fresh(session, artifact):
    return Model(session.metadata, lambda: session, artifact)


@pytest.fixture
def unused(session, artifact):
    """A model whose methods are never loaded."""

    def load():
        raise AssertionError("the methods were loaded")

    return Model(session.metadata, load, artifact)


@pytest.fixture
def files(tmp_path):
    return tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"


def write(file, entries) -> None:
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def records(file) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def run(model, files, keep_going=False, chat=False, **options) -> list[dict]:
    run_batch(model, *files, chat, None, {"max_new_tokens": 6} | options, keep_going)
    return records(files[1])


def tokens_by_turn(found) -> dict:
    return {(record["line"], record["turn"]): record["token_ids"] for record in found}


# --- checked first

BAD = [
    ({"prompt": "a", "stop": None}, "stop is None, but must be one string or several"),
    ({"prompt": "a", "stop": "\ufffd"}, "U+FFFD"),
    ({"prompt": "a", "stop_token_ids": 5}, "stop_token_ids is 5, but must be a list of token ids"),
    ({"prompt": "a", "stop_token_ids": [2048]}, "id 2048 of stop_token_ids is outside the vocabulary 0..2047"),
    ({"prompt": "a", "logprobs": 2049}, "logprobs is 2049, but the vocabulary has 2048 tokens"),
    ({"prompt": "a", "ignore_eos": "no"}, "ignore_eos is 'no', but must be true or false"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "an id of logit_bias is 'x'"),
    ({"prompt": "a", "logit_bias": {"2048": 1}}, "id 2048 of logit_bias is outside"),
    ({"prompt_tokens": [5000]}, "token id 5000 is outside the vocabulary"),
    (LONG, "the prompt has"),
    ({"turns": ["import os", "x = 1\n" * 2000]}, "the prompt has"),
    ({"turns": ["import os", *["x = 1"] * 400]}, "the prompt has"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "not tool"),
]


def test_a_bad_prompt_is_refused_before_anything_is_loaded_or_written(unused, files, capsys):
    write(files[0], [PROMPTS[0], BAD[0][0], PROMPTS[1]])
    with pytest.raises(ValueError, match=f"^{files[0]} line 2: {BAD[0][1]}.*--keep-going"):
        run(unused, files)
    assert not files[1].exists() and capsys.readouterr().err == ""


def test_each_bad_prompt_is_reported_in_one_line_and_earlier_results_stay(artifact, files):
    write(files[0], [PROMPTS[0], *(entry for entry, _ in BAD), PROMPTS[1]])
    files[1].write_text("")
    from click.testing import CliRunner

    done = CliRunner().invoke(main, [str(artifact), "--prompts", str(files[0]), "--output", str(files[1])])
    *lines, last = done.stderr.splitlines()
    assert done.exit_code == 1
    assert len(lines) == len(BAD)
    for number, (line, (_, words)) in enumerate(zip(lines, BAD, strict=True), 2):
        assert line.startswith(f"Error: {files[0]} line {number}: ") and words in line
    assert last.startswith(f"Error: {len(BAD)} of {len(BAD) + 2} prompts of ") and "nothing was run" in last
    assert files[1].read_text() == ""


def test_keep_going_runs_the_prompts_that_can_be_run(fresh, files, capsys):
    write(files[0], [LONG, PROMPTS[0], {"promt": "a"}, PROMPTS[2]])
    with pytest.raises(ValueError, match="2 of 4 prompts of .* could not be run"):
        run(fresh, files, keep_going=True)
    assert [(record["line"], record["turn"]) for record in records(files[1])] == [(2, 0), (4, 0), (4, 1), (4, 2)]
    told = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in told[:2]] == [f"{files[0]} line {number}" for number in (1, 3)]


def test_a_turn_that_fails_loses_no_earlier_result_and_is_run_again(fresh, files, monkeypatch, capsys):
    write(files[0], [PROMPTS[0], PROMPTS[2], PROMPTS[1]])
    ask, failing = Conversation.ask, [True]

    def fails(conversation, text):
        if text == "x = 1" and failing.pop():
            raise ValueError("the prompt has\ntoo many tokens")
        return ask(conversation, text)

    monkeypatch.setattr(Conversation, "ask", fails)
    with pytest.raises(ValueError) as failure:
        run(fresh, files, temperature=1.0, seed=3)
    told = capsys.readouterr().err + str(failure.value)
    assert f"{files[0]} line 2: the prompt has too many tokens" in told
    assert [(record["line"], record["turn"]) for record in records(files[1])] == [(1, 0), (2, 0)]
    monkeypatch.undo()
    resumed = run(fresh, files, temperature=1.0, seed=3)
    files[1].unlink()
    assert tokens_by_turn(resumed) == tokens_by_turn(run(fresh, files, temperature=1.0, seed=3))


# --- resumed


def test_a_run_that_ended_anywhere_is_continued_by_the_next_one(fresh, unused, files):
    options = {"temperature": 1.0, "seed": 3}
    write(files[0], PROMPTS)
    whole = run(fresh, files, **options)
    data = files[1].read_bytes()
    ends = [0]
    for line in data.split(b"\n")[:-1]:
        ends.append(ends[-1] + len(line) + 1)
    for end in (0, 1, ends[1], ends[2] - 1, ends[2] + 40, len(data) - 2):
        files[1].write_bytes(data[:end])
        assert tokens_by_turn(run(fresh, files, **options)) == tokens_by_turn(whole)
        kept = max(each for each in ends if each <= end)
        assert files[1].read_bytes().startswith(data[:kept])
        assert len(records(files[1])) == len(whole)
    written = files[1].read_bytes()
    run(unused, files, **options)
    assert files[1].read_bytes() == written


def test_results_of_an_earlier_version_are_kept(unused, files):
    write(files[0], PROMPTS[:1])
    write(files[1], [{"line": 1, "turn": 0, "token_ids": [7], "text": "a"}])
    assert run(unused, files) == records(files[1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda prompts, options: prompts.__setitem__(0, {"prompt_tokens": [3]}), "prompt of line 1, its options"),
        (lambda prompts, options: prompts.pop(0), "line 1"),
        (lambda prompts, options: prompts[1].update(top_k=5), "prompt of line 2, its options"),
        (lambda prompts, options: options.update(seed=2), "prompt of line 1, its options"),
        (lambda prompts, options: options.update(chat=True), "prompt of line 2, its options"),
        (lambda prompts, options: prompts.pop(), "line 3 has no prompt that can be run"),
    ],
)
def test_results_of_another_batch_are_refused_and_not_overwritten(fresh, unused, files, change, words):
    prompts, options = [dict(prompt) for prompt in PROMPTS], {"temperature": 1.0, "seed": 1}
    write(files[0], prompts)
    run(fresh, files, **options)
    data = files[1].read_bytes()
    change(prompts, options)
    write(files[0], prompts)
    with pytest.raises(ValueError, match=words) as failure:
        run(unused, files, **options)
    assert str(failure.value).startswith(f"{files[1]} line ") and "give another --output" in str(failure.value)
    assert files[1].read_bytes() == data


def test_an_output_file_without_results_is_not_written_to(unused, files):
    write(files[0], PROMPTS[:1])
    results = '{"line": "1", "turn": 0}', '{"line": 1, "turn": 1}', '{"line": 1, "turn": 0, "text": 4}'
    for line in ("text", "[]", "{}", *results, "[" * 100_000 + "\n", json.dumps(PROMPTS[0])):
        files[1].write_text(line + "\n")
        with pytest.raises(ValueError, match="line 1 is no result of this batch"):
            run(unused, files)
        assert files[1].read_text() == line + "\n"


@pytest.mark.parametrize("data", [b'{"line": 1, "tu', b'{"id": 1, "tu'])
def test_an_incomplete_last_line_is_replaced_only_if_it_is_the_beginning_of_a_result(fresh, files, data):
    write(files[0], PROMPTS[:1])
    files[1].write_bytes(data)
    if b'{"line": '.startswith(data) or data.startswith(b'{"line": '):
        assert len(run(fresh, files)) == 1
    else:
        with pytest.raises(ValueError, match="line 1 is no result of this batch .it is not JSON"):
            run(fresh, files)
        assert files[1].read_bytes() == data


def test_methods_that_do_not_load_are_not_reported_as_a_prompts_fault(session, artifact, files):
    def load():
        raise ValueError("model.pte is damaged")

    write(files[0], PROMPTS)
    with pytest.raises(ValueError, match="^model.pte is damaged$"):
        run(Model(session.metadata, load, artifact), files, keep_going=True)


def test_the_file_of_prompts_is_refused_as_the_output(unused, files):
    write(files[0], PROMPTS)
    data = files[0].read_bytes()
    with pytest.raises(ValueError, match="it has no line and turn"):
        run(unused, (files[0], files[0]))
    assert files[0].read_bytes() == data


# --- noise of their own


def test_first_tokens_of_equal_prompts_agree_as_often_as_independent_samples(fresh, files):
    """The share of equal pairs of lines is the sum of the model's squared probabilities, within four standard
    deviations."""
    count, prompt = 160, [2, 318, 1664, 11]
    write(files[0], [{"prompt_tokens": prompt}] * count)
    found = run(fresh, files, max_new_tokens=1, temperature=2.0, seed=5)
    top = fresh.generate(prompt, max_new_tokens=1, logprobs=2048).logprobs[0].top
    likely = sorted(((2.718281828459045 ** (logprob / 2)) for _, logprob in top), reverse=True)
    likely = [each / sum(likely) for each in likely]
    pairs, squares, cubes = count * (count - 1) / 2, sum(p**2 for p in likely), sum(p**3 for p in likely)
    variance = pairs * squares * (1 - squares) + pairs * 2 * (count - 2) * (cubes - squares**2)
    drawn = Counter(record["token_ids"][0] for record in found)
    equal = sum(times * (times - 1) / 2 for times in drawn.values())
    assert abs(equal - pairs * squares) < 4 * variance**0.5
    assert squares < 0.2  # equal tokens are not certain


def test_a_batch_result_equals_a_single_run_with_its_mixed_seed(fresh, files):
    write(files[0], [{"prompt_tokens": [2, 5]}, {"prompt_tokens": [2, 5], "seed": 9}, {"prompt_tokens": [2, 5]}])
    found = run(fresh, files, temperature=1.5, seed=9)
    assert [record["seed"] for record in found] == [mixed_seed(9, 1), 9, mixed_seed(9, 3)]
    for record in found:
        alone = fresh.generate([2, 5], max_new_tokens=6, temperature=1.5, seed=record["seed"])
        assert alone.token_ids == record["token_ids"]
    assert len({tuple(record["token_ids"]) for record in found}) == 3


# --- the command


def test_a_logit_bias_in_a_file_has_text_keys_and_statistics_are_printed(artifact, files):
    write(files[0], [{"prompt": "import", "logit_bias": {"17": 1e3}, "max_new_tokens": 3}])
    done = run_command(main, artifact, "--prompts", files[0], "--output", files[1], "--stats")
    assert "time to first token" in done.stderr
    assert records(files[1])[0]["token_ids"] == [17, 17, 17]


def test_an_output_that_cannot_be_written_is_reported_before_methods_are_loaded(artifact, files, monkeypatch):
    monkeypatch.setattr(batch, "generate_turns", None)
    write(files[0], PROMPTS)
    code, line = fail_command(main, artifact, "--prompts", files[0], "--output", files[1].parent / "nowhere" / "out")
    assert code == 1 and "nowhere" in line


def test_keep_going_is_refused_without_a_file_of_prompts(artifact):
    code, line = fail_command(main, artifact, "--prompt", "a", "--keep-going")
    assert code == 2 and "--keep-going is for the prompts of a file" in line


def test_prompts_may_be_computed_elsewhere_and_in_any_order(fresh, unused, files):
    write(files[0], PROMPTS)
    expected = tokens_by_turn(run(fresh, files))
    files[1].unlink()

    def elsewhere(asked, prompts, replies):
        assert asked.model is unused
        there = batch.Batch(fresh, asked.chat, asked.system, asked.options)
        for prompt in reversed(prompts):
            yield from there.run([prompt], replies)

    run_batch(unused, *files, False, None, {"max_new_tokens": 6}, compute=elsewhere)
    assert tokens_by_turn(records(files[1])) == expected and records(files[1])[0]["line"] == 3


def test_ray_needs_a_file_of_prompts_and_the_installed_package(artifact, files, monkeypatch):
    code, line = fail_command(main, artifact, "--prompt", "a", "--ray", 2)
    assert code == 2 and "--ray is for the prompts of a file" in line
    write(files[0], PROMPTS)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, line = fail_command(main, artifact, "--prompts", files[0], "--ray", 2)
    assert (code, line) == (1, "Error: ray is not installed: type pip install 'eagle3-export[ray]'")
