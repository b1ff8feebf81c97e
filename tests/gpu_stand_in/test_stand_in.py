"""The stand-in for a GPU reports calls that a GPU refuses or silently gets wrong, and accepts correct ones."""

import json
import re
import subprocess
import sys

import pytest
import torch
from places import GPU_STAND_IN

SCRIPT = GPU_STAND_IN / "stand_in_faults.py"
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_the_stand_in_names_each_fault_and_accepts_correct_programs():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert {name: each for name, each in said.items() if not re.search(each[0] or "^$", each[1])} == {}
    assert sum(bool(says) for says, _ in said.values()) >= 35 and sum(not says for says, _ in said.values()) >= 4


def test_a_host_access_to_device_memory_ends_the_process_with_one_line():
    done = subprocess.run([sys.executable, SCRIPT, "host_touches_device_memory"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "the host touched device memory: byte 0 of 12"
