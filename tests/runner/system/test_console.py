"""A command prints its output to every kind of standard stream, and reports in one line if it cannot print."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run_command

from eagle3.runner.commands.run import main as run_main
from eagle3.runner.system.command import one_line
from eagle3.runner.system.text_input import argument_text
from eagle3.runner.text.text import Text
from eagle3.targets import TARGETS

TEXT = "naïve – \U0001f40d"
SMALL = f"""
import os, sys, click
from eagle3.runner.system.command import OneLineFailures, calm_stderr, tell

@click.command(cls=OneLineFailures)
@click.argument("file")
def main(file):
    with open(file, "wb", buffering=0), calm_stderr():
        os.write(2, b"a library's own words")
    sys.stdout.write({TEXT!a})
    sys.stdout.flush()
    tell("told: " + {TEXT!a})
    for _ in range(20_000):
        sys.stdout.write(".")
    sys.stdout.flush()
    raise ValueError({TEXT!a}) if file.endswith("fails") else SystemExit(0)

main()
"""
RUN = "from eagle3.runner.commands.run import main; main()"


def run_through_shell(redirection: str, program: str, *args, **environment) -> subprocess.CompletedProcess:
    """Run Python's ``-c program`` with the streams of ``redirection`` and its output buffered as in a shell."""
    command = ["sh", "-c", f'"$@" {redirection}', "sh", sys.executable, "-c", program, *args]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LC_", "LANG"))}
    return subprocess.run(command, capture_output=True, env=kept | {"LC_ALL": "C.UTF-8"} | environment, timeout=300)


def test_a_closed_stderr_loses_no_text_and_no_file_gets_its_descriptor(tmp_path):
    done = run_through_shell("2>&-", SMALL, tmp_path / "file")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode() == TEXT + 20_000 * "."
    assert (tmp_path / "file").read_bytes() == b""
    assert run_through_shell("2>&-", SMALL, tmp_path / "fails").returncode == 1


def test_a_closed_stdout_is_reported_in_one_line_before_any_work(tmp_path):
    done = run_through_shell(">&-", SMALL, tmp_path / "file")
    assert (done.returncode, done.stdout, (tmp_path / "file").exists()) == (1, b"", False)
    assert done.stderr.decode().splitlines() == [
        "Error: stdout is closed, nothing could be printed: type >/dev/null to discard the output"
    ]
    assert run_through_shell("<&- >&- 2>&-", SMALL, tmp_path / "file").returncode == 1


def test_a_character_that_the_terminal_lacks_is_escaped(tmp_path):
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run_through_shell("", SMALL, tmp_path / "fails", **environment)
    escaped = TEXT.encode("ascii", "backslashreplace")
    assert done.returncode == 1
    assert done.stdout == escaped + 20_000 * b"."
    assert done.stderr.splitlines() == [b"told: " + escaped, b"Error: " + escaped]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_command_has_the_exit_code_of_its_signal(number, code, tmp_path):
    program = SMALL.replace("raise ValueError", f"os.kill(os.getpid(), {int(number)}); raise ValueError")
    done = run_through_shell("; exit $?", program, tmp_path / "file")
    assert done.returncode == code and b"Traceback" not in done.stderr


def test_a_missing_file_is_named_without_an_errno():
    with pytest.raises(FileNotFoundError) as raised:
        Path("no/such.jsonl").read_bytes()
    assert one_line(raised.value) == "no/such.jsonl: No such file or directory"


def test_a_closed_pipe_ends_the_command_quietly(tmp_path):
    program = f"{SMALL.replace('range(20_000)', 'range(2_000_000)')}"
    done = run_through_shell('| head -c 5; exit "$?"', f"import os, sys\n{program}", tmp_path / "file")
    assert done.stdout == TEXT.encode()[:5]
    assert [line for line in done.stderr.decode().splitlines() if not line.startswith("told: ")] == []


def test_a_broken_pipe_and_a_full_disk_have_exit_code_1(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", SMALL, tmp_path / "file"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=buffered, timeout=300)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")
    if Path("/dev/full").exists():
        done = run_through_shell(">/dev/full", SMALL, tmp_path / "file")
        assert done.returncode == 1
        (line,) = done.stderr.decode().splitlines()
        assert line == "Error: stdout: No space left on device"
        echoed = "import sys; from eagle3.export.cli import main; sys.argv = ['', '--list-targets', '--json']; main()"
        done = run_through_shell(">/dev/full", echoed)
        assert (done.returncode, done.stderr) == (1, b"Error: stdout: No space left on device\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_an_unwritable_stderr_does_not_stop_the_command(tmp_path):
    done = run_through_shell("2>/dev/full", SMALL, tmp_path / "file")
    assert (done.returncode, done.stdout.decode()) == (0, TEXT + 20_000 * ".")


def test_the_runner_prints_all_text_escaped_and_without_a_stderr(artifact):
    args = ("--prompt-tokens", ",".join(["2", *["201"] * 8]), "--max-new-tokens", "10")
    text = json.loads(run_command(run_main, artifact, *args, "--json").stdout)["text"]
    assert not text.isascii()  # bytes that are no character
    done = run_through_shell("2>&-", RUN, artifact, *args, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.rstrip() == text.encode("ascii", "backslashreplace").rstrip()


# --- prompts


def test_a_prompt_that_is_not_utf8_is_refused_with_the_byte_and_its_place():
    done = run_through_shell("", RUN, "nowhere", "--prompt", b"abc\xff", "--chat")
    assert (done.returncode, done.stdout) == (2, b"")
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("Error: ") and "--prompt" in line and "0xff in position 3" in line


def test_a_prompt_in_utf8_is_unchanged_in_every_locale():
    program = "import sys; from eagle3.runner.system.text_input import argument_text as text"
    program += "; print(ascii(text(sys.argv[1])))"
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert run_through_shell("", program, TEXT.encode(), **locale).stdout.decode().strip() == ascii(TEXT)
    assert argument_text(TEXT) == TEXT


def test_a_lone_surrogate_is_refused_in_prompts_of_every_source():
    text = Text(TARGETS["gemma4-tiny"].checkpoint)
    half = "ab\ud800c"
    for encode, prompt in ((text.encode, half), (text.encode_messages, [{"role": "user", "content": half}])):
        with pytest.raises(ValueError, match=r"is not Unicode text .*position 2"):
            encode(prompt)
    with pytest.raises(ValueError, match="position 2"):
        argument_text(half)
