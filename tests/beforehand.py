"""Artifacts that take minutes of one core to make: begun with the first test, one after the other, beside the tests."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ARCH = () if torch.cuda.is_available() else ("--cuda-arch", "sm_90")
COMMANDS = {  # by fixture; the folder comes last
    "cuda_artifact": ("-m", "eagle3.export.cli", "--target-model", "gemma4-tiny", *ARCH, "--output-dir"),
    "host_artifact": (str(Path(__file__).with_name("host_artifact.py")),),
    "family_exports": (str(Path(__file__).with_name("family_exports.py")),),
}


class Beforehand:
    def __init__(self, names: Iterable[str]):
        self.folder = Path(tempfile.mkdtemp())
        self.running: subprocess.Popen | None = None
        self.pool = ThreadPoolExecutor(1)
        self.made = {name: self.pool.submit(self._make, name) for name in names}

    def _make(self, name: str) -> Path:
        output = self.folder / name
        command = [sys.executable, *COMMANDS[name], str(output)]
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
