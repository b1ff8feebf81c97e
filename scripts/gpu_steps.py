"""Steps of a check on a GPU: each ends as ok, failed or not run, and the JSON has all of them after each."""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click

BUDGET = 8 * 60  # seconds of a stage
LEAST = 20  # seconds that a step is begun with
REPORT = "gpu_check.json"
Facts = dict[str, Any]


class NotRun(Exception):
    """Why a step was not run."""


@dataclass
class Step:
    stage: str
    name: str
    status: str = "ok"
    seconds: float = 0.0
    facts: Facts = field(default_factory=dict)


class Report:
    """The steps so far, and the seconds that are left to the stage."""

    def __init__(self, folder: Path, machine: Facts, unable: str | None = None):
        """
        Args:
            folder: of the JSON and the logs; steps of the same machine that it has from before are kept
            machine: what is measured on
            unable: why no step can run here
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
        """``run`` takes the steps of a stage, which has its own time; those of before go."""
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
        """Run a step, which fills in its facts, print what came of it, and write the JSON."""
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
        """Whole or not at all, whenever this process ends."""
        found = {"machine": self.machine, "steps": [asdict(step) for step in self.earlier + self.steps]}
        fresh = self.folder / f"{REPORT}.new"
        fresh.write_text(json.dumps(found, indent=2) + "\n")
        fresh.replace(self.folder / REPORT)

    @property
    def failed(self) -> bool:
        return any(step.status.startswith("FAILED") for step in self.steps)


def _is_lacking(error: Exception) -> bool:
    """Whether another package lacks what a step needs: none of ours, and nothing that went wrong."""
    return isinstance(error, ImportError) and not (error.name or "").startswith("eagle3")


def _raise(error: Exception, _facts: Facts) -> None:
    raise error


def met(found: Iterable[tuple[str, bool]]) -> str:
    """Goals in words."""
    return ", ".join(f"{'met' if good else 'MISSED'}: {goal}" for goal, good in found)
