"""The stand-in for a GPU reports calls that a GPU refuses or silently gets wrong, and accepts correct ones."""

import json
import re
import subprocess
import sys

import pytest
import torch
from places import GPU_STAND_IN

FAULTS = {
    # memory
    "host_pointer_in_a_launch": "illegal memory access .*add_one: argument X is 0x.*: the host's memory",
    "out_of_bounds_by_one": "illegal memory access .*reads 4 bytes .*byte 252 of argument X, byte 252 of 252",
    "written_out_of_bounds_by_one": "illegal memory access .*writes 4 bytes .*byte 252 of argument OUT, byte 252 of",
    "used_after_free": "illegal memory access .*argument X is 0x.*: byte 0 of 256, which is free",
    "workspace_of_a_graph_freed": "illegal memory access .*argument X is 0x.*: byte 0 of 256, which is free",
    "int32_offset_at_131072_slots": "int32 overflow detected for operation mul",
    "misaligned_element": r"misaligned address \(two_apart: reads 4 bytes .*byte 2 of argument X",
    "misaligned_vector": r"misaligned address \(add_one: argument X .*compiled for multiples of 16",
    "counter_not_set_back": "arrive_and_leave: the counters in argument ARRIVED are not zero after the launch",
    "freed_twice": "cudaFree of 0x.*, which is free",
    "copied_beyond_the_end": "cudaMemcpy of 65 bytes at byte 0 of 64",
    "copied_in_the_wrong_direction": "said to be device to host is host to device",
    "more_memory_than_there_is": "out of memory .*17179869184 bytes",
    # order
    "host_reads_before_it_waits": r"the host read \[nan, nan, nan\] where \[2.0, 3.0, 4.0\] was to come",
    "streams_without_an_event": "what the other stream read was not there yet",
    "memory_read_before_it_is_written": r"fresh memory was read: \[nan, nan, nan\]",
    # launches
    "another_architecture": "no kernel image is available .*made for SASS sm_90, the device is sm_80",
    "grid_of_zero": "add_one over a grid of 1 x 0 x 1",
    "grid_too_high": "add_one over a grid of 1 x 65536 x 1",
    "other_threads_than_compiled_for": "add_one by 64 threads, compiled for 32",
    "shared_memory_without_leave": "add_one with 65536 bytes of shared memory, allowed are 49152",
    "more_shared_memory_than_the_device_has": "add_one wants 122880 bytes of shared memory, the device has 101376",
    "one_argument_too_few": "add_one takes 5 arguments, number 2 is not given",
    "module_unloaded_before_a_replay": "add_one runs, its module is unloaded",
    "kernel_of_an_unloaded_module": "cuLaunchKernel of an unknown function",
    "stream_that_is_gone": "add_one in an unknown stream",
    # early launches
    "input_read_before_the_wait": "early_with_its_input: reads byte 0 of argument X, .* before it waits for the launch",
    "output_written_before_the_wait": "early_with_its_output: writes byte 0 of argument OUT, .* before it waits",
    "input_read_before_the_wait_by_some_lanes": "early_with_lanes_of_both: reads byte 160 of argument X, .* before it",
    "input_written_by_some_lanes_and_read_before_the_wait": "early_with_its_input: reads byte 0 of argument X",
    "early_launch_without_a_wait": "early_without_a_wait is launched early and does not wait for what is before it",
    "early_launch_of_a_kernel_that_knows_none": "add_one: reads byte 0 of argument X, .* before it waits",
    "early_launch_on_sm_80": "early is launched early, on sm_80",
    "unknown_launch_attribute": "add_one with launch attribute 4, which the stand-in does not know",
    # prefetches into L2
    "prefetch_past_the_end_of_the_next_weight": "asks: asks L2 for 256 bytes at .*: byte 0 of argument NEXT",
    "prefetch_of_memory_that_is_free": "asks: argument NEXT is 0x.*, which is free",
    "prefetch_before_the_wait_of_what_a_launch_writes": "asks_before_it_waits: asks L2 for .* before it waits",
    "next_weight_of_the_wrong_matmul": "asks: reads byte 0 .*, where the launch before it asked L2 for byte 0",
    "prefetch_past_the_end_by_one_thread": "asks_beside_w: asks L2 for 16 bytes at .*: byte 240 of argument NEXT",
    "next_weight_of_the_wrong_matmul_in_bfloat16": "asks_beside_w: reads byte 0 .*, where the launch before",
    "next_weight_behind_a_matmul_that_asks_for_nothing": "own_small_m_kernel: reads other weights, where the",
    "prefetch_of_24_bytes": "asks_for_24_bytes: .*L2 is asked for 24 bytes, not a multiple of 16",
    # captures
    "capture_with_a_wait": "not permitted when stream is capturing",
    "capture_with_an_allocation": r"not permitted when stream is capturing \(cudaMalloc during a capture",
    "capture_with_a_question": r"not permitted when stream is capturing \(cudaEventQuery during a capture",
    "capture_with_a_copy_in_the_legacy_stream": r"not permitted when stream is capturing \(cudaMemcpy during",
    "capture_with_a_launch_in_the_legacy_stream": "add_one in the legacy stream, while its thread captures another",
    "capture_ended_after_what_it_refused": "failed due to a previous error during capture",
    "capture_of_a_stream_that_is_not_joined": "capturing stream has unjoined work",
}
RIGHT = (
    "right",
    "right_early",
    "right_early_in_a_graph",
    "right_prefetches",
    "right_in_a_graph",
    "right_across_streams",
    "right_at_131072_slots",
)
SCRIPT = GPU_STAND_IN / "stand_in_faults.py"
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture(scope="module")
def said():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_stand_in_accepts_correct_programs(said):
    assert {name: said[name] for name in RIGHT} == dict.fromkeys(RIGHT, "")


@pytest.mark.parametrize("name", FAULTS)
def test_the_stand_in_names_each_fault(name, said):
    assert re.search(FAULTS[name], said[name]), said[name]


def test_every_fault_of_the_stand_in_has_an_expected_message(said):
    assert said.keys() == {*FAULTS, *RIGHT}


def test_a_host_access_to_device_memory_ends_the_process_with_one_line():
    done = subprocess.run([sys.executable, SCRIPT, "host_touches_device_memory"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "the host touched device memory: byte 0 of 12"
