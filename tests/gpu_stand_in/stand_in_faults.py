"""Runs code with a fault, a few lines each, and prints what the stand-in says. A GPU would say less, or nothing.

python tests/gpu_stand_in/stand_in_faults.py            JSON: maps each fault to the error expected and the one raised
python tests/gpu_stand_in/stand_in_faults.py NAME       runs a fault that ends the process
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import ctypes
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import click
import torch
from small_kernels import SmallKernels
from stand_in_driver import A100, H100, RTX_3090, StandIn
from stand_in_kernels import interpreted
from stand_in_torch import cuda_build, load

DEVICE = StandIn()
CUDA = load(DEVICE)
KERNELS = SmallKernels(DEVICE)
EARLY, NUMBERS = {6: 1}, list(range(64))
FAULTS: dict[str, tuple[str, Callable[[], object]]] = {}
"""The expected message, a regular expression, and the code, by name; no message is expected of right code."""


def fault(says: str = "") -> Callable:
    return lambda function: FAULTS.setdefault(function.__name__, (says, function))[1]


def on_device(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).to("cuda")


def fresh(count: int = 64, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(count, dtype=dtype, device="cuda")


def launch(name: str, *given: torch.Tensor | int, **more: object) -> None:
    KERNELS.launch(name, *(each if isinstance(each, int) else each.data_ptr() for each in given), **more)


def ran(name: str, *given: torch.Tensor | int, **more: object) -> torch.Tensor:
    """Launch a kernel, and return its last tensor when it has run."""
    launch(name, *given, **more)
    torch.cuda.synchronize()
    return next((each for each in reversed(given) if not isinstance(each, int)), None)


def added(given: torch.Tensor | int, out: torch.Tensor | None = None, count: int = 64, **more: object) -> torch.Tensor:
    return ran("add_one", given, fresh() if out is None else out, count, **more)


@contextmanager
def capturing() -> Iterator[torch.cuda.CUDAGraph]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="thread_local")
        yield graph
        graph.capture_end()


def current() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def captured(given: torch.Tensor) -> torch.cuda.CUDAGraph:
    """Capture a launch that reads ``given``, with its function, and return the graph."""
    function, out = KERNELS.function("add_one"), fresh()
    with capturing() as graph:
        launch("add_one", given, out, 64, stream=current(), function=function)
    graph.out = out
    return graph


# --- no fault


@fault()
def right() -> None:
    given, out = on_device(*range(100)), fresh(100)
    assert added(given, out, 100, grid=(2, 1, 1)).cpu().tolist() == list(range(1, 101))
    cache, row = fresh(131072 * 16384 + 16384, torch.int8), fresh(64, torch.int8)
    assert ran("last_row_in_64_bits", cache, row, 131072).cpu().tolist() == [-1] * 64


@fault()
def right_in_a_graph() -> None:
    weight, given, out = on_device(*[2.0] * 64), on_device(*NUMBERS), fresh()
    add, multiply = KERNELS.function("add_one"), KERNELS.function("early")
    with capturing() as graph:
        between = fresh()
        launch("add_one", given, between, 64, stream=current(), function=add)
        launch("early", weight, between, out, stream=current(), function=multiply, attributes=EARLY)
        del between
    assert torch.isnan(out.cpu()).all(), "a capture computes nothing"
    for more in (0, 10):
        given.copy_(torch.tensor(NUMBERS) + more)
        graph.replay()
        assert out.cpu().tolist() == [2 * (each + more + 1) for each in NUMBERS]
    graph.reset()


@fault()
def right_across_streams() -> None:
    given, between, out, side = on_device(*NUMBERS), fresh(), fresh(), torch.cuda.Stream()
    launch("add_one", given, between, 64)
    side.wait_stream(torch.cuda.current_stream())
    launch("add_one", between, out, 64, stream=ctypes.c_void_p(side.cuda_stream))
    torch.cuda.current_stream().wait_stream(side)
    assert out.cpu().tolist() == [each + 2 for each in NUMBERS]


def behind_another(name: str, attributes: dict[int, int] = EARLY) -> list[float]:
    """Launch a kernel early after one that writes its input, and return its result."""
    weight, given, between, out = on_device(*[2.0] * 64), on_device(*NUMBERS), fresh(), fresh()
    launch("add_one", given, between, 64)
    return ran(name, weight, between, out, attributes=attributes).cpu().tolist()


def asking(name: str, weight: torch.Tensor, following: int | torch.Tensor | None = None) -> list[float]:
    """Launch a kernel that asks L2 for 256 bytes from ``following`` on, or of its input if that is None, behind one
    that writes its input. Return its result."""
    given, between, out = on_device(*NUMBERS), fresh(), fresh()
    launch("add_one", given, between, 64)
    asked = between if following is None else following
    return ran(name, weight, between, asked, out, attributes=EARLY).cpu().tolist()


def weights(count: int) -> list[torch.Tensor]:
    return [on_device(*[each] * 64) for each in (2.0, 3.0, 4.0)[:count]]


@fault()
def right_early_and_with_prefetches() -> None:
    doubled = [2 * (each + 1) for each in NUMBERS]
    assert behind_another("early") == behind_another("early_with_its_input", {6: 0}) == doubled
    one, two = weights(2)
    for name in ("asks", "asks_before_it_waits"):
        assert asking(name, one, two) == doubled
        assert asking(name, two, one) == [3 * (each + 1) for each in NUMBERS]
    assert asking("asks_beside_w", one, two) == doubled
    asking("asks", two, one)
    asking("asks", one)  # after the wait, what a launch has written may be asked for


# --- faults

ILLEGAL, FREE = "illegal memory access .*", "argument X is 0x.*: byte 0 of 256, which is free"
FAULTS |= {
    "host_pointer_in_a_launch": (
        f"{ILLEGAL}add_one: argument X is 0x.*: the host's memory",
        lambda: added(torch.ones(64)),
    ),
    "out_of_bounds_by_one": (
        f"{ILLEGAL}reads 4 bytes .*byte 252 of argument X, byte 252 of 252",
        lambda: added(on_device(*range(63))),
    ),
    "written_out_of_bounds_by_one": (
        f"{ILLEGAL}writes 4 bytes .*byte 252 of argument OUT, byte 252 of",
        lambda: added(on_device(*NUMBERS), fresh(63)),
    ),
    "used_after_free": (ILLEGAL + FREE, lambda: added(on_device(*NUMBERS).data_ptr())),
    "misaligned_vector": (
        r"misaligned address \(add_one: argument X .*compiled for multiples of 16",
        lambda: added(on_device(*range(65))[1:]),
    ),
    "more_memory_than_there_is": ("out of memory .*17179869184 bytes", lambda: fresh(4 << 30)),
    "grid_of_zero": ("add_one over a grid of 1 x 0 x 1", lambda: added(on_device(1), grid=(1, 0, 1))),
    "other_threads_than_compiled_for": (
        "add_one by 64 threads, compiled for 32",
        lambda: added(on_device(1), threads=64),
    ),
    "shared_memory_without_leave": (
        "add_one with 65536 bytes of shared memory, allowed are 49152",
        lambda: added(on_device(1), shared=64 << 10),
    ),
    "stream_that_is_gone": (
        "add_one in an unknown stream",
        lambda: added(on_device(1), stream=ctypes.c_void_p(torch.cuda.Stream().cuda_stream)),
    ),
    "unknown_launch_attribute": (
        "add_one with launch attribute 4, which the stand-in does not know",
        lambda: added(on_device(1), attributes={4: 1}),
    ),
    "int32_offset_at_131072_slots": (
        "int32 overflow detected for operation mul",
        lambda: ran("last_row", fresh(131072 * 16384 + 16384, torch.int8), fresh(64, torch.int8), 131072),
    ),
    "misaligned_element": (
        r"misaligned address \(two_apart: reads 4 bytes .*byte 2 of argument X",
        lambda: ran("two_apart", on_device(*range(17)), fresh(16)),
    ),
    "input_read_before_the_wait": (
        "early_with_its_input: reads byte 0 of argument X, .* before it waits for the launch",
        lambda: behind_another("early_with_its_input"),
    ),
    "output_written_before_the_wait": (
        "early_with_its_output: writes byte 0 of argument OUT, .* before it waits",
        lambda: behind_another("early_with_its_output"),
    ),
    "input_read_before_the_wait_by_some_lanes": (
        "early_with_lanes_of_both: reads byte 160 of argument X, .* before it",
        lambda: behind_another("early_with_lanes_of_both"),
    ),
    "prefetch_before_the_wait_of_what_a_launch_writes": (
        "asks_before_it_waits: asks L2 for .* before it waits",
        lambda: asking("asks_before_it_waits", *weights(1)),
    ),
    "prefetch_of_24_bytes": (
        "asks_for_24_bytes: .*L2 is asked for 24 bytes, not a multiple of 16",
        lambda: asking("asks_for_24_bytes", *weights(1) * 2),
    ),
}


@fault(ILLEGAL + FREE)
def workspace_of_a_graph_freed() -> None:
    workspace = on_device(*NUMBERS)
    graph = captured(workspace)
    graph.replay()
    torch.cuda.synchronize()
    del workspace
    graph.replay()
    torch.cuda.synchronize()


@fault("arrive_and_leave: the counters in argument ARRIVED are not zero after the launch")
def counter_not_set_back() -> None:
    counter, out = torch.zeros(1, dtype=torch.int32).to("cuda"), fresh(1, torch.int32)
    ran("arrive", counter, out, 4, grid=(4, 1, 1))
    ran("arrive_and_leave", counter, out, 4, grid=(4, 1, 1))


@fault("cudaFree of 0x.*, which is free")
def freed_twice() -> None:
    made = ctypes.c_void_p()
    DEVICE.cudaMalloc(ctypes.byref(made), 64)
    DEVICE.cudaFree(made)
    DEVICE.cudaFree(made)


@fault("cudaMemcpy of 257 bytes at byte 0 of 256")
def copied_beyond_the_end() -> None:
    given = on_device(*NUMBERS)
    DEVICE.cudaMemcpy(ctypes.c_void_p(given.data_ptr()), ctypes.create_string_buffer(257), 257, 1)


@fault("said to be device to host is host to device")
def copied_in_the_wrong_direction() -> None:
    given = on_device(*NUMBERS)
    DEVICE.cudaMemcpy(ctypes.c_void_p(given.data_ptr()), ctypes.create_string_buffer(12), 12, 2)


@fault(r"the host read \[nan, nan, nan\] where \[2.0, 3.0, 4.0\] was to come")
def host_reads_before_it_waits() -> None:
    given, out, host = on_device(1, 2, 3), fresh(3), torch.zeros(3)
    launch("add_one", given, out, 3)
    host.copy_(out, non_blocking=True)
    early = host.clone()
    torch.cuda.synchronize()
    assert not torch.isnan(early).any(), f"the host read {early.tolist()} where {host.tolist()} was to come"


@fault("what the other stream read was not there yet")
def streams_without_an_event() -> None:
    given, between, out, side = on_device(1, 2, 3), fresh(3), fresh(3), torch.cuda.Stream()
    torch.cuda.synchronize()
    launch("add_one", given, between, 3)
    launch("add_one", between, out, 3, stream=ctypes.c_void_p(side.cuda_stream))
    side.synchronize()
    found = torch.empty(3)
    ctypes.memmove(found.data_ptr(), DEVICE.shown(out.data_ptr(), 12), 12)
    assert not torch.isnan(found).any(), f"what the other stream read was not there yet: {found.tolist()}"


@fault(r"fresh memory was read: \[nan, nan, nan\]")
def memory_read_before_it_is_written() -> None:
    found = added(fresh(3), fresh(3), 3).cpu()
    assert not torch.isnan(found).any(), f"fresh memory was read: {found.tolist()}"


@fault("no kernel image is available .*made for SASS sm_90, the device is sm_80")
def another_architecture() -> None:
    DEVICE.become(A100)
    KERNELS.function("add_one")


@fault("add_one wants 122880 bytes of shared memory, the device has 101376")
def more_shared_memory_than_the_device_has() -> None:
    DEVICE.become(RTX_3090._replace(arch=90))
    DEVICE.cuFuncSetAttribute(KERNELS.function("add_one"), 8, 120 << 10)


@fault("add_one takes 5 arguments, number 2 is not given")
def one_argument_too_few() -> None:
    page, here = 4096, KERNELS.function("add_one")
    memory = ctypes.create_string_buffer(3 * page)
    edge = (ctypes.addressof(memory) + 2 * page) // page * page
    libc, given = ctypes.CDLL(None), on_device(1)
    values = ctypes.c_uint64(given.data_ptr()), ctypes.c_uint64(given.data_ptr())
    places = (ctypes.c_void_p * 2).from_address(edge - 16)
    places[0], places[1] = (ctypes.addressof(each) for each in values)
    libc.mprotect(ctypes.c_void_p(edge), ctypes.c_size_t(page), 0)  # bytes after the list cannot be read
    try:
        DEVICE.cuLaunchKernel(here, 1, 1, 1, 32, 1, 1, 0, None, places, None)
    finally:
        libc.mprotect(ctypes.c_void_p(edge), ctypes.c_size_t(page), 3)


@fault("add_one runs, its module is unloaded")
def module_unloaded_before_a_replay() -> None:
    graph = captured(on_device(*NUMBERS))
    DEVICE.cuModuleUnload(KERNELS.modules["add_one"])
    graph.replay()
    torch.cuda.synchronize()


@fault("add_one: reads byte 0 of argument X, .* before it waits")
def early_launch_of_a_kernel_that_does_not_wait() -> None:
    between = fresh()
    launch("add_one", on_device(*NUMBERS), between, 64)
    added(between, attributes=EARLY)


@fault("early is launched early, on sm_80")
def early_launch_on_sm_80() -> None:
    function, given = KERNELS.function("early"), on_device(*NUMBERS)
    DEVICE.become(A100)
    launch("early", given, given, given, attributes=EARLY, function=function)


@fault("asks: asks L2 for 256 bytes at .*: byte 0 of argument NEXT")
def prefetch_past_the_end_of_the_next_weight() -> None:
    one, two = weights(2)
    asking("asks", one, two.data_ptr() + 16)


@fault("asks_beside_w: reads byte 0 .*, where the launch before it asked L2 for byte 0")
def next_weight_of_the_wrong_matmul() -> None:
    one, two, three = weights(3)
    asking("asks", one, two)
    asking("asks_beside_w", three, one)


@fault("own_small_m_kernel: reads other weights, where the")
def next_weight_behind_a_matmul_that_asks_for_nothing() -> None:
    one, two = weights(2)
    asking("asks", one, two)
    ran("own_small_m_kernel", one, one, fresh())


@fault("not permitted when stream is capturing")
def capture_with_a_wait() -> None:
    given = on_device(1)
    with capturing():
        given.cpu()


@fault(r"not permitted when stream is capturing \(cudaMalloc during a capture")
def capture_with_an_allocation() -> None:
    with capturing():
        DEVICE.cudaMalloc(ctypes.byref(ctypes.c_void_p()), 64)


@fault("add_one in the legacy stream, while its thread captures another")
def capture_with_a_launch_in_the_legacy_stream() -> None:
    given, function = on_device(1), KERNELS.function("add_one")
    with capturing():
        launch("add_one", given, given, 1, function=function)


@fault("failed due to a previous error during capture")
def capture_ended_after_what_it_refused() -> None:
    given = on_device(1)
    with capturing(), suppress(RuntimeError):
        given.cpu()


@fault("capturing stream has unjoined work")
def capture_of_a_stream_that_is_not_joined() -> None:
    side, given, function = torch.cuda.Stream(), on_device(1), KERNELS.function("add_one")
    with capturing():
        side.wait_stream(torch.cuda.current_stream())
        launch("add_one", given, given, 1, stream=ctypes.c_void_p(side.cuda_stream), function=function)


def host_touches_device_memory() -> None:
    """Ends the process."""
    given = on_device(1, 2, 3)
    torch.cuda.synchronize()
    ctypes.string_at(given.data_ptr(), 4)


def said(function: Callable[[], object]) -> str:
    """Return the message of the error that ``function`` raises, empty if it raises none."""
    try:
        function()
        return ""
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split())
    finally:
        DEVICE.recover()
        DEVICE.become(H100)
        KERNELS.kernels.announced = 0
        CUDA.library.stand_in_set_stream(None)


def main() -> None:
    with cuda_build(CUDA), interpreted(KERNELS.kernels):
        if sys.argv[1:]:
            globals()[sys.argv[1]]()
        else:
            click.echo(json.dumps({name: (says, said(function)) for name, (says, function) in FAULTS.items()}))


if __name__ == "__main__":
    main()
