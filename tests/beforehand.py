"""Artifacts that take minutes of one core to make: begun with the first test, one after the other, beside the tests."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NAMES = ("cuda_artifact", "host_artifact", "family_exports")
"""Of fixtures, and of the commands that make them, beside this file: they take the folder."""


class Beforehand:
    def __init__(self, names: Iterable[str]):
        self.folder = Path(tempfile.mkdtemp())
        self.running: subprocess.Popen | None = None
        self.pool = ThreadPoolExecutor(1)
        self.made = {name: self.pool.submit(self._make, name) for name in names}

    def _make(self, name: str) -> Path:
        output = self.folder / name
        command = [sys.executable, Path(__file__).with_name(f"{name}.py"), output]
        self.running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        printed, _ = self.running.communicate()
        assert self.running.returncode == 0, printed
        return output

    def __getitem__(self, name: str) -> Path:
        """The folder of an artifact, once it is there."""
        if name not in self.made:  # asked for by request.getfixturevalue, which collection does not see
            self.made[name] = self.pool.submit(self._make, name)
        return self.made[name].result()

    def stop(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        if self.running is not None:
            self.running.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
