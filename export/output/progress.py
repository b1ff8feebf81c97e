"""Shows the progress of an export: a line per stage on stderr, with the seconds and the peak resident memory, which
``export.json`` also records."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Progress:
    """Prints and records the stages of an export. ``stages`` is a list of ``{"stage", "seconds", "peak_mb"}``, in the
    order in which the stages ended."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self.stages: list[dict] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        with suppress(OSError):
            _CLEAR.write_text("5")  # on Linux the peak is counted from here
        start = time.monotonic()
        with self.console.status(name):
            yield
        record = {"stage": name, "seconds": round(time.monotonic() - start, 2), "peak_mb": round(peak_resident_mb())}
        self.stages.append(record)
        self.console.print(f"{name:<34} {record['seconds']:>8.1f} s {record['peak_mb']:>8,} MB")

    @contextmanager
    def warned_of(self, *errors: type[Exception]) -> Iterator[None]:
        """Print a warning in place of an error of these types that ends the context."""
        try:
            yield
        except errors as error:
            self.say(f"Warning: {error}")

    def say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True)


def peak_resident_mb() -> float:
    """Return the peak resident memory in MB (10^6 bytes) since the stage began, or since the process began if the
    system cannot say."""
    with suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024 / 1e6
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
