"""Gives PyTorch's CPU build a CUDA device: tensors of device type CUDA on the stand-in's driver, and the part of
``torch.cuda`` that a runner uses. PyTorch's own Python code stays (``torch.cuda.graph``);
``device/torch_device.cpp`` and this module replace its CUDA libraries.
"""

import ctypes
import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from stand_in_driver import StandIn, built
from torch import Tensor

from eagle3.runner.hosts.cuda_graph import _handles, _tensors

NON_BLOCKING = 1
MODES = {"global": 0, "thread_local": 1, "relaxed": 2}


class Container:
    """A stand-in for ``AOTIModelContainerRunnerCuda``."""

    library: ctypes.CDLL

    def __init__(self, path: str, models: int, device: str):
        self._made = ctypes.c_void_p()
        given = path.encode(), ctypes.c_size_t(models), device.encode()
        self._checked(self.library.stand_in_container(ctypes.byref(self._made), *given))

    def __del__(self):
        if self._made:
            self.library.stand_in_container_delete(self._made)

    def _checked(self, result: int) -> int:
        if result < 0:
            raise RuntimeError(self.library.stand_in_error().decode(errors="replace"))
        return result

    def get_constant_names_to_original_fqns(self) -> dict[str, str]:
        lines = self.library.stand_in_container_names(self._made).decode().splitlines()
        return dict(line.split("\t") for line in lines)

    def update_constant_buffer(self, constants: dict[str, Tensor], inactive: bool, whole: bool, theirs: bool) -> None:
        names = (ctypes.c_char_p * len(constants))(*(name.encode() for name in constants))
        handles = _handles(constants.values())
        given = (ctypes.c_void_p * len(handles))(*handles)
        flags = map(ctypes.c_bool, (inactive, whole, theirs))
        try:
            count = ctypes.c_size_t(len(handles))
            self._checked(self.library.stand_in_container_update(self._made, names, given, count, *flags))
        finally:
            _tensors(handles)

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        handles, most = _handles(inputs), 64
        given, made = (ctypes.c_void_p * len(handles))(*handles), (ctypes.c_void_p * most)()
        sizes = ctypes.c_size_t(len(handles)), ctypes.c_size_t(most)
        try:
            count = self._checked(self.library.stand_in_container_run(self._made, given, sizes[0], made, sizes[1]))
        finally:
            _tensors(handles)
        return _tensors(made[:count])


class Cuda:
    """A stand-in for ``torch.cuda`` and its classes, over the driver's calls."""

    def __init__(self, device: StandIn, library: ctypes.CDLL):
        self.device, self.library = device, library
        self.pools, self.entered = itertools.count(1), None
        """``entered``: the graph's pool that memory is taken from."""
        cuda = self

        class Stream:
            """Stands for ``torch.cuda.Stream``. ``handle`` is an existing stream; 0 is the legacy stream."""

            def __init__(self, device=None, priority=0, handle: int | None = None):
                self._mine, self.cuda_stream, self.device = handle is None, handle, torch.device("cuda", 0)
                if self._mine:
                    made = ctypes.c_void_p()
                    cuda.device.cudaStreamCreateWithFlags(ctypes.byref(made), NON_BLOCKING)
                    self.cuda_stream = made.value

            def __del__(self):
                if self._mine and self.cuda_stream:
                    cuda.library_of_driver.cudaStreamDestroy(ctypes.c_void_p(self.cuda_stream))

            def synchronize(self) -> None:
                cuda.device.cudaStreamSynchronize(self.cuda_stream)

            def query(self) -> bool:
                return cuda.library_of_driver.cudaStreamQuery(ctypes.c_void_p(self.cuda_stream)) == 0

            def wait_event(self, event: Any) -> None:
                cuda.device.cudaStreamWaitEvent(self.cuda_stream, event.handle, 0)

            def wait_stream(self, stream: "Stream") -> None:
                self.wait_event(stream.record_event())

            def record_event(self, event: Any = None) -> Any:
                event = event or Event()
                event.record(self)
                return event

            def __eq__(self, other: object) -> bool:
                return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

            def __hash__(self) -> int:
                return hash(self.cuda_stream)

        class Event:
            """A stand-in for ``torch.cuda.Event``."""

            def __init__(self, *_, **__):
                self.handle = ctypes.c_void_p()
                cuda.device.cudaEventCreateWithFlags(ctypes.byref(self.handle), 2)

            def __del__(self):
                if self.handle:
                    cuda.library_of_driver.cudaEventDestroy(self.handle)

            def record(self, stream: Stream | None = None) -> None:
                cuda.device.cudaEventRecord(self.handle, (stream or cuda.current_stream()).cuda_stream)

            def wait(self, stream: Stream | None = None) -> None:
                (stream or cuda.current_stream()).wait_event(self)

            def query(self) -> bool:
                return cuda.library_of_driver.cudaEventQuery(self.handle) == 0

            def synchronize(self) -> None:
                cuda.device.cudaEventSynchronize(self.handle)

        class Graph:
            """Stands for ``torch.cuda.CUDAGraph``: a graph and its executable, in the memory allocated at the
            capture."""

            def __init__(self, keep_graph: bool = False):
                self._graph, self._executable = ctypes.c_void_p(), ctypes.c_void_p()
                self._stream: Stream | None = None

            def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_) -> None:
                if self._executable:
                    raise RuntimeError("This CUDAGraph instance already owns a captured graph.")
                stream = cuda.current_stream()
                if not stream.cuda_stream:
                    raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
                cuda.entered = pool or cuda.graph_pool_handle()
                cuda.device.cudaStreamBeginCapture(stream.cuda_stream, MODES[capture_error_mode])
                self._stream = stream

            def capture_end(self) -> None:
                if cuda.current_stream() != self._stream:
                    raise RuntimeError("Capture must end on the same stream it began on.")
                cuda.entered = None
                cuda.device.cudaStreamEndCapture(self._stream.cuda_stream, ctypes.byref(self._graph))
                cuda.device.cudaGraphInstantiate(ctypes.byref(self._executable), self._graph, 0)
                cuda.device.cudaGraphDestroy(self._graph)
                self._graph = ctypes.c_void_p()

            def replay(self) -> None:
                if not self._executable:
                    raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
                cuda.device.cudaGraphLaunch(self._executable, cuda.current_stream().cuda_stream)

            def pool(self) -> tuple[int, int]:
                return (0, id(self))

            def reset(self) -> None:
                for name, handle in (("cudaGraphExecDestroy", self._executable), ("cudaGraphDestroy", self._graph)):
                    if handle and (code := getattr(cuda.library_of_driver, name)(handle)):
                        warnings.warn(cuda.library_of_driver.cudaGetErrorString(code).decode(), stacklevel=2)
                self._graph, self._executable = ctypes.c_void_p(), ctypes.c_void_p()

            __del__ = reset

        class StreamContext:
            """Stands for ``torch.cuda.stream``. Like PyTorch's own, only ``__exit__`` restores the previous stream."""

            def __init__(self, stream: Stream | None):
                self._stream = stream

            def __enter__(self) -> None:
                self._before = cuda.current_stream()
                cuda.set_stream(self._stream)

            def __exit__(self, *_) -> None:
                cuda.set_stream(self._before)

        self.Stream, self.Event, self.CUDAGraph, self.stream = Stream, Event, Graph, StreamContext

    @property
    def library_of_driver(self) -> ctypes.CDLL:
        return self.device.library

    def current_stream(self, device: Any = None) -> Any:
        return self.Stream(handle=self.library.stand_in_current_stream() or 0)

    def set_stream(self, stream: Any) -> None:
        if stream is not None:
            self.library.stand_in_set_stream(stream.cuda_stream)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        available, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.device.cudaMemGetInfo(ctypes.byref(available), ctypes.byref(total))
        return available.value, total.value

    def attribute(self, number: int) -> int:
        value = ctypes.c_int()
        self.device.cudaDeviceGetAttribute(ctypes.byref(value), number, 0)
        return value.value

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return self.attribute(75), self.attribute(76)

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        major, minor = self.get_device_capability()
        shared = {"shared_memory_per_block": 48 << 10, "shared_memory_per_block_optin": self.attribute(97)}
        total = {"total_memory": self.mem_get_info()[1], "multi_processor_count": self.attribute(16)}
        return SimpleNamespace(name="the stand-in", major=major, minor=minor, warp_size=32, **shared, **total)

    def graph_pool_handle(self) -> tuple[int, int]:
        return 0, next(self.pools)

    def leave_pool(self, device: int, pool: tuple[int, int]) -> None:
        if self.entered == pool:
            self.entered = None

    def is_current_stream_capturing(self) -> bool:
        status = ctypes.c_int()
        self.device.cudaStreamIsCapturing(self.current_stream().cuda_stream, ctypes.byref(status))
        return bool(status.value)

    def surface(self) -> dict[str, Any]:
        """Return the names of ``torch.cuda`` and their replacements."""
        mine = (
            "current_stream", "set_stream", "stream", "mem_get_info", "get_device_capability", "get_device_properties",
            "is_current_stream_capturing", "graph_pool_handle", "Stream", "Event", "CUDAGraph",
        )  # fmt: skip
        fixed = {
            "is_available": lambda: True, "init": lambda: None, "_lazy_init": lambda: None,
            "is_initialized": lambda: True,
            "device_count": lambda: 1, "current_device": lambda: 0, "empty_cache": lambda: None,
            "get_device_name": lambda device=None: "the stand-in", "set_device": lambda device: None,
            "default_stream": lambda device=None: self.Stream(handle=0),
            "synchronize": lambda device=None: self.device.cudaDeviceSynchronize(),
        }  # fmt: skip
        return fixed | {name: getattr(self, name) for name in mine}


def load(device: StandIn) -> Cuda:
    """Enable tensors on the device for the rest of the process."""
    folder = Path(torch.__file__).parent
    includes = (f"-isystem{folder / part}" for part in ("include", "include/torch/csrc/api/include"))
    path = built("torch_device.so", "torch_device.cpp", ("-w", "-O0", *includes))
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(folder / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    for name in ("stand_in_error", "stand_in_container_names"):
        getattr(library, name).restype = ctypes.c_char_p
    for name in ("stand_in_container", "stand_in_container_update", "stand_in_container_run", "stand_in_resize"):
        getattr(library, name).restype = ctypes.c_int64
    library.stand_in_current_stream.restype = ctypes.c_void_p
    library.stand_in_set_stream.argtypes = [ctypes.c_void_p]
    library.stand_in_resize.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    Container.library = library
    return Cuda(device, library)


@contextmanager
def cuda_build(cuda: Cuda) -> Iterator[None]:
    """Make PyTorch behave like its CUDA build on a machine with a GPU."""
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if storage.device.type != "cuda":
            return resize(storage, size)
        if cuda.library.stand_in_resize(storage._cdata, size):
            raise RuntimeError(cuda.library.stand_in_error().decode())
        return storage

    class OnDevice:
        def __init__(self, device: Any):
            pass

        def __enter__(self):
            return None

        def __exit__(self, *_):
            return False

    surface = cuda.surface() | {"device": OnDevice}
    with ExitStack() as stack:
        for name, value in surface.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        for name in ("CUDAGraph", "is_current_stream_capturing"):
            stack.enter_context(patch.object(torch.cuda.graphs, name, surface[name]))
        private = {"_host_emptyCache": lambda: None, "_cuda_releasePool": lambda device, pool: None}
        for name, value in (private | {"_cuda_endAllocateToPool": cuda.leave_pool}).items():
            stack.enter_context(patch.object(torch._C, name, value, create=True))
        stack.enter_context(patch.object(torch.version, "cuda", "13.0"))
        stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resized))
        stack.enter_context(patch.object(torch._C._aoti, "AOTIModelContainerRunnerCuda", Container, create=True))
        yield
