"""An artifact is compared with export.json before any of it is loaded, so that no flipped byte reaches the runtime."""

import json
import platform
import random
import re
import shutil
import subprocess
import sys

import pytest
from commands import fail_command, run_command

from eagle3.runner.artifact import opening, record
from eagle3.runner.artifact.opening import find_model, open_artifact
from eagle3.runner.commands.bench import main as bench_main
from eagle3.runner.commands.inspect import main as inspect_main
from eagle3.runner.commands.run import main as run_main
from eagle3.runner.contract import EXPORT_RECORD, HOST_MODEL_FILE, MODEL_FILE

TOKENS = ("--prompt-tokens", "2,318,1664,11", "--max-new-tokens", "8")
HEADER = 64  # bytes, with ExecuTorch's extended header


@pytest.fixture
def copied(artifact, tmp_path):
    return shutil.copytree(artifact, tmp_path / "copy")


@pytest.fixture
def alone(artifact, tmp_path):
    """A folder with a ``model.pte`` and nothing else."""
    (tmp_path / "alone").mkdir()
    shutil.copy(artifact / MODEL_FILE, tmp_path / "alone")
    return tmp_path / "alone"


@pytest.fixture
def not_loaded(monkeypatch):
    def read_constants(model):
        raise AssertionError("it got to the program")

    monkeypatch.setattr(opening, "read_constants", read_constants)


@pytest.fixture
def large(monkeypatch):
    """Treat every file as too large to be hashed by default."""
    monkeypatch.setattr(record, "QUICK_BYTES", 0)


def recorded(folder) -> dict:
    return json.loads((folder / EXPORT_RECORD).read_text())


def rewrite(folder, change) -> None:
    """Write the record again after ``change`` has edited its files."""
    content = recorded(folder)
    change(content["files"])
    (folder / EXPORT_RECORD).write_text(json.dumps(content))


def flip(file, position: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(position)
        byte = stream.read(1)[0]
        stream.seek(position)
        stream.write(bytes([byte ^ 0xFF]))


def positions(folder, header: int, program: int, behind: int) -> list[int]:
    """Return the first ``header`` bytes of ``model.pte`` and, from a fixed seed, places in its program and after it."""
    entry, rng = recorded(folder)["files"][MODEL_FILE], random.Random(7)
    end = entry["program"]["bytes"]
    return [
        *range(header),
        *rng.sample(range(HEADER, end), program),
        *rng.sample(range(end, entry["bytes"]), behind),
    ]


def test_a_folder_opens_the_program_for_this_processor_if_there_is_one(copied):
    own, other = (copied / HOST_MODEL_FILE.format(name) for name in (platform.machine(), "another"))
    shutil.copy(copied / MODEL_FILE, own)
    assert (find_model(copied), find_model(copied / MODEL_FILE)) == (own, copied / MODEL_FILE)
    own.rename(other)
    assert (find_model(copied), find_model(other)) == (copied / MODEL_FILE, other)


def test_no_flipped_byte_reaches_the_runtime(copied, not_loaded):
    model, lines = copied / MODEL_FILE, []
    for position in positions(copied, 16, 12, 12):
        flip(model, position)
        with pytest.raises(ValueError, match="damaged") as caught:
            open_artifact(copied)
        lines.append(str(caught.value))
        flip(model, position)
    assert all(str(model) in line and "\n" not in line and "copy or export it again" in line for line in lines)
    with pytest.raises(AssertionError, match="got to the program"):  # the file is undamaged again
        open_artifact(copied)


def test_a_flipped_byte_gives_one_line_and_exit_1_of_the_real_command(copied):
    flip(copied / MODEL_FILE, 5000)
    command = [sys.executable, "-c", "from eagle3.runner.commands.run import main; main()", copied, *TOKENS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"Error: {copied / MODEL_FILE} ") and "copy or export it again" in line


def test_the_error_line_for_damage_has_the_file_both_values_the_cause_and_what_to_do(copied, not_loaded):
    flip(copied / "tokenizer.json", 100)
    line = fail_command(run_main, copied, *TOKENS)[1]
    found = record.digest(copied / "tokenizer.json", 1 << 30).sha256
    for word in (
        "tokenizer.json is damaged, or was edited after the export",
        f"sha256 {found[:12]}...",
        f"export.json says {recorded(copied)['files']['tokenizer.json']['sha256'][:12]}...",
        "copy or export it again",
    ):
        assert word in line
    with (copied / MODEL_FILE).open("ab") as file:
        file.write(b"more")
    size = recorded(copied)["files"][MODEL_FILE]["bytes"]
    line = fail_command(run_main, copied, *TOKENS)[1]
    assert f"({size + 4:,} bytes, export.json says {size:,})" in line
    assert "not as recorded either: tokenizer.json" in line


@pytest.mark.parametrize("command", [run_main, bench_main])
def test_a_missing_file_is_named(command, copied, tmp_path, not_loaded):
    (copied / "tokenizer_config.json").unlink()
    (tmp_path / "prompts.jsonl").write_text("")
    args = TOKENS if command is run_main else ("--prompts", tmp_path / "prompts.jsonl")
    code, line = fail_command(command, copied, *args)
    assert (code, f"{copied / 'tokenizer_config.json'} is missing" in line) == (1, True)


def test_for_a_large_artifact_only_sizes_and_the_program_are_compared_by_default(copied, large, not_loaded):
    model = copied / MODEL_FILE
    for position in positions(copied, 8, 8, 0):
        flip(model, position)
        with pytest.raises(ValueError, match="damaged"):
            open_artifact(copied)
        flip(model, position)
    (behind,) = positions(copied, 0, 0, 1)
    flip(model, behind)
    with pytest.raises(AssertionError, match="got to the program"):
        open_artifact(copied)
    with pytest.raises(ValueError, match=r"model\.pte is damaged"):
        open_artifact(copied, verify=True)


def test_verifying_a_large_file_is_announced_before_reading(copied, large):
    lines = []
    assert record.compare(copied / MODEL_FILE, verify=True, say=lines.append).faults == []
    assert any(re.fullmatch(r"verifying model.pte, [1-9][0-9.]* MB", line) for line in lines)
    lines.clear()
    record.compare(copied / MODEL_FILE, say=lines.append)
    assert lines == []
    assert "verifying model.pte" in run_command(run_main, copied, *TOKENS, "--verify").stderr


def test_a_record_without_the_programs_digest_is_accepted(copied, large):
    rewrite(copied, lambda files: files[MODEL_FILE].pop("program"))
    assert record.compare(copied / MODEL_FILE).faults == []
    flip(copied / MODEL_FILE, 5000)
    assert record.compare(copied / MODEL_FILE).faults == []
    (fault,) = record.compare(copied / MODEL_FILE, verify=True).faults
    assert "model.pte is damaged" in fault


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        b'{"files": {}}',
        b'{"files": {"model.pte": {"bytes": "1", "sha256": ""}}}',
        b'{"files": {"model.pte": {"bytes": 1, "sha256": "xyz"}}}',
        b'{"files": {"../model.pte": {"bytes": 1, "sha256": "%s"}}}' % (b"0" * 64),
        b'{"files": {"model.pte": {"bytes": 1, "sha256": "%s", "program": {}}}}' % (b"0" * 64),
    ],
)
def test_a_record_that_is_not_ours_is_refused(text, copied, not_loaded):
    (copied / EXPORT_RECORD).write_bytes(text)
    code, line = fail_command(run_main, copied, *TOKENS)
    assert (code, f"{copied / EXPORT_RECORD} is not what eagle3-export writes" in line) == (1, True)


def test_a_record_that_cannot_be_read_is_refused(copied, not_loaded):
    (copied / EXPORT_RECORD).unlink()
    (copied / EXPORT_RECORD).mkdir()
    assert f"{copied / EXPORT_RECORD} cannot be read" in fail_command(run_main, copied, *TOKENS)[1]


# --- without a record


def test_a_model_pte_alone_runs_with_a_line_that_it_was_not_checked(alone, artifact):
    result = run_command(run_main, alone / MODEL_FILE, *TOKENS, "--json")
    checked, alone_says = (
        json.loads(run_command(run_main, artifact, *TOKENS, "--json").stdout),
        json.loads(result.stdout),
    )
    assert alone_says["token_ids"] == checked["token_ids"] and alone_says["text"] is None
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"Not checked: {alone / MODEL_FILE}") and "has no export.json" in line
    assert open_artifact(artifact).checked and not open_artifact(alone).checked


def test_a_renamed_program_is_not_in_the_record_and_so_not_checked(copied):
    (copied / MODEL_FILE).rename(copied / "other.pte")
    lines = []
    assert not open_artifact(copied / "other.pte", say=lines.append).checked
    assert "export.json does not name it" in lines[0]


@pytest.mark.parametrize("command", [run_main, inspect_main])
def test_verify_without_a_record_is_refused(command, alone, not_loaded):
    args = TOKENS if command is run_main else ()
    assert "nothing to verify against" in fail_command(command, alone, *args, "--verify")[1]


# --- eagle3-inspect


def test_damaged_weights_are_shown_with_a_warning_and_a_damaged_program_is_refused(copied, artifact):
    whole = json.loads(run_command(inspect_main, artifact, "--json").stdout)
    (behind,) = positions(copied, 0, 0, 1)
    flip(copied / MODEL_FILE, behind)
    shown = run_command(inspect_main, copied, "--json")
    assert shown.stderr.startswith(f"Warning: {copied / MODEL_FILE} is damaged")
    assert json.loads(shown.stdout)["methods"].keys() == whole["methods"].keys()
    assert "DIFFERS" in run_command(inspect_main, copied).stdout
    flip(copied / MODEL_FILE, 5000)
    assert "sha256 of its program" in fail_command(inspect_main, copied)[1]
