"""Artifacts that take minutes of one core to make: begun with the first test, one after the other, beside the tests.

With pytest-xdist one worker makes them for all: each is a folder in a place that every worker knows, with a file beside
it that says it is finished.
"""

import subprocess
import sys
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TESTS = Path(__file__).parent
CPU_FLAGS = ("--target-model", "gemma4-tiny", "--backend", "xnnpack", "--draft-qlinear", "none")
CPU_FLAGS += ("--with-decode", "--no-speculate")
COMMANDS = {
    "artifact": ("-c", "from eagle3.export.cli import main; main()", *CPU_FLAGS, "--output-dir"),
    "cuda_artifact": (TESTS / "cuda_artifact.py",),
    "host_artifact": (TESTS / "host_artifact.py",),
    "family_exports": (TESTS / "family_exports.py",),
}
"""The name of a fixture to the arguments of Python that make its folder, which is the last argument."""


class Beforehand:
    """The folders of ``COMMANDS`` below ``folder``. One process ``makes`` them, the others wait."""

    def __init__(self, folder: Path, names: Collection[str], makes: bool):
        self.folder = folder
        self.running: subprocess.Popen | None = None
        self.pool = ThreadPoolExecutor(1)
        self.names = [name for name in COMMANDS if name in names]
        for name in self.names if makes else ():
            self.pool.submit(self._make, name)

    def _make(self, name: str) -> None:
        command = [sys.executable, *COMMANDS[name], self.folder / name]
        self.running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        printed, _ = self.running.communicate()
        unfinished = self.folder / f"{name}.unfinished"
        unfinished.write_text("" if self.running.returncode == 0 else f"{printed}\nexit {self.running.returncode}")
        unfinished.rename(self.folder / f"{name}.finished")

    def __getitem__(self, name: str) -> Path:
        """The folder of an artifact, once it is there."""
        assert name in self.names, f"collection saw no test with the fixture {name}: mark it with usefixtures"
        finished = self.folder / f"{name}.finished"
        while not finished.exists():
            time.sleep(0.1)
        error = finished.read_text()
        assert not error, error
        return self.folder / name

    def stop(self, wait: bool) -> None:
        """Ends the making, or ``wait`` for it where another process may need what is left."""
        if not wait and self.running is not None:
            self.running.kill()
        self.pool.shutdown(wait=wait, cancel_futures=not wait)
