"""Part 4: weights are fake CUDA tensors, each with a reference to its data on the host, which is written to the
``.ptd``.

The data is never copied. A memory-mapped checkpoint is read when its bytes are written. A weight is hashed before that
only if another weight may be equal to it.
"""

import ctypes
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

import torch
import torch.utils._pytree as pytree
from executorch.backends.cuda import cuda_backend
from executorch.backends.cuda.cuda_weight_collector import CudaWeightArtifact, CudaWeightCollector, CudaWeightEntry
from executorch.backends.cuda.cuda_weight_collector import _storage_key as storage_key
from executorch.exir._serialize._cord import FileBackedData
from executorch.exir.tensor import scalar_type_enum
from torch import Tensor
from torch._inductor import compile_fx, graph, ir
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram

from eagle3.export.patching.patches import all_replaced, replaced

CUDA, INDUCTOR = "executorch.backends.cuda.", "torch._inductor."

DEVICE = torch.device("cuda", 0)
Place = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]
CHUNK = 8 << 20  # bytes


class HostData(FileBackedData):
    """Gives ExecuTorch's serializer a tensor's bytes without copying them: they are read in chunks."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.size = extent * tensor.element_size() if tensor.numel() else 0
        self.digest: bytes | None = None

    def __len__(self) -> int:
        return self.size

    def _view(self) -> memoryview:
        return memoryview((ctypes.c_ubyte * self.size).from_address(self.tensor.data_ptr())).cast("B")

    def prefix(self, size: int) -> bytes:
        return bytes(self._view()[:size])

    def sha256(self) -> bytes:
        if self.digest is None:
            self.digest = hashlib.sha256(self._view()).digest()
        return self.digest

    def to_bytes(self) -> bytes:
        return bytes(self._view())

    def write_to_file(self, outfile: BinaryIO) -> None:
        view = self._view()
        for start in range(0, self.size, CHUNK):
            outfile.write(view[start : start + CHUNK])

    def close(self) -> None:
        pass


def on_named_gpu(program: ExportedProgram) -> ExportedProgram:
    """Move a program to cuda:0 with fake weights. The attribute ``host_value`` of each is the real tensor."""
    mode = next(n.meta["val"].fake_mode for n in program.graph.nodes if isinstance(n.meta.get("val"), FakeTensor))

    def fake_like(tensor: Tensor, in_mode: FakeTensorMode = mode) -> Tensor:
        with in_mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE)

    def moved(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        return fake_like(value, value.fake_mode if isinstance(value, FakeTensor) else mode)

    for values in (program._state_dict, program._constants):
        for name, value in list(values.items()):
            if not isinstance(value, Tensor):
                continue
            fake: Any = fake_like(value)
            if isinstance(value, torch.nn.Parameter):
                fake = torch.nn.Parameter(fake, requires_grad=False)
            fake.host_value = value.detach()
            values[name] = fake
    if program.example_inputs is not None:
        program._example_inputs = pytree.tree_map(moved, program.example_inputs)
    for module in program.graph_module.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": DEVICE}
            if node.target is torch.ops.aten.to.device:
                node.args = (node.args[0], DEVICE, *node.args[2:])
            node.meta["val"] = pytree.tree_map(moved, node.meta.get("val"))
    program.validate()
    return program


def place(tensor: Tensor) -> Place:
    """Return a tensor's address on the host, its shape, strides and dtype."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def host_data(collector: CudaWeightCollector, tensor: Tensor) -> HostData:
    """Return the ``HostData`` of a tensor, made once per collector, because methods share weights."""
    return collector.__dict__.setdefault("host_data", {}).setdefault(place(tensor), HostData(tensor))


def collect(
    self: CudaWeightCollector,
    weights: Mapping[str, tuple[Tensor, object]],
    _directory: str,
    device_type_for_weight: Callable[[Tensor], int],
) -> CudaWeightArtifact:
    """Replaces ``CudaWeightCollector.materialize`` without making copies: each weight is a ``HostData``."""
    entries, storages = [], {}
    for name, (tensor, _) in weights.items():
        data = host_data(self, tensor)
        device_type = device_type_for_weight(tensor)
        key = storage_key(name, device_type)
        storages[key] = data
        entries.append(
            CudaWeightEntry(
                fqn=name,
                storage_key=key,
                storage_nbytes=len(data),
                dtype=int(scalar_type_enum(tensor.dtype)),
                device_type=device_type,
                storage_offset=0,
                sizes=tuple(tensor.shape),
                strides=tuple(tensor.stride()),
            )
        )
    return CudaWeightArtifact(entries=entries, storages=storages)


@contextmanager
def _known_again() -> Iterator[None]:
    """Recognize a weight that several methods share by its ``HostData``, without hashing."""
    add = CudaWeightCollector._add_weight

    def add_once(self: CudaWeightCollector, entry: CudaWeightEntry, data: FileBackedData, external_tag: str) -> None:
        known = self._store.key_to_buffer_idx.get(entry.storage_key)
        if known is None or self._store.buffers[known] is not data:
            add(self, entry, data, external_tag)

    with replaced(f"{CUDA}cuda_weight_collector.CudaWeightCollector._add_weight", add_once):
        yield


@contextmanager
def _external_weights(target_device: torch.device) -> Iterator[None]:
    """Replaces ExecuTorch's ``_compile_time_cpu_clones``. The runtime sets constants by name, on ``target_device``.

    The C++ wrapper would record the device of a constant's data, which is the host here. A container refuses a CUDA
    tensor for a constant on the CPU, so the target device is written instead.
    """
    guard = cuda_backend._CPU_CLONE_GUARD
    earlier, guard.active = getattr(guard, "active", False), True
    write_device = CppWrapperCpu.codegen_device

    def write_target(self: CppWrapperCpu, device: torch.device) -> str:
        return write_device(self, target_device if device.type == "cpu" else device)

    try:
        with (
            replaced(f"{INDUCTOR}codecache.determine_aoti_mmap_flags", lambda _size: (True, False)),
            replaced(f"{INDUCTOR}codegen.cpp_wrapper_cpu.CppWrapperCpu.codegen_device", write_target),
        ):
            yield
    finally:
        guard.active = earlier


@contextmanager
def weights_on_host() -> Iterator[None]:
    """Make ExecuTorch's CUDA backend leave weights on the host, and Inductor work with fake ones."""
    same, clone, to_list = graph.is_same_tensor, compile_fx.clone_preserve_strides, FakeTensor.tolist
    original, get_attr = graph.GraphLowering.get_original_value_of_constant, graph.GraphLowering.get_attr

    def same_data(a: Tensor, b: Tensor) -> bool:
        if not isinstance(a, FakeTensor) and not isinstance(b, FakeTensor):
            return same(a, b)
        data_a, data_b = getattr(a, "host_value", None), getattr(b, "host_value", None)
        return a is b or (data_a is not None and data_b is not None and same(data_a, data_b))

    def clone_with_data(x: Tensor) -> Tensor:
        copy: Any = clone(x)
        if hasattr(x, "host_value"):
            copy.host_value = x.host_value
        return copy

    def data_of_constant(self: graph.GraphLowering, name: str) -> Tensor:
        value = original(self, name)
        return getattr(value, "host_value", value)

    def scalar_constant(self: graph.GraphLowering, target: str, args: tuple[()], kwargs: dict[str, object]) -> object:
        value = graph.getattr_recursive(self.module, target)
        if isinstance(value, FakeTensor) and value.shape == () and hasattr(value, "host_value"):
            return ir.Constant(value=value.host_value.item(), dtype=value.dtype, device=value.device)
        return get_attr(self, target, args, kwargs)

    def list_of_data(self: FakeTensor) -> list[Any]:
        return self.host_value.tolist() if hasattr(self, "host_value") else to_list(self)

    backend = f"{CUDA}cuda_backend.CudaBackend."
    moved = classmethod(lambda _cls, program, _device, _specs: on_named_gpu(program))
    values = {
        f"{INDUCTOR}graph.is_same_tensor": same_data,
        f"{INDUCTOR}graph.GraphLowering.get_original_value_of_constant": data_of_constant,
        f"{INDUCTOR}graph.GraphLowering.get_attr": scalar_constant,
        f"{INDUCTOR}compile_fx.clone_preserve_strides": clone_with_data,
        "torch._subclasses.fake_tensor.FakeTensor.tolist": list_of_data,
        f"{backend}move_program_to_device": moved,
        f"{backend}release_moved_tensors": classmethod(lambda _cls, _program, _specs: None),
        f"{CUDA}cuda_backend._compile_time_cpu_clones": _external_weights,
        f"{CUDA}cuda_weight_collector.CudaWeightCollector.materialize": collect,
    }
    with all_replaced(values), _known_again():
        yield
