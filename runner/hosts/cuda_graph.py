"""Runs a method as a CUDA graph: captured once, then replayed by one launch instead of hundreds.

1. PyTorch's container queries an event to see whether its last run has ended, which is forbidden during capture. Every
   library has another entry point that queries nothing. PyTorch does not expose it to Python, so it is called here
   through ctypes.
2. A captured graph always reads its inputs from the same memory and writes its outputs to the same memory.
"""

import ctypes
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

Run = Callable[[Sequence[Tensor]], list[Tensor]]
"""A method: takes its inputs on the device and returns its outputs there, in the contract's order."""

_size = ctypes.c_size_t
_PREFIX = "AOTInductorModelContainer"
NEEDED = tuple(
    _PREFIX + name
    for name in (
        "CreateWithDevice",
        "UpdateUserManagedConstantBufferPairs",
        "GetNumOutputs",
        "RunSingleThreaded",
        "Delete",
    )
)
log = logging.getLogger(__name__)


class ConstantEntry(ctypes.Structure):
    """The layout of the C struct ``AOTInductorConstantMapEntry``."""

    _fields_ = [("name", ctypes.c_char_p), ("handle", ctypes.c_void_p)]


class SingleThreaded:
    """Calls a library without PyTorch's container around it: no event, no lock, no check of the inputs."""

    def __init__(self, library: ctypes.CDLL, device: torch.device, constants: Mapping[str, Tensor]):
        """``constants`` are keyed by the library's own names; the caller keeps their ownership.

        Raises ValueError for a library that lacks one of NEEDED (made by a PyTorch before 2.13), RuntimeError if a call
        fails.
        """
        lacking = [name for name in NEEDED if not hasattr(library, name)]
        if lacking:
            raise ValueError(f"its library has no {lacking[0]}: an earlier PyTorch made it")
        self._library, self._device = library, device
        self._container = ctypes.c_void_p()
        self._call("CreateWithDevice", ctypes.byref(self._container), _size(1), str(device).encode(), b"")
        try:
            self._bind(constants)
            count = _size()
            self._call("GetNumOutputs", self._container, ctypes.byref(count))
        except RuntimeError:
            self.close()
            raise
        self._outputs = count.value

    def _bind(self, constants: Mapping[str, Tensor]) -> None:
        handles = _handles(constants.values())
        try:
            entries = (ConstantEntry(name.encode(), handle) for name, handle in zip(constants, handles, strict=True))
            # The active buffer is updated, and no constant may be missing.
            inactive, whole = ctypes.c_bool(False), ctypes.c_bool(True)
            given = (ConstantEntry * len(handles))(*entries), _size(len(handles))
            self._call("UpdateUserManagedConstantBufferPairs", self._container, *given, inactive, whole)
        finally:
            _tensors(handles)  # frees the handles, since the container makes its own

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run on the current stream. Inputs and outputs are in the library's order."""
        given, made = (ctypes.c_void_p * len(inputs))(*_handles(inputs)), (ctypes.c_void_p * self._outputs)()
        stream = torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else None
        arrays = given, _size(len(inputs)), made, _size(self._outputs)
        try:
            self._call("RunSingleThreaded", self._container, *arrays, ctypes.c_void_p(stream), None)
        except RuntimeError:
            _tensors([handle for handle in given if handle])  # the library sets the handles that it has taken to null
            raise
        return _tensors(made)

    def close(self) -> None:
        if self._container:
            self._call("Delete", self._container)
            self._container = ctypes.c_void_p()

    def _call(self, name: str, *arguments: Any) -> None:
        if getattr(self._library, _PREFIX + name)(*arguments):
            raise RuntimeError(f"{_PREFIX}{name} failed{self._reason()}")

    def _reason(self) -> str:
        said = ctypes.c_char_p()
        if hasattr(self._library, "AOTInductorGetLastError"):
            self._library.AOTInductorGetLastError(ctypes.byref(said))
        return f" ({' '.join(said.value.decode(errors='replace').split())})" if said.value else ""


def _handles(tensors: Iterable[Tensor]) -> list[int]:
    """Return an ``AtenTensorHandle`` for each tensor. The callee that takes a handle frees it."""
    capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return [pointer(capsule, None) for capsule in capsules]


def _tensors(handles: Iterable[int]) -> list[Tensor]:
    """Turn handles that we own into tensors. Each handle is freed with its tensor."""
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs([capsule(handle, None, None) for handle in handles])


class CapturedGraph(Protocol):
    """The part of ``torch.cuda.CUDAGraph`` that is used here."""

    def replay(self) -> None: ...
    def reset(self) -> None: ...


Body = Callable[[], None]


def capture(body: Body, device: torch.device) -> CapturedGraph:
    """Capture the work that ``body`` launches on ``device``. Raises RuntimeError if some of it cannot be captured.

    ``torch.cuda.graph`` leaves its own stream current if beginning or ending the capture fails. Later calls would then
    run on that stream, unordered with the work on the caller's stream. Here the caller's stream is always restored, and
    later allocations leave the graph's memory pool.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the graph's pool takes memory of its own
        # PyTorch's own capture stream belongs to the device of its first capture.
        with torch.cuda.stream(torch.cuda.Stream()):
            try:
                graph.capture_begin(pool, capture_error_mode="thread_local")  # other threads may go on
            except RuntimeError:
                _leave_pool(device, pool)
                raise
            try:
                body()
            except BaseException:
                with suppress(RuntimeError):  # the first exception says why the capture failed
                    graph.capture_end()
                raise
            graph.capture_end()
    return graph


def _leave_pool(device: torch.device, pool: tuple[int, int]) -> None:
    """Leave the graph's memory pool: a capture enters it first and stays in it if the capture is refused."""
    with suppress(RuntimeError):  # the capture was refused before it entered the pool
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)


WARM_UP = 2
"""Calls before the capture: the first one loads kernels and allocates workspaces."""


class Graphed:
    """A method at one number of rows, replayed as a CUDA graph. If it cannot be captured, it runs without a graph, and
    the log says why."""

    def __init__(
        self,
        name: str,
        plain: Run,
        make_capturable: Callable[[], tuple[Run, Callable[[], None]]],
        fed_back: Mapping[int, int],
        capture: Callable[[Body, torch.device], CapturedGraph] = capture,
    ):
        """
        Args:
            plain: the method without a graph
            make_capturable: returns the method in a form that can be captured, and a function that frees it
            fed_back: maps the index of each output that is an input of the next call to the index of that input. Such
                an output is returned as the input's own tensor, so that nothing is copied if it is passed in again
            capture: replaced by a fake on a machine without a GPU
        """
        self._name, self._plain, self._make_capturable = name, plain, make_capturable
        self._fed_back, self._capture = fed_back, capture
        self._wanted, self._warm = True, 0
        self._run: Run | None = None
        self._free: Callable[[], None] | None = None
        self._graph: CapturedGraph | None = None
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the method. The caller must read the first output before the next call overwrites it."""
        if self._graph is None and self._wanted:
            try:
                if self._warm < WARM_UP:
                    return self._warm_up(inputs)
                self._inputs = [value.clone() for value in inputs]
                self._graph = self._capture(self._body, self._inputs[0].device)
            except (RuntimeError, ValueError) as error:
                log.warning("no CUDA graph of %s, which runs without one: %s", self._name, " ".join(str(error).split()))
                self.close()
        return self._plain(inputs) if self._graph is None else self._replay(self._graph, inputs)

    def _warm_up(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        if self._run is None:
            self._run, self._free = self._make_capturable()
        outputs = self._run(inputs)
        self._warm += 1
        return outputs

    def _replay(self, graph: CapturedGraph, inputs: Sequence[Tensor]) -> list[Tensor]:
        for static, given in zip(self._inputs, inputs, strict=True):
            if given is not static:
                static.copy_(given)
        graph.replay()
        first, *others = self._outputs
        return [first, *(out if at in self._fed_back else out.clone() for at, out in enumerate(others, 1))]

    def _body(self) -> None:
        assert self._run is not None  # set by ``_warm_up``
        self._outputs = self._run(self._inputs)
        for output, place in self._fed_back.items():
            self._inputs[place].copy_(self._outputs[output])
            self._outputs[output] = self._inputs[place]

    def close(self) -> None:
        """Run without a graph from now on. The graph is freed before the memory that it reads and writes."""
        if self._graph is not None:
            self._graph.reset()
        self._wanted, self._graph, self._run, self._inputs, self._outputs = False, None, None, [], []
        if self._free is not None:
            self._free()
            self._free = None
