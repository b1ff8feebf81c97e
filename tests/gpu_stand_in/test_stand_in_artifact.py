"""With gemma4-tiny's CUDA artifact on the stand-in for a GPU, faults put in by hand are named, nothing leaks, and a
failing driver call gives one error line."""

import json
import re
import subprocess
import sys

import pytest
import torch
from places import GPU_STAND_IN

FAULTS = {
    "stale_slot_attended_to": "output 1 of draft_decode is not finite: it read memory that nothing wrote",
    "counter_not_set_back": "small_m_kernel: the counters in argument ARRIVED are not zero after the launch",
    "row_beyond_the_last_is_read": "_attention_kernel: reads 8 bytes .*byte 8 of argument FIRST, byte 8 of 8",
    "constant_on_the_host": "constant '.*norm.*' is on device type 0 but expected device type 1",
    "inputs_of_a_graph_freed": "argument in_ptr0 is 0x.*: byte 0 of 32, which is free",
    "ids_read_before_they_are_there": r"ids \[-1\] of 2048: the host read them before they were there",
    "storages_freed_before_the_methods": "illegal memory access .*argument .* is 0x0",
    "artifact_of_another_architecture": "the GPU is sm_80, kernel .* is made for SASS sm_90",
    "module_of_another_architecture": "no kernel image is available .*the device is sm_80",
    "too_little_shared_memory": "bytes of shared memory",
    "too_little_memory": "out of memory|too little GPU memory",
}
BEFORE = "before it waits for the launches before it"
PAST = r"asks L2 for .* bytes at .*, byte (\d+) of \1 of"  # at the end of a tensor
EARLY_FAULTS = {
    "records_without_a_wait": f"int4_records_small_m_kernel: reads byte .* of argument X, .* {BEFORE}",
    "bfloat16_without_a_wait": f"_bf16_small_m_kernel: reads byte .* of argument X, .* {BEFORE}",
    "inductors_kernel_without_a_wait": f"triton_.*: (reads|writes) byte .* {BEFORE}",
    "records_load_their_input_before_the_wait": f"int4_records_small_m_kernel: reads byte .* argument X, .* {BEFORE}",
    "bfloat16_loads_its_input_before_the_wait": f"_bf16_small_m_kernel: reads byte .* argument X, .* {BEFORE}",
    "bfloat16_counts_before_the_wait": f"_bf16_small_m_kernel: changes byte 0 of argument ARRIVED, .* {BEFORE}",
    "bfloat16_asks_for_its_input_before_the_wait": f"_bf16_small_m_kernel: asks L2 for .* argument X, .* {BEFORE}",
    "bfloat16_asks_past_the_end_of_its_weight": f"_bf16_small_m_kernel: {PAST} speculator.draft",
    "records_ask_for_the_next_weight_past_its_end": f"int4_records_small_m_kernel: {PAST} speculator.target",
}
MANY = ("allocate", "cudaMemcpyAsync", "cuLaunchKernel")
ALL = ("cuModuleLoadData", "cuModuleGetFunction", "cuModuleUnload", "cuFuncSetAttribute", "cudaStreamSynchronize")
SOME = (
    "cudaSetDevice", "cudaStreamCreate", "cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaEventCreate",
    "cudaEventDestroy", "cudaEventRecord", "cudaEventQuery", "cudaEventSynchronize", "cudaGraphInstantiate",
    "cudaGraphLaunch", "cudaGraphDestroy", "cudaGraphExecDestroy",
)  # fmt: skip
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def run(name: str, *arguments: object) -> dict:
    command = [sys.executable, GPU_STAND_IN / name, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def said(cuda_artifact):
    return run("stand_in_artifact_faults.py", cuda_artifact)


@pytest.fixture(scope="module")
def said_of_early_launches(records_artifact):
    return run("stand_in_artifact_faults.py", records_artifact, "early")


@pytest.fixture(scope="module")
def sessions(cuda_artifact):
    return run("stand_in_sessions.py", cuda_artifact, 100)


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_put_into_the_artifact_is_named(name, said):
    assert re.search(FAULTS[name], said[name]), said[name]


def test_the_artifact_without_a_fault_is_accepted(said):
    assert said["right"] == "" and said.keys() == {*FAULTS, "right"}


@pytest.mark.whole
@pytest.mark.parametrize("name", EARLY_FAULTS)
def test_each_fault_of_a_launch_that_begins_early_is_named(name, said_of_early_launches):
    assert re.search(EARLY_FAULTS[name], said_of_early_launches[name]), said_of_early_launches[name]


@pytest.mark.whole
def test_a_weight_may_be_loaded_before_the_wait(said_of_early_launches):
    right = "right_with_its_weight_loaded_before_the_wait"
    assert said_of_early_launches[right] == "" and said_of_early_launches.keys() == {*EARLY_FAULTS, right}


def test_a_thousand_rounds_and_a_hundred_loads_leak_nothing(sessions):
    assert sessions["checked"] == {"more": {}, "replayed": 50} and sessions["graphs"] == {"more": {}, "replayed": 1000}
    assert sessions["without"] == {"more": {}, "replayed": 0}
    assert sessions["loads"] == sessions["clean"] and set(sessions["clean"].values()) == {0}


def test_a_runner_that_keeps_a_rounds_outputs_is_found(sessions):
    assert sessions["keeps"]["more"]["block"] >= 10


def test_a_failing_driver_call_gives_one_line_and_leaks_nothing(sessions):
    failures = sessions["failures"]
    assert {name: found["wrong"] for name, found in failures.items() if found["wrong"]} == {}
    assert all(failures[name]["tried"] >= 40 for name in MANY)
    assert all(failures[name]["tried"] >= 20 for name in ALL) and all(failures[name]["tried"] for name in SOME)
