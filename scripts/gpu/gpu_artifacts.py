"""The artifacts that ``gpu_check.py`` runs: their exports, and sessions over them."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gpu_steps import Facts, NotRun, Report

GRAPHS = {"auto": "by CUDA graphs", "off": "without graphs"}


@dataclass(frozen=True)
class Check:
    """The settings of a check. ``work`` is the folder for checkpoints and artifacts, which later stages read.
    ``elsewhere`` and ``given`` are artifacts of gemma4-tiny and of full-width layers that were exported before."""

    report: Report
    work: Path
    elsewhere: tuple[Path, ...]
    layers: int
    given: tuple[Path, ...] = ()

    @cached_property
    def copied(self) -> float:
        """Return the bytes per second that a copy reads and writes."""
        import bench_small_m

        return bench_small_m.copy_bandwidth()

    @property
    def wide(self) -> Path:
        return self.work / f"wide-{self.layers}"

    @property
    def made_here(self) -> Path:
        """The artifact of full-width layers that this machine exports."""
        return self.wide / "artifact"

    @property
    def artifacts(self) -> dict[str, Path]:
        """The artifacts of full-width layers, by what the names of their steps begin with."""
        return labelled(self.given or (self.made_here,))


def labelled(folders: tuple[Path, ...]) -> dict[str, Path]:
    """Return the folders by what the names of their steps begin with: nothing for a single one."""
    return {f"{folder.name}: " if len(folders) > 1 else "": folder for folder in folders}


def export(check: Check, output: Path, *args: str, hidden: bool = False) -> Facts:
    """Run eagle3-export in a process of its own and return the seconds of its stages. ``hidden``: it sees no GPU.

    Its log is ``<folder>-export.log`` beside the JSON. Raises NotRun if this machine lacks a compiler, RuntimeError
    with the log's last line if the export fails or does not end in time.
    """
    from eagle3.export.lowering.cuda.inductor.toolchain import cpp_compiler, cuda_home

    try:
        cuda_home(), cpp_compiler()
    except FileNotFoundError as error:
        raise NotRun(error) from error
    command = [sys.executable, "-m", "eagle3.export.cli", "--verbose", "--overwrite", "--output-dir", str(output)]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | ({"CUDA_VISIBLE_DEVICES": ""} if hidden else {})
    log = check.report.folder / f"{'-'.join(output.relative_to(check.work).parts)}-export.log"
    with log.open("w") as file:
        try:
            code = subprocess.run(
                [*command, *args], env=environment, stdout=file, stderr=file, timeout=max(check.report.left - 30, 1)
            ).returncode
        except subprocess.TimeoutExpired:
            code = "no end in time"
    if code:
        said = log.read_text().strip().splitlines() or ["no output"]
        raise RuntimeError(f"{code}, see {log.name}: {said[-1]}")
    stages = json.loads((output / "export.json").read_text())["stages"]
    return {stage["stage"]: stage["seconds"] for stage in stages}


def made(folder: Path) -> Path:
    """Return ``folder``. Raises NotRun if it holds no artifact."""
    if not (folder / "model.pte").is_file():
        raise NotRun(f"there is no artifact in {folder}")
    return folder


@contextmanager
def opened(folder: Path, graphs: str, facts: Facts) -> Iterator[Any]:
    """Open a session hosted by PyTorch, and close it at the end. The facts say which method was not captured as a
    graph, and why."""
    folder = made(folder)
    from eagle3.runner.artifact.opening import open_artifact
    from eagle3.runner.hosts import cuda_graph
    from eagle3.runner.hosts.opening import open_session

    refused, outcome = _Lines(), ""
    cuda_graph.log.addHandler(refused)
    try:
        session = open_session(open_artifact(folder), "torch", graphs)
        try:
            yield session
            outcome = "captured"
        finally:
            session.close()
    finally:
        cuda_graph.log.removeHandler(refused)
        if graphs == "auto" and (refused.lines or outcome):
            facts["graphs"] = "; ".join(refused.lines) or outcome


class _Lines(logging.Handler):
    """Collects the lines that are logged while it is registered."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def recorded(folder: Path) -> dict[str, Any]:
    """Return the launches of each method, as recorded in ``export.json``."""
    return launches_of(json.loads((folder / "export.json").read_text()), str(folder))


def launches_of(record: dict[str, Any], artifact: str) -> dict[str, Any]:
    """Return the launches of each method from the contents of ``export.json``. Raises ValueError if it has none."""
    from eagle3.runner.contract import LAUNCHES

    if LAUNCHES not in record:
        raise ValueError(f"{artifact}: no export.json with launches is beside it: export it again for CUDA")
    return record[LAUNCHES]
