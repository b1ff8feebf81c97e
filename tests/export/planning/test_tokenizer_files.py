"""The tokenizer's files are read before any weight, and a dry run reports a checkpoint without them."""

import json
import shutil
from pathlib import Path

import pytest
from commands import fail_command, run_command
from hub_commands import HEAD, TARGET

from eagle3.export.cli import main as export_main
from eagle3.targets import TARGETS

TINY = TARGETS["gemma4-tiny"]
NO_TOKENS = json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []})


@pytest.fixture
def target(tmp_path) -> Path:
    """A copy of the shipped target, which tests damage."""
    return Path(shutil.copytree(TINY.checkpoint, tmp_path / "target"))


def flags(tmp_path: Path, checkpoint: object, draft: object = TINY.draft) -> tuple[object, ...]:
    shared = ("--target-model", "gemma4-tiny", "--backend", "xnnpack", "--output-dir", tmp_path / "out")
    return (*shared, "--checkpoint", checkpoint, "--draft", draft)


@pytest.mark.parametrize(
    ("name", "content", "asked"),
    [
        ("tokenizer.json", b"{}", "--dry-run"),
        ("tokenizer.json", b"\xf2\x8a\x00\xff random bytes", "--no-check"),
        ("tokenizer.json", NO_TOKENS.encode(), "--dry-run"),
        ("tokenizer_config.json", b"{", "--no-check"),
        ("special_tokens_map.json", b"[]", "--dry-run"),
        ("chat_template.jinja", b"{{ '\xff' }}", "--no-check"),
    ],
)
def test_an_unreadable_tokenizer_file_is_named_before_any_weight_is_read(asked, name, content, target, tmp_path):
    (target / name).write_bytes(content)
    code, line = fail_command(export_main, *flags(tmp_path, target), asked)
    assert code == 1
    assert f"Error: {target / name} " in line and line.endswith("copy it again")
    assert not (tmp_path / "out").exists()


@pytest.mark.first(1)
@pytest.mark.parametrize("form", ["tekken.json", "tokenizer.model", None])
def test_a_dry_run_reports_a_missing_tokenizer_json_and_the_files_that_exist(form, target, tmp_path):
    for file in target.glob("tokenizer*"):
        file.unlink()
    if form:
        (target / form).write_bytes(b"")
    shown = run_command(export_main, *flags(tmp_path, target), "--dry-run").stderr
    [line] = [line for line in shown.splitlines() if "tokenizer.json" in line]
    assert f"Warning: {target} has no tokenizer.json" in line and "--prompt-tokens" in line
    assert ("it has " in line) is (form is not None) and (form or "") in line


def test_a_dry_run_of_a_hub_name_reports_a_missing_tokenizer_from_the_listing(hub, tmp_path):
    bare = Path(shutil.copytree(TINY.checkpoint, tmp_path / "bare"))
    (bare / "tokenizer.json").unlink()
    hub.add("other/bare", bare)
    hub.add(TARGET, TINY.checkpoint)
    hub.add(HEAD, TINY.draft)
    shown = run_command(export_main, *flags(tmp_path, "other/bare", HEAD), "--dry-run").stderr
    assert "Warning: other/bare has no tokenizer.json" in shown
    assert "no tokenizer.json" not in run_command(export_main, *flags(tmp_path, TARGET, HEAD), "--dry-run").stderr
