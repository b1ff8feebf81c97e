"""With gemma4-tiny's CUDA artifact on the stand-in for a GPU, faults put in by hand are named, nothing leaks, and a
failing driver call gives one error line."""

import json
import re
import subprocess
import sys

import pytest
import torch
from places import GPU_STAND_IN

OFTEN = ("allocate", "cudaMemcpyAsync", "cuLaunchKernel", "cuModuleLoadData", "cuModuleGetFunction", "cuModuleUnload")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def run(name: str, *arguments: object) -> dict:
    command = [sys.executable, GPU_STAND_IN / name, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_named(said: dict[str, list[str]], least: int) -> None:
    assert {name: each for name, each in said.items() if not re.search(each[0] or "^$", each[1])} == {}
    assert len(said) >= least and "" in [says for says, _ in said.values()]


def test_each_fault_put_into_the_artifact_is_named_and_none_is_found_without(cuda_artifact):
    assert_named(run("stand_in_artifact_faults.py", cuda_artifact), 18)


@pytest.mark.whole
def test_each_fault_of_a_launch_that_begins_early_is_named_and_a_weight_may_be_loaded_first(records_artifact):
    assert_named(run("stand_in_artifact_faults.py", records_artifact, "early"), 10)


@pytest.fixture(scope="module")
def sessions(cuda_artifact, request):
    return run("stand_in_sessions.py", cuda_artifact, 16)


def test_a_state_of_two_pieces_is_carried_to_another_session_bit_for_bit(sessions):
    assert sessions["carried"] == []


def test_hundreds_of_rounds_and_many_loads_leak_nothing_and_kept_outputs_are_found(sessions):
    assert sessions["checked"] == {"more": {}, "replayed": 50} and sessions["graphs"] == {"more": {}, "replayed": 300}
    assert sessions["without"] == {"more": {}, "replayed": 0}
    assert sessions["loads"] == sessions["clean"] and set(sessions["clean"].values()) == {0}
    assert sessions["keeps"]["more"]["block"] >= 10


def test_a_failing_driver_call_gives_one_line_and_leaks_nothing(sessions):
    failures = sessions["failures"]
    assert {name: found["wrong"] for name, found in failures.items() if found["wrong"]} == {}
    assert all(found["tried"] >= (16 if name in OFTEN else 1) for name, found in failures.items())
