"""The methods of an artifact for the CPU share one packed copy of each weight."""

import subprocess
import sys

from eagle3.runner.hosts.executorch_host import load_runtime
from eagle3.runner.hosts.packed_file import packed_weights_shared

LOADED = """
import sys
from contextlib import nullcontext
from pathlib import Path
from eagle3.runner.artifact.opening import open_artifact
from eagle3.runner.hosts import opening
if sys.argv[2] == "own":
    opening.packed_weights_shared = nullcontext
session = opening.open_session(open_artifact(Path(sys.argv[1])))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("RssAnon")))
"""


def test_the_installed_executorch_has_the_option_of_shared_packed_weights():
    load_runtime()  # registers the backend
    with packed_weights_shared() as has:
        assert has


def test_a_weight_is_packed_once_for_all_methods(artifact):
    def private_bytes(whose: str) -> int:
        command = [sys.executable, "-c", LOADED, str(artifact), whose]
        return 1024 * int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])

    weights = (artifact / "model.pte").stat().st_size
    assert private_bytes("own") - private_bytes("shared") > weights  # there are three methods of the target
