"""eagle3-run takes prompts from all sources, holds a dialogue on a terminal, and runs files of prompts."""

import json
import os
import re
import time

import pytest
from click.testing import CliRunner
from commands import fail_command, run_command
from terminal import PROMPT, Terminal

from eagle3.runner import load
from eagle3.runner.commands.dialogue import _turn
from eagle3.runner.commands.run import main
from eagle3.runner.conversation import Conversation
from eagle3.runner.model import Piece, Stream
from eagle3.runner.text.text import Text

TEXT = "def main(argv=None):\n    "


@pytest.fixture(scope="module")
def model(artifact):
    with load(artifact) as model:
        yield model


def as_json(artifact, *args):
    return json.loads(run_command(main, artifact, "--json", *args).stdout)


def test_a_prompt_from_stdin_is_used_unchanged(artifact):
    args = str(artifact), "--json", "--max-new-tokens", "20", "--prompt"
    done = CliRunner().invoke(main, [*args, "-"], input=TEXT)
    assert json.loads(done.stdout)["token_ids"] == as_json(*args[:1], *args[2:], TEXT)["token_ids"]


def test_sampling_flags_are_the_librarys_options(artifact, model):
    flags = ["--temperature", 0.9, "--top-k", 40, "--top-p", 0.9, "--min-p", 0.01, "--seed", 5]
    flags += ["--repetition-penalty", 1.1, "--logit-bias", "17=-3", "--stop", "zzz", "--stop-token-ids", "3,4"]
    flags += ["--ignore-eos"]
    record = as_json(artifact, "--prompt", TEXT, "--max-new-tokens", 30, "--logprobs", 2, "--chain-len", "auto", *flags)
    options = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 5, "repetition_penalty": 1.1}
    options |= {"logit_bias": {17: -3.0}, "stop": ["zzz"], "stop_token_ids": [3, 4], "ignore_eos": True, "logprobs": 2}
    expected = model.generate(TEXT, max_new_tokens=30, **options)
    assert record["token_ids"] == expected.token_ids
    assert record["seed"] == 5
    assert [each["token_id"] for each in record["logprobs"]] == record["token_ids"]
    for ours, theirs in zip(record["logprobs"], expected.logprobs, strict=True):
        assert ours["logprob"] == pytest.approx(theirs.logprob, abs=1e-3)
        assert len(ours["top"]) == 2 and ours["logprob"] <= ours["top"][0]["logprob"] + 1e-5


def test_statistics_have_vllms_names_and_the_time_by_method(artifact):
    stats = as_json(artifact, "--prompt", TEXT, "--max-new-tokens", 30)["stats"]
    assert set(stats) >= {"num_drafts", "num_draft_tokens", "num_accepted_tokens", "mean_acceptance_length"}
    assert set(stats) >= {"prompt_tokens", "reused_prompt_tokens", "generation_tokens", "time_to_first_token_seconds"}
    assert set(stats["methods"]) == {"prefill", "target_verify", "draft_decode"}
    assert stats["generation_tokens"] == 30
    told = run_command(main, artifact, "--prompt", TEXT, "--stats", "--max-new-tokens", 1).stderr
    assert "1 tokens in" in told and "decode" not in told and "acceptance" not in told  # a single token has no rate
    out = run_command(main, artifact, "--prompt", TEXT, "--max-new-tokens", 30, "--stats").stderr
    assert "time to first token" in out and "the loop itself" in out and "target_verify" in out


def test_a_generation_is_replayed_without_speculation(artifact):
    args = artifact, "--prompt", TEXT, "--max-new-tokens", 40, "--verify-lossless"
    assert "identical" in run_command(main, *args).stderr
    assert as_json(*args, "--temperature", 0.8)["lossless"]["divergence"] is None


def test_prompts_in_and_results_out_line_by_line(artifact, model, tmp_path):
    prompts, results = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    entries = {"prompt": TEXT, "max_new_tokens": 12}, {"prompt_tokens": [2, 5, 6], "temperature": 0.7, "seed": 3}
    turns = {"question_id": 81, "category": "writing", "turns": ["class A:", "x = 1"]}
    prompts.write_text("\n".join(map(json.dumps, (*entries, turns))).replace("\n", "\n\n", 1))
    run_command(main, artifact, "--prompts", prompts, "--output", results, "--max-new-tokens", 16)
    records = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(record["line"], record["turn"]) for record in records] == [(1, 0), (3, 0), (4, 0), (4, 1)]
    assert records[0]["token_ids"] == model.generate(TEXT, max_new_tokens=12).token_ids
    assert records[1]["token_ids"] == model.generate([2, 5, 6], max_new_tokens=16, temperature=0.7, seed=3).token_ids
    dialogue = Conversation(model, max_new_tokens=16)
    assert [record["text"] for record in records[2:]] == [dialogue.ask(turn).text for turn in ("class A:", "x = 1")]
    assert records[2]["id"] == 81


def test_eagle3_run_prints_the_drawn_seed_which_repeats_the_text(artifact):
    args = artifact, "--prompt", TEXT, "--max-new-tokens", 12, "--temperature", 1.5
    for stats in ((), ("--stats",)):
        done = run_command(main, *args, *stats)
        seed = re.search(r"seed (\d+)", done.stderr)[1]
        assert run_command(main, *args, "--seed", seed).stdout == done.stdout
    assert "seed" not in run_command(main, artifact, "--prompt", TEXT, "--max-new-tokens", 2).stderr


def test_a_text_with_too_many_characters_is_refused_before_tokenizing(artifact, tmp_path, monkeypatch):
    monkeypatch.setattr(Text, "encode", None)
    monkeypatch.setattr(Text, "encode_messages", None)
    text, file, lines = "x = 1\n" * 2_000_000, tmp_path / "file", tmp_path / "prompts.jsonl"
    file.write_text(text)
    lines.write_text(json.dumps({"prompt": text}))
    for flags in (["--prompt-file", file], ["--chat", "--prompt-file", file], ["--prompts", lines]):
        code, line = fail_command(main, artifact, *flags)
        assert code == 1 and "the prompt has 12,000,000 characters, the artifact's context 1024 tokens of 37" in line


def test_an_error_within_an_answer_begins_on_a_line_of_its_own(artifact, monkeypatch, capfd):
    """The text before the error stops in the middle of a line, or at its end."""
    for text, behind in (("an answer", "\n"), ("a line\n", ""), ("", "")):

        def pieces(_stream, text=text):
            yield Piece(text, [5])
            raise RuntimeError("the method failed")

        monkeypatch.setattr(Stream, "__iter__", pieces)
        with pytest.raises(SystemExit) as end:
            main([str(artifact), "--prompt", TEXT])
        said = capfd.readouterr()
        assert end.value.code == 1 and said.out == text + behind
        assert said.err.startswith("Error: RuntimeError: the method failed")
        monkeypatch.setattr(Conversation, "say", lambda dialogue, line, pieces=pieces: pieces(None))
        _turn(Conversation(None), "Hello", False)
        said = capfd.readouterr()
        assert said.out == text + behind and said.err.startswith("Error: RuntimeError: the method failed")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", "a", "--temperature", "-1"], "temperature"),
        (["--prompt", "a", "--chain-len", "fast"], "'fast'"),
        (["--prompt", "a", "--logit-bias", "x"], "TOKEN_ID=BIAS"),
        (["--prompt", "a", "--output", "b"], "--output"),
        (["--prompt", "a", "--system", "b"], "--chat"),
        (["--prompt", "a", "--logprobs", "3"], "--logprobs are shown with --json only: type --json as well"),
        (["--chat"], "terminal"),
        ([], "give one of"),
    ],
)
def test_contradictory_flags_of_eagle3_run_are_usage_errors(artifact, flags, message):
    code, line = fail_command(main, artifact, *flags)
    assert code == 2 and message in line


def test_a_dialogue_on_a_terminal_keeps_its_turns_and_letters_that_the_locale_lacks(artifact, model):
    """The tokens are those of the same text in UTF-8; invalid UTF-8 is reported, and the dialogue continues."""
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    terminal = Terminal(artifact, "--chat", "--max-new-tokens", 100, "--ignore-eos", "--stats", **environment)
    terminal.until(PROMPT)
    text = "# Überschrift, é – \U0001f40d"
    terminal.type(text + "\n")
    count = len(model.encode([{"role": "user", "content": text}]))
    told = terminal.until("the loop itself")
    assert "100 tokens" in told and f"({count} prompt tokens" in told
    terminal.until(PROMPT)
    terminal.type("def close(self):\n")
    assert "reused" in terminal.until(PROMPT)
    terminal.type("/reset\n")
    terminal.until(PROMPT)
    terminal.type("/nothing\n")
    assert "is not a command" in terminal.until(PROMPT)
    os.write(terminal.screen, b"abc \xff d\n")
    assert "is not Unicode text" in terminal.until(PROMPT)
    terminal.type("x" * 900 + " 1 2 3" * 200 + "\n")
    assert "Error: the prompt has" in terminal.until(PROMPT)
    terminal.type("\x04")
    assert terminal.process.wait(20) == 0


@pytest.mark.whole
def test_an_interruption_ends_an_answer_and_never_the_dialogue(artifact):
    """The interruption comes before the first reply or within a reply."""
    terminal = Terminal(artifact, "--chat", "--max-new-tokens", 400, "--ignore-eos", "--stats")
    terminal.until(PROMPT)
    for seconds in (0, 0, 0, 0.001, 0.003, 0.01, 0.03):
        terminal.type("import os\n")
        terminal.until("import os\r\n")  # Ctrl-C would discard a line that was not yet read
        time.sleep(seconds)
        terminal.type("\x03")
        terminal.until(PROMPT)
        terminal.type("/reset\n")
        terminal.until(PROMPT)
    terminal.type("\x04")
    assert terminal.process.wait(20) == 0
