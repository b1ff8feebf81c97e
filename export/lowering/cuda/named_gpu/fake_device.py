"""Part 1: makes PyTorch's and Inductor's queries about the GPU return the properties of the named one.

Part 5: makes Python operators work on fake tensors of a GPU that is not there.

``~x``, ``x[i]``, ``x[i] = y`` and ``x.copy_(y)`` first switch to the tensor's device, which a CPU build of torch
refuses even for a fake tensor. The ATen operations that they stand for do not. ExecuTorch's Triton ops use these
operators, and so does Inductor when it makes an assignment in place.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType

import torch
from torch import Tensor

from eagle3.export.patching.patches import all_replaced
from eagle3.runner.system.gpus import REGISTERS, Gpu

CACHING = (
    "torch.utils._triton",
    "torch._inductor.utils",
    "torch._inductor.runtime.hints",
    "torch._inductor.codegen.cuda.cuda_env",
    "torch._inductor.codegen.cuda.compile_utils",
)
CUDA_VERSION = "13.0"  # of the toolchain in the extra "cuda"; the CPU build of torch has none of its own


class DeviceProperties:
    """Stands in for the result of ``torch.cuda.get_device_properties``."""

    def __init__(self, gpu: Gpu):
        self.name, self.gcnArchName = gpu.name, ""
        self.major, self.minor = gpu.capability
        self.multi_processor_count = gpu.multiprocessors
        self.shared_memory_per_block = 48 << 10
        self.shared_memory_per_block_optin = gpu.shared_memory_per_block
        self.shared_memory_per_multiprocessor = gpu.shared_memory_per_multiprocessor
        self.regs_per_multiprocessor = REGISTERS
        self.max_threads_per_multi_processor = gpu.threads_per_multiprocessor
        self.max_threads_per_block = 1024
        self.warp_size = 32
        self.total_memory = gpu.memory
        self.L2_cache_size = gpu.l2_cache


def _always(value: object) -> Callable[..., object]:
    return lambda *_args, **_kwargs: value


@contextmanager
def fake_device(gpu: Gpu) -> Iterator[None]:
    """Make ``torch.cuda`` and Inductor's device interface describe ``gpu``. Streams and devices all have the number
    0."""
    properties = DeviceProperties(gpu)
    interface = "torch._dynamo.device_interface.CudaInterface."  # its other queries ask torch.cuda when they are called
    of_cuda = {
        "_is_compiled": True,
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "get_device_properties": properties,
        "get_device_capability": gpu.capability,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
    }
    values = {
        "torch.version.cuda": torch.version.cuda or CUDA_VERSION,
        "torch.accelerator.is_available": _always(False),  # it would ask the driver for streams
        "torch._C._cuda_getCurrentRawStream": _always(0),
        **{f"torch.cuda.{name}": _always(value) for name, value in of_cuda.items()},
        f"{interface}get_device_properties": staticmethod(_always(properties)),
        f"{interface}Worker.get_device_properties": staticmethod(_always(properties)),
    }
    with ExitStack() as stack:
        stack.enter_context(all_replaced(values))
        clear_query_caches()
        stack.callback(clear_query_caches)
        yield


def clear_query_caches() -> None:
    """Clear the caches that hold the results of earlier queries."""
    owners: list[ModuleType | type] = [importlib.import_module(name) for name in CACHING]
    owners += [kind for owner in owners for kind in vars(owner).values() if isinstance(kind, type)]
    for owner in owners:
        for name in list(vars(owner)):
            clear = getattr(getattr(owner, name, None), "cache_clear", None)
            if clear is not None:
                clear()


aten = torch.ops.aten
_get: Callable[..., Tensor] = Tensor.__getitem__
_set: Callable[..., None] = Tensor.__setitem__
_invert, _copy = Tensor.__invert__, Tensor.copy_


def _item(tensor: Tensor, index: object) -> Tensor:
    if tensor.device.type != "cuda":
        return _get(tensor, index)
    if isinstance(index, slice) and index.step is None:
        return aten.slice.Tensor(tensor, 0, index.start, index.stop)
    if isinstance(index, int | torch.SymInt):
        return aten.select.int(tensor, 0, index)
    if isinstance(index, Tensor):
        return aten.index.Tensor(tensor, [index])
    return _get(tensor, index)


def _set_item(tensor: Tensor, index: object, value: object) -> None:
    if tensor.device.type == "cuda" and isinstance(value, Tensor) and isinstance(index, slice):
        aten.copy_.default(_item(tensor, index), value)
    elif tensor.device.type == "cuda" and isinstance(value, Tensor) and isinstance(index, Tensor):
        aten.index_put_.default(tensor, [index], value)
    else:
        _set(tensor, index, value)


def _inverted(tensor: Tensor) -> Tensor:
    return torch.bitwise_not(tensor) if tensor.device.type == "cuda" else _invert(tensor)


def _copied(tensor: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    copy = aten.copy_.default if tensor.device.type == "cuda" else _copy
    return copy(tensor, source, non_blocking)


@contextmanager
def operators() -> Iterator[None]:
    """Make the operators work on fake tensors of a GPU, for the kinds of index above."""
    values = {"__getitem__": _item, "__setitem__": _set_item, "__invert__": _inverted, "copy_": _copied}
    with all_replaced({f"torch.Tensor.{name}": value for name, value in values.items()}):
        yield
