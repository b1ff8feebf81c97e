"""``scripts/gpu/gpu_make.py``: what counts as made, what travels, and the tokens of a module."""

import json
import os
import shutil
import subprocess
from dataclasses import replace

import gpu_expected
import gpu_make
import gpu_run
import pytest
from bench_export import main as bench_export
from click.testing import CliRunner
from gpu_expected import EagerGreedy
from gpu_tournament import main as tournament
from places import GOLDEN, ROOT

from eagle3.export.cli import main as export_main
from eagle3.export.configuration.config import ExportConfig


def test_an_empty_a_broken_and_an_absent_file_are_not_made(tmp_path):
    whole, empty = tmp_path / "whole.tar.xz", tmp_path / "folder" / "empty"
    empty.mkdir(parents=True)
    gpu_make.pack(gpu_make.contents(tmp_path / "folder"), whole)
    assert not gpu_make.is_made(whole)  # an archive of an empty folder
    (empty / "file").write_bytes(os.urandom(1000))
    gpu_make.pack(gpu_make.contents(empty), whole)
    assert gpu_make.is_made(whole)
    for name, data in (("cut.tar.xz", whole.read_bytes()[:300]), ("no.tar.xz", b"text"), ("probe.cubin", b"")):
        (tmp_path / name).write_bytes(data)
        assert not gpu_make.is_made(tmp_path / name)
    assert not gpu_make.is_made(tmp_path / "absent") and not gpu_make.is_made(tmp_path)


def test_the_parts_that_are_missing_are_made_and_a_failure_is_named_at_the_end(tmp_path, monkeypatch):
    made = []

    def make(making, file):
        made.append(file.name)
        if file.name == "b":
            raise ValueError("no room")
        file.write_text(file.name)

    monkeypatch.setattr(gpu_make, "PARTS", {"some": dict.fromkeys(("a", "x/b", "x/c"), make)})
    for expected in (["a", "b", "c"], ["b"]):
        made.clear()
        done = CliRunner().invoke(gpu_make.main, [str(tmp_path / "gpu")])
        assert made == expected and done.exit_code == 1, done.output
        assert "x/b is not made: ValueError: no room" in done.output and done.output.endswith("missing: x/b\n")
    assert (tmp_path / "gpu" / "x" / "c").read_text() == "c"


def test_what_travels_is_small_and_a_folder_that_git_sees_is_refused(tmp_path):
    files = gpu_make.travelling()
    assert sum(file.stat().st_size for file in files) < 10 << 20
    assert ROOT / "tests" / "helpers" / "proposed.py" in files and ROOT / "scripts" / "prompts.jsonl" in files
    assert not any(file.suffix == ".safetensors" or file.is_relative_to(GOLDEN) for file in files)
    done = CliRunner().invoke(gpu_make.main, [str(ROOT / "made"), "probe"])
    assert done.exit_code == 1 and "git does not ignore" in done.output and not (ROOT / "made").exists()
    for allowed in (ROOT / ".work" / "gpu", tmp_path):
        gpu_make.check_ignored(allowed)


def test_a_checkout_with_the_printed_patterns_has_these_files_alone(tmp_path):
    printed = ["/*", *(f"!{pattern}" for pattern in gpu_make.NOT_READ)]
    subprocess.run(["git", "clone", "-q", "--no-checkout", "--shared", ROOT, tmp_path / "copy"], check=True)
    for command in (["sparse-checkout", "set", "--no-cone", *printed], ["checkout", "-q", "HEAD"]):
        subprocess.run(["git", "-C", tmp_path / "copy", *command], check=True)
    found = {str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*") if path.is_file()}
    found = {name for name in found if not name.startswith(".git/")}
    listed = subprocess.run(["git", "-C", ROOT, "ls-tree", "-r", "--name-only", "HEAD"], capture_output=True, text=True)
    unread = "tests/golden/", "tests/export/", "tests/runner/"
    kept = [name for name in listed.stdout.splitlines() if not name.startswith(unread)]
    assert found == {name for name in kept if not name.endswith((".safetensors", ".gguf"))}


def test_the_pairs_that_are_made_are_those_that_are_run():
    made = {*gpu_make.EXPORTED, *gpu_make.FAMILIES, *gpu_make.OTHERS}
    assert made | {f"tiny-{layout}" for layout in gpu_run.LAYOUTS} == set(gpu_run.PAIRS)
    names = {name for part in gpu_make.NOT_CARRIED for name in gpu_make.PARTS[part]}
    assert names == {f"{name}/{gpu_run.EXPECTED}" for name in gpu_run.PAIRS}


def test_the_archive_of_the_pairs_has_those_that_are_made_and_follows_them(tmp_path):
    def command() -> str:
        given = [str(tmp_path / "gpu"), "small", "--work", str(tmp_path)]
        return CliRunner().invoke(gpu_make.main, given).output

    def pair(name: str, *files: str) -> None:
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text(name)

    pair("kimi", "model.pte", gpu_run.EXPECTED)
    pair("mlp", "model.pte")  # without its tokens it is not made
    assert "small.tar.xz: 0.00 MB" in command()
    archive, work = tmp_path / "gpu" / gpu_run.SMALL, tmp_path / "there"
    before, _ = archive.stat().st_mtime_ns, command()
    assert archive.stat().st_mtime_ns == before
    pair("mtp", "model.pte", gpu_run.EXPECTED)
    os.utime(archive, (1, 1))
    command()
    work.mkdir()
    whole = gpu_run.unpacked(tmp_path / "gpu", work, gpu_run.SMALL)
    assert {path.name for path in whole.iterdir()} == {"kimi", "mtp"}
    assert (whole / "mtp" / "model.pte").read_text() == "mtp"


def test_each_part_is_made_by_a_command_that_its_script_accepts(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(gpu_make, "call", lambda _python, *words: called.append([str(word) for word in words]))
    monkeypatch.setattr(gpu_make.Making, "tokens", lambda _self, file, *_given: file)
    monkeypatch.setattr(gpu_make.shutil, "move", lambda *_given: None)
    making = gpu_make.Making(tmp_path, "sm_90", 6)
    shutil.copy(ROOT / "targets" / "gemma4_tiny" / "target" / "tokenizer.json", tmp_path)
    (tmp_path / "tiny-records").symlink_to(tmp_path)
    making.tournament(tmp_path / "tournament.tar.xz")
    making.wide(tmp_path / "records.tar.xz")
    making.tiny(tmp_path / "tiny-records" / gpu_run.EXPECTED)
    making.pair(tmp_path / "mlp" / gpu_run.EXPECTED)
    scripts = {"gpu_tournament.py": tournament, "bench_export.py": bench_export}
    for script, *flags in called:
        main = scripts[script.rpartition("/")[2]] if script != "-m" else export_main
        main.make_context(script, flags if script != "-m" else flags[1:])  # click refuses an unknown flag
    assert len(called) == 4


def test_the_tokens_of_a_module_are_those_of_its_steps(tmp_path, monkeypatch):
    greedy = EagerGreedy(ExportConfig("gemma4-tiny", cuda_arch="sm_90"))
    greedy.plan = replace(greedy.plan, eos_ids=tuple(range(1024)))  # the first 1,024 ids end the text
    monkeypatch.setattr(gpu_expected, "config_of", lambda _artifact: None)
    monkeypatch.setattr(gpu_expected, "EagerGreedy", lambda _config: greedy)
    monkeypatch.setattr(gpu_expected, "CANDIDATES", 2)
    (said,) = gpu_expected.expected(tmp_path, 3, 1)
    ids, margins = greedy(said["prompt"], 3, stops=False)
    assert said["token_ids"] == ids and said["margins"] == margins and len(margins) == 3 and said["proposals"]
    assert gpu_expected.expected(tmp_path, 3, [[5, 6, 7, 8]])[0]["prompt"] == [5, 6, 7, 8]
    assert json.dumps(said)
    monkeypatch.setattr(EagerGreedy, "__call__", lambda *_given, **_options: ([1, 2, 3], [1.0] * 3))
    with pytest.raises(ValueError, match="choose other tokens"):
        gpu_expected.expected(tmp_path, 3, 1)


def test_packages_are_python_files_and_programs_for_every_python(tmp_path, monkeypatch):
    kept = tmp_path / "kept"
    monkeypatch.setattr(gpu_make, "PACKED", ("llguidance", "executorch"))
    monkeypatch.setattr(gpu_make, "contents", lambda folder: shutil.copytree(folder, kept))
    monkeypatch.setattr(gpu_make, "pack", lambda _files, _archive: None)
    gpu_make.Making(tmp_path, "sm_90", 0).packages(tmp_path / "packages.tar.xz")
    names = [str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file()]
    needed = {"llguidance/_lib.abi3.so", "executorch/data/bin/flatc", "executorch/exir/dialects/edge/edge.yaml"}
    assert needed <= set(names) and os.access(kept / "executorch" / "data" / "bin" / "flatc", os.X_OK)
    assert all(name.endswith(gpu_make.TAKEN) for name in names)
