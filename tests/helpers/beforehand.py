"""Makes artifacts that take minutes of one core, one after the other, while tests run. With pytest-xdist, the workers
report which artifacts they need, and the controlling process makes each one for all workers. So no worker waits for one
that died. Each artifact is a folder with a path that all processes know; a file beside it marks it as finished.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

HELPERS = Path(__file__).parent
STAND_IN = HELPERS.parent / "gpu_stand_in"
CPU_FLAGS = ("--target-model", "gemma4-tiny", "--backend", "xnnpack", "--draft-qlinear", "none")
CPU_FLAGS += ("--with-decode", "--no-speculate")
RECORDS = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(STAND_IN)!r})
from cuda_artifact import DEFAULT, export
one = ("--cuda-arch", "sm_90") if "--cuda-arch" in DEFAULT else ()
export(Path(sys.argv[1]), (*DEFAULT, *one, "--no-fit", "--int4-layout", "records"))
"""
COMMANDS = {
    "artifact": ("-c", "from eagle3.export.cli import main; main()", *CPU_FLAGS, "--output-dir"),
    "cuda_artifact": (STAND_IN / "cuda_artifact.py",),
    "records_artifact": ("-c", RECORDS),
    "host_artifact": (HELPERS / "host_artifact.py",),
    "family_exports": (HELPERS / "family_exports.py",),
}
"""The name of a fixture to the arguments of Python that make its folder, which is the last argument."""


class Beforehand:
    """The artifacts of ``COMMANDS`` in folders below ``folder``. One process calls ``make``; the processes that run
    tests wait for the folders."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.running: subprocess.Popen | None = None
        self.pool = ThreadPoolExecutor(1)
        self.making: list[Future] = []
        self.asked = folder / "asked"

    def ask(self, names: Collection[str]) -> None:
        """Request the artifacts that the tests need. Every process that runs tests requests the same ones."""
        with tempfile.NamedTemporaryFile("w", dir=self.folder, delete=False) as file:
            file.write(" ".join(name for name in COMMANDS if name in names))
        Path(file.name).rename(self.asked)

    def make(self) -> None:
        """Begin to make the requested artifacts. Later calls do nothing."""
        if not self.making:
            self.making = [self.pool.submit(self._make, name) for name in self.asked.read_text().split()]

    def _make(self, name: str) -> None:
        command = [sys.executable, *COMMANDS[name], self.folder / name]
        self.running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        printed, _ = self.running.communicate()
        unfinished = self.folder / f"{name}.unfinished"
        unfinished.write_text("" if self.running.returncode == 0 else f"{printed}\nexit {self.running.returncode}")
        unfinished.rename(self.folder / f"{name}.finished")

    def __getitem__(self, name: str) -> Path:
        """Wait for an artifact and return its folder."""
        asked = self.asked.read_text().split()
        assert name in asked, f"collection saw no test with the fixture {name}: mark it with usefixtures"
        finished = self.folder / f"{name}.finished"
        while not finished.exists():
            time.sleep(0.1)
        error = finished.read_text()
        assert not error, error
        return self.folder / name

    def stop(self) -> None:
        """Stop making artifacts."""
        # Cancelled first, so that no other artifact begins when the child ends.
        self.pool.shutdown(wait=False, cancel_futures=True)
        if self.running is not None:
            self.running.kill()
        self.pool.shutdown()
