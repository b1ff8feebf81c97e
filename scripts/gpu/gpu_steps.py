"""The steps of a check on a GPU. Each ends as ok, failed or not run, and the JSON file is rewritten after each."""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click

BUDGET = 8 * 60  # seconds of a stage
LEAST = 20  # seconds that must be left to begin a step
REPORT = "gpu_check.json"
Facts = dict[str, Any]


class NotRun(Exception):
    """A step was not run; the message is the reason."""


@dataclass
class Step:
    stage: str
    name: str
    status: str = "ok"
    seconds: float = 0.0
    facts: Facts = field(default_factory=dict)


class Report:
    """The steps so far, and the seconds left in the current stage."""

    def __init__(self, folder: Path, machine: Facts, unable: str | None = None):
        """
        Args:
            folder: for the JSON and the logs; earlier steps of the same machine in it are kept
            machine: a description of the machine
            unable: the reason why no step can run here, None if steps can run
        """
        self.folder, self.machine, self.unable = folder, machine, unable
        folder.mkdir(parents=True, exist_ok=True)
        self.earlier, self.steps = self._read(), []
        self.name, self._start = "", time.monotonic()

    def _read(self) -> list[Step]:
        file = self.folder / REPORT
        found = json.loads(file.read_text()) if file.is_file() else {"machine": None}
        return [Step(**step) for step in found["steps"]] if found["machine"] == self.machine else []

    def stage(self, name: str, run: Callable[[], None]) -> None:
        """Run a stage: ``run`` runs its steps. The stage gets a new time budget, and its earlier steps are dropped."""
        self.name, self._start = name, time.monotonic()
        self.earlier = [step for step in self.earlier if step.stage != name]
        try:
            run()
        except Exception as error:
            self.step("the rest of it", partial(_raise, error))

    @property
    def left(self) -> float:
        return BUDGET - (time.monotonic() - self._start)

    def step(self, name: str, run: Callable[[Facts], None]) -> None:
        """Run a step, which fills in its facts, print the outcome, and write the JSON."""
        step, start = Step(self.name, name), time.monotonic()
        try:
            if self.unable:
                raise NotRun(self.unable)
            if self.left < LEAST:
                raise NotRun("no time left")
            run(step.facts)
        except NotRun as reason:
            step.status = f"not run: {reason}"
        except Exception as error:
            outcome = "not run" if _is_lacking(error) else "FAILED"
            step.status = f"{outcome}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        step.seconds = round(time.monotonic() - start, 1)
        self.steps.append(step)
        self.write()
        facts = "  ".join(f"{key} {value}" for key, value in step.facts.items())
        click.echo(f"{step.stage:<8} {name:<40} {step.seconds:>6.1f} s  {step.status}  {facts}")

    def write(self) -> None:
        """Write the JSON atomically, so that it stays complete if this process is killed."""
        found = {"machine": self.machine, "steps": [asdict(step) for step in self.earlier + self.steps]}
        fresh = self.folder / f"{REPORT}.new"
        fresh.write_text(json.dumps(found, indent=2) + "\n")
        fresh.replace(self.folder / REPORT)

    @property
    def failed(self) -> bool:
        return any(step.status.startswith("FAILED") for step in self.steps)


def _is_lacking(error: Exception) -> bool:
    """Return True if the error is that another package, or a part of it, is not installed."""
    return isinstance(error, ImportError) and not (error.name or "").startswith("eagle3")


def _raise(error: Exception, _facts: Facts) -> None:
    raise error


def met(found: Iterable[tuple[str, bool]]) -> str:
    """Format goals as text: met or missed."""
    return ", ".join(f"{'met' if good else 'MISSED'}: {goal}" for goal, good in found)
