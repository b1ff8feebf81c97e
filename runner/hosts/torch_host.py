"""Runs a CUDA artifact by PyTorch: needs only PyTorch's AOTInductor container, no ExecuTorch delegate.

1. Methods: ExecuTorch's own reader returns each method's delegate: a library, a weight table, the order of its inputs.
2. Weights: the ``.ptd`` is memory-mapped, and each storage is copied to the device once. A cache is therefore one
   tensor for all methods that name it.
3. Libraries: each is loaded through ``torch._C._aoti``; its constants are views of those storages.
4. Session: it runs the methods, by CUDA graphs if possible (``cuda_graph.py``).

The checks of the GPU are in ``torch_host_checks.py``.
"""

import ctypes
import math
import mmap
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eagle3.runner.artifact.cuda_library import CUDA_BACKEND, Library, read_library
from eagle3.runner.artifact.cuda_weights import (
    CudaWeight,
    Extent,
    WeightTable,
    check_stored,
    decode_weight_table,
    read_ptd_index,
)
from eagle3.runner.artifact.gpu_needs import recorded_launches, workspace_of
from eagle3.runner.artifact.pte import Pte, read_pte
from eagle3.runner.contract import (
    DECODE,
    DRAFT_DECODE,
    METHODS,
    READ_STATE,
    SPECULATE,
    TARGET_VERIFY,
    WRITE_STATE,
    Metadata,
    row_bounds,
)
from eagle3.runner.hosts import torch_host_checks as checks
from eagle3.runner.hosts.cuda_graph import Body, CapturedGraph, Graphed, Run, SingleThreaded, capture
from eagle3.runner.hosts.one_host import check_only_host
from eagle3.runner.hosts.session import TimedSession, missing_method

if TYPE_CHECKING:
    from executorch.exir.schema import ExecutionPlan


def open_torch_session(model: Path, stored: Path, metadata: Metadata, graphs: bool = True) -> "TorchSession":
    """Load the methods of a ``.pte`` whose weights are in the ``.ptd`` file ``stored``.

    They run on the current GPU, by CUDA graphs if ``graphs``, or on the CPU if they are compiled for it. Raises
    ValueError with one line if they cannot run here; if possible, before anything is loaded.
    """
    checks.check_torch()
    methods = read_methods(read_pte(model))
    device = torch.device("cpu" if made_for_cpu(methods) else "cuda")
    checks.check_machine({method.name: method.parsed for method in methods})
    if device.type == "cuda":
        checks.check_gpu(metadata.manifest)
        device = torch.device("cuda", torch.cuda.current_device())
        libraries = {method.name: method.parsed for method in methods}
        capability = torch.cuda.get_device_capability(device)
        checks.check_architectures(libraries, capability, metadata.manifest.get("cuda_arch"))
        gpu: Any = torch.cuda.get_device_properties(device)  # its type stub lacks the attribute of the next line
        checks.check_launches(recorded_launches(model), capability, gpu.shared_memory_per_block_optin)
    export_host_symbols(device)
    check_only_host(torch=True)
    checks.check_symbols({method.name: method.parsed.needs for method in methods})
    index, needed = read_ptd_index(stored), storages(methods)
    check_stored([method.table for method in methods], index)
    if device.type == "cuda":
        on_device = sum(weight.storage_bytes for weight in needed.values() if weight.device == device.type)
        checks.check_memory(on_device, workspace_of(model) or 0, *torch.cuda.mem_get_info(device))
    placed = place_storages(stored, index, needed, device)
    try:
        loaded = {method.name: load_method(method, placed, device) for method in methods}
    except ValueError:
        free(placed.values())
        raise
    session = TorchSession(loaded, row_bounds(metadata), device, metadata, lambda: free(placed.values()))
    if graphs and device.type == "cuda":
        session.replay_graphs()
    return session


# --- 1. Methods


@dataclass(frozen=True)
class HostMethod:
    """A method that is one delegate. ``inputs[i]`` is the index of the method's input that the library takes as its
    input i; ``outputs[i]`` is the index of the library's output that is the method's output i."""

    name: str
    table: WeightTable
    library: bytes
    parsed: Library
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def read_methods(pte: Pte) -> list[HostMethod]:
    """Return the contract's methods.

    Raises ValueError for a damaged program, and for one that runs operators outside its delegates.
    """
    named = {item.key: item.segment_index for item in pte.program.named_data or ()}
    plans = {plan.name: plan for plan in pte.program.execution_plan}
    try:
        return [_method(pte, plans[name], named) for name in RUN if name in plans]
    except LookupError as error:
        raise ValueError(f"{pte.path} is damaged (it points outside itself: {error}): export it again") from error
    except ValueError as error:
        raise ValueError(f"{pte.path}: {error}") from error


def _method(pte: Pte, plan: "ExecutionPlan", named: dict[str, int]) -> HostMethod:
    found = [delegate.id for delegate in plan.delegates]
    if found != [CUDA_BACKEND]:
        raise ValueError(f"method {plan.name} has the delegates {found}, PyTorch runs one {CUDA_BACKEND}")
    table = decode_weight_table(pte.delegate_blob(plan.delegates[0]))
    library = pte.segment(named[table.library_key])
    return HostMethod(plan.name, table, library, read_library(library), *_wiring(plan))


RUN = (*METHODS, SPECULATE, DECODE, READ_STATE, WRITE_STATE)
"""The methods that a session runs."""
DEVICE_COPIES = ("et_copy::_h2d_copy", "et_copy::_d2h_copy")


def _wiring(plan: "ExecutionPlan") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return ``HostMethod.inputs`` and ``outputs``, by following the values of a plan through its delegate.

    The delegate's order differs from the method's. ExecuTorch's copies to and from the device are skipped, because the
    host makes them here.
    """
    inputs = {value: place for place, value in enumerate(plan.inputs)}
    results: dict[int, int] = {}
    taken: tuple[int, ...] = ()
    for instruction in (instruction.instr_args for chain in plan.chains for instruction in chain.instructions):
        kind = type(instruction).__name__
        operator = plan.operators[instruction.op_index].name if kind == "KernelCall" else kind
        if operator == "DelegateCall":
            taken = tuple(inputs[value] for value in instruction.args if value in inputs)
            made = [value for value in instruction.args if value not in inputs]
            results = {value: place for place, value in enumerate(made)}
        elif operator in DEVICE_COPIES:
            source, target = instruction.args[0], instruction.args[-1]
            known = inputs if source in inputs else results
            known[target] = known[source]
        elif operator != "FreeCall":
            raise ValueError(f"method {plan.name} runs {operator} outside of its delegate: PyTorch cannot host it")
    return taken, tuple(results[value] for value in plan.outputs)


def made_for_cpu(methods: Iterable[HostMethod]) -> bool:
    """Return True if every weight is on the CPU; the code is then compiled for the CPU as well."""
    return {weight.device for method in methods for weight in method.table.weights} == {"cpu"}


# --- 2. Weights


def storages(methods: Iterable[HostMethod]) -> dict[str, CudaWeight]:
    """Map each storage key of all methods to one weight that lies in the storage."""
    return {key: weight for method in methods for key, weight in method.table.storages().items()}


def place_storages(
    stored: Path, index: dict[str, Extent], needed: dict[str, CudaWeight], device: torch.device
) -> dict[str, Tensor]:
    """Copy each storage to the device, or to the host if its weight belongs there. Return uint8 [size] by storage key.

    ``needed`` has a weight of each storage, and ``index`` has the storage's place in the file. The file is
    memory-mapped, so its pages are read while they are copied, and the system may drop them.
    """
    with stored.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return {key: _place(mapped, index[key], weight, device) for key, weight in needed.items()}


def _place(mapped: mmap.mmap, extent: Extent, weight: CudaWeight, device: torch.device) -> Tensor:
    target = device if weight.device == device.type else torch.device("cpu")
    if not extent.size:
        return torch.empty(0, dtype=torch.uint8, device=target)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mapping cannot be written, and is not
        host = torch.frombuffer(mapped, dtype=torch.uint8, count=extent.size, offset=extent.offset)
    return host.to(target, copy=True)


def view(storage: Tensor, weight: CudaWeight) -> Tensor:
    """Return a weight as a view of its storage, which other weights may share."""
    whole = torch.empty(0, dtype=weight.dtype, device=storage.device)
    return whole.set_(storage.untyped_storage(), weight.offset, weight.shape, weight.stride)


def free(placed: Iterable[Tensor]) -> None:
    """Free the storages' memory. Dropping our references is not enough, because the container never drops its own."""
    for storage in placed:
        storage.untyped_storage().resize_(0)


# --- 3. Libraries


class LoadedMethod:
    """Runs a method on inputs on the device, through PyTorch's container."""

    def __init__(self, method: HostMethod, path: Path, device: torch.device):
        """Load the library at ``path``, which may be deleted afterwards. Raises OSError or RuntimeError."""
        # The library must find its own symbols before PyTorch's: both contain instances of libstdc++'s templates, such
        # as std::regex, and those of different compilers are incompatible. PyTorch then finds the library loaded.
        self._library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL | getattr(os, "RTLD_DEEPBIND", 0))
        self._container = _container(str(path), device)
        self._method, self._device = method, device

    def give(self, constants: Mapping[str, Tensor]) -> None:
        """Set the constants, keyed by the table's names. Raises ValueError if the library needs a constant that is
        missing."""
        names = self._container.get_constant_names_to_original_fqns()
        lacking = sorted(name for name in names.values() if name and name not in constants)
        if lacking:
            raise ValueError(
                f"the library of {self._method.name} needs {lacking[0]!r}, the table lacks it: export it again"
            )
        self._constants = {name: constants[original] for name, original in names.items() if original}
        # The active buffer is updated, no constant may be missing, and this object owns the memory.
        self._container.update_constant_buffer(self._constants, False, True, True)

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        return self._wired(self._container.run, inputs)

    def capturable(self) -> tuple[Run, Callable[[], None]]:
        """Return the method in a form that a CUDA graph can capture, and a function that frees it. Raises the errors of
        ``SingleThreaded``."""
        single = SingleThreaded(self._library, self._device, self._constants)
        return lambda inputs: self._wired(single, inputs), single.close

    def _wired(self, run: Run, inputs: Sequence[Tensor]) -> list[Tensor]:
        results = run([inputs[place] for place in self._method.inputs])
        return [results[place] for place in self._method.outputs]


def load_method(method: HostMethod, placed: dict[str, Tensor], device: torch.device) -> LoadedMethod:
    """Load a method's library and set its constants.

    Raises ValueError if the library does not load, or needs a constant that the table lacks.
    """
    constants = {weight.name: view(placed[weight.storage_key], weight) for weight in method.table.weights}
    with tempfile.TemporaryDirectory(prefix="eagle3-") as folder:  # the file is needed until the library is loaded
        path = Path(folder) / f"{method.name}.so"
        path.write_bytes(method.library)
        try:
            loaded = LoadedMethod(method, path, device)
        except (OSError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"the library of {method.name} does not load ({reason}): export it again") from error
    loaded.give(constants)
    return loaded


def _container(path: str, device: torch.device) -> Any:  # noqa: ANN401 - its stub has no default for a stream
    """Return PyTorch's container with one instance of the library."""
    if device.type == "cpu":
        return torch._C._aoti.AOTIModelContainerRunnerCpu(path, 1)
    return torch._C._aoti.AOTIModelContainerRunnerCuda(path, 1, str(device))


def export_host_symbols(device: torch.device) -> None:
    """Make the symbols of PyTorch and of the driver visible to the artifact's libraries.

    Those libraries do not name the libraries they depend on, and Python loads PyTorch's with local symbols. Raises
    ValueError if the driver's library is missing.
    """
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libc10.so", "libtorch_cpu.so", *(("libc10_cuda.so", "libtorch_cuda.so") * (device.type == "cuda"))):
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    if device.type == "cuda":
        try:
            ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise ValueError(f"the NVIDIA driver's libcuda.so.1 does not load ({error}): install the driver") from error


# --- 4. The session


class TorchSession(TimedSession):
    """Methods that PyTorch runs on ``device``. Features stay there. Ids are copied to the host, which waits for the
    method to end, so ``seconds`` include the device's time."""

    def __init__(
        self,
        methods: Mapping[str, LoadedMethod],
        rows: Mapping[str, tuple[int, int]],
        device: torch.device,
        metadata: Metadata,
        free: Callable[[], None],
    ):
        """``rows``: the fewest and the most rows of each method that computes the models, which compiled code does not
        check by itself. ``free`` frees the memory of the weights."""
        super().__init__(metadata)
        self._methods, self._rows, self._device, self._free = dict(methods), rows, device, free
        self._graphs: dict[tuple[str, int], Graphed] = {}
        self.has_decode, self.has_speculate = DECODE in methods, SPECULATE in methods

    def replay_graphs(self, capture: Callable[[Body, torch.device], CapturedGraph] = capture) -> None:
        """Replay rounds as CUDA graphs: fused rounds, or else ``target_verify`` of a whole window and each draft
        step."""
        window, fused = self.metadata.chain_len + 1, {1: 0, 2: 1}  # the next window and its positions are fed back
        wanted = (
            {(SPECULATE, window): fused} if self.has_speculate else {(TARGET_VERIFY, window): {}, (DRAFT_DECODE, 1): {}}
        )
        if not self.metadata.has_draft:
            wanted = {(TARGET_VERIFY, self.metadata.window): {}, (DECODE, 1): {}}
        for (name, rows), fed_back in wanted.items():
            if name not in self._methods:
                continue
            method = self._methods[name]
            self._graphs[name, rows] = Graphed(name, method, method.capturable, fed_back, capture)

    def _call(self, name: str, *inputs: Tensor) -> Iterable[Tensor]:
        if name not in self._methods:
            raise ValueError(missing_method(name, closed=not self._methods))
        rows, (least, most) = inputs[0].shape[-1], self._rows.get(name, (0, math.inf))
        if not least <= rows <= most:
            raise ValueError(f"{name} takes {least} to {most} rows, fed {rows}")
        try:
            run = self._graphs.get((name, rows), self._methods[name])
            first, *others = run([self._fitting(value) for value in inputs])
            return first.cpu(), *others
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            of_rows = f" of {rows} rows" if name in self._rows else ""
            raise RuntimeError(f"{name}{of_rows} failed on {self._device} ({reason})") from error

    def _fitting(self, value: Tensor) -> Tensor:
        """Return the tensor as compiled code expects it: on the device, contiguous, with storage offset 0."""
        value = value.to(self._device).contiguous()
        return value.clone() if value.storage_offset() else value

    def close(self) -> None:
        if self._methods:
            for graph in self._graphs.values():
                graph.close()
            self._graphs.clear()
            self._methods.clear()
            self._free()
