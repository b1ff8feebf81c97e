"""``scripts/gpu/gpu_half_hour.py``: its scripts accept the flags that it passes, and a run keeps what they print."""

import shutil
import tarfile
from importlib.metadata import version
from pathlib import Path

import bench_export
import check_on_gpu
import click
import gpu_carry
import gpu_check
import gpu_half_hour
import gpu_tournament
import pytest
import small_pairs
from click.testing import CliRunner

from eagle3.export.cli import main as export_main

SCRIPTS = {
    "gpu_tournament.py": gpu_tournament.main, "small_pairs.py": small_pairs.main, "bench_export.py": bench_export.main,
    "gpu_carry.py": gpu_carry.main, "gpu_check.py": gpu_check.main, "check_on_gpu.py": check_on_gpu.main,
}  # fmt: skip


def parsed(command: list[str]) -> str:
    """Return a script's name after its own options have accepted the flags of the command."""
    script, *flags = command
    if script == "-m":
        name, *flags = flags
        if name == "pip":
            return name
        accept(export_main, name, flags)
        return name
    accept(SCRIPTS[Path(script).name], script, flags)
    return Path(script).name


def accept(main: click.Command, name: str, flags: list[str]) -> None:
    context = main.make_context(name, list(flags))
    if isinstance(main, click.Group):
        called, command, rest = main.resolve_command(context, [*context.protected_args, *context.args])
        command.make_context(called, rest)


@pytest.fixture
def commands(monkeypatch):
    called = []
    monkeypatch.setattr(gpu_half_hour, "call", lambda _python, *words: called.append([str(word) for word in words]))
    return called


def run(*words):
    return CliRunner().invoke(gpu_half_hour.main, [str(word) for word in words], catch_exceptions=False)


def test_every_part_is_made_by_a_command_that_its_script_accepts(commands, tmp_path):
    folder, work = tmp_path / "carried", tmp_path / "work"
    for name in ("tiles", "records"):
        (work / "wide" / "6").mkdir(parents=True, exist_ok=True)
        (work / "wide" / "6" / f"{name}.tar.xz").write_text(name)
    (work / "small" / "mlp").mkdir(parents=True)
    (work / "small" / "mlp.expected.json").write_text("[]")
    (work / "small" / small_pairs.CHECKPOINTS).mkdir()
    folder.mkdir()
    (folder / "tournament.tar.xz").write_text("made before")
    (folder / "wheels").mkdir()
    done = run("make", folder, "--work", work, "--layers", "6")
    assert done.exit_code == 0, done.output
    assert "tournament: is there" in done.output and "wheels: is there" in done.output and "small: made" in done.output
    cli = "eagle3.export.cli"
    assert [parsed(command) for command in commands] == ["small_pairs.py", cli, cli, "bench_export.py"]
    (flags,) = (command for command in commands if "--pack" in command)
    given = [flags[at + 1] for at, flag in enumerate(flags) if flag == "--int4-layout"]
    assert tuple(given) == gpu_half_hour.LAYOUTS  # what ``run`` looks for
    assert sorted(path.name for path in (folder / "wide").iterdir()) == [
        "records.tar.xz",
        "tiles.tar.xz",
    ]
    with tarfile.open(folder / gpu_half_hour.PAIRS) as packed:
        assert sorted(packed.getnames()) == ["mlp", "mlp.expected.json"]


def test_the_wheels_are_of_the_versions_that_are_installed_here(commands, tmp_path):
    done = run("make", tmp_path / "carried", "wheels", "--python", "3.12")
    assert done.exit_code == 0, done.output
    (command,) = commands
    assert parsed(command) == "pip" and command[command.index("--python-version") + 1] == "3.12"
    assert f"executorch=={version('executorch')}" in command


def test_small_pairs_are_compared_and_the_output_is_kept(host_artifact, commands, tmp_path, monkeypatch):
    folder, found, place = tmp_path / "carried", tmp_path / "found", tmp_path / "packed"
    shutil.copytree(host_artifact, place / "pair")
    (place / "broken").mkdir()
    for name in ("pair", "broken"):
        (place / f"{name}.expected.json").write_text("[]")
    folder.mkdir()
    with tarfile.open(folder / gpu_half_hour.PAIRS, "w:xz") as packed:
        for path in place.iterdir():
            packed.add(path, path.name)
    checks = []
    monkeypatch.setattr(gpu_half_hour.Run, "check", lambda _self, name, *flags: checks.append([name, *map(str, flags)]))
    done = run("run", folder, "small", "soak", "rounds", "prefill", "--output-dir", found, "--work", tmp_path / "work")
    assert done.exit_code == 0, done.output
    said = (found / "pairs.txt").read_text()
    assert "broken: does not run" in said and "/pair: does not run" not in said
    assert "pairs: check_on_gpu.py ended with 1" in done.output
    assert [check[0] for check in checks] == ["tiny", "soak", "rounds", "prefill"]
    assert done.output.count(" is left out\n") == 4
    assert [flags.count("--elsewhere") for flags in checks] == [2, 2, 0, 0]
    for _, *flags in checks:  # click refuses an unknown flag or stage, and a folder that is not there
        accept(
            gpu_check.main, "gpu_check.py", [flag for flag in flags if "tiny-" not in flag and flag != "--elsewhere"]
        )


def test_what_fails_is_said_and_kept_and_the_next_part_still_runs(tmp_path):
    folder = tmp_path / "carried"
    folder.mkdir()
    (folder / "tournament.tar.xz").write_text("no archive")
    done = run("run", folder, "tournament", "--output-dir", tmp_path / "found", "--work", tmp_path / "work")
    assert done.exit_code == 0 and "tournament: gpu_tournament.py ended with 1" in done.output
    assert (tmp_path / "found" / "tournament.txt").read_text().strip()
