"""Reads the contents of an artifact's ``.pte`` as plain values for ``eagle3-inspect``, one section per function.

The structure comes from the program at the head of the file (ExecuTorch's own schema and reader). The weights after it
are not read, so reading a file of 20 GB takes no longer than reading its program. Lengths are in rows (tokens).
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.runner.artifact import cuda_library
from eagle3.runner.artifact.cuda_library import CUDA_BACKEND, extent
from eagle3.runner.artifact.cuda_weights import WEIGHTS_FILE, check_stored, read_ptd_index
from eagle3.runner.artifact.gpu_needs import gpu_memory, naming, weight_tables
from eagle3.runner.artifact.pte import DTYPES, Pte, read_pte
from eagle3.runner.contract import DECODE, FORWARD, METHODS, SPECULATE, TARGET_ROWS, Metadata, row_bounds

if TYPE_CHECKING:
    from executorch.exir.schema import BackendDelegate, ExecutionPlan, Program, SubsegmentOffsets, Tensor


def inspect_program(model: Path, metadata: Metadata) -> dict[str, Any]:
    """Return the sections ``metadata``, ``methods``, ``mutable_buffers`` and ``weights``, and ``gpu_memory`` for a CUDA
    artifact.

    Raises ValueError for a file that is damaged in a way that the runtime does not detect.
    """
    pte = read_pte(model)
    constants = metadata.constant_methods() | {"get_manifest": metadata.manifest}
    plans = {plan.name: plan for plan in pte.program.execution_plan if plan.name not in constants}
    known = (TARGET_ROWS, *METHODS, SPECULATE, DECODE, FORWARD)
    plans = {name: plans.pop(name) for name in known if name in plans} | plans
    rows = row_bounds(metadata)
    linears = metadata.manifest.get("linears", {})  # the exporter's count of quantized linears by kernel
    try:
        tables = [table for found in weight_tables(pte).values() for table in found]
        return {
            "metadata": {name: _plain(value) for name, value in constants.items()},
            "methods": {
                name: method(pte, plan, rows.get(name)) | {"linears": linears.get(name)} for name, plan in plans.items()
            },
            "mutable_buffers": mutable_buffers(plans.values()),
            "weights": weights(pte),
            **({"gpu_memory": gpu_memory(model, tables)} if tables else {}),
        }
    except LookupError as error:  # the runtime checks a file's form, not where its indices point
        raise ValueError(f"{model} is damaged (its program points outside itself: {error}): export it again") from error


def _plain(value: object) -> object:
    """Return a constant as JSON: a tensor becomes its dtype and shape."""
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", ())
    return value if dtype is None else {"dtype": str(dtype).removeprefix("torch."), "shape": list(shape)}


def method(pte: Pte, plan: "ExecutionPlan", rows: tuple[int, int] | None) -> dict[str, Any]:
    """Describe a method. Shapes are upper bounds; ``operators`` counts the operators outside delegates."""
    instructions = list(_instructions(plan))
    kernels = [plan.operators[call.op_index] for call in instructions if type(call).__name__ == "KernelCall"]
    operators = Counter(f"{kernel.name}.{kernel.overload}".removesuffix(".") for kernel in kernels)
    inputs = [_value(plan, index) for index in plan.inputs]
    return {
        "rows": rows and {"min": rows[0], "max": rows[1]},
        "dynamic_length": any(entry.get("dynamic", False) for entry in inputs),
        "inputs": inputs,
        "outputs": [_value(plan, index) for index in plan.outputs],
        "delegates": delegates(pte, plan),
        "operators": dict(sorted(operators.items(), key=lambda item: (-item[1], item[0]))),
        "instructions": len(instructions),
        "planned_memory": planned_memory(plan),
    }


def _instructions(plan: "ExecutionPlan") -> Iterator[Any]:
    return (instruction.instr_args for chain in plan.chains for instruction in chain.instructions)


def _value(plan: "ExecutionPlan", index: int) -> dict[str, Any]:
    value = plan.values[index].val
    if type(value).__name__ != "Tensor":
        return {"kind": type(value).__name__.lower()}
    return _tensor(value) | {"dynamic": value.shape_dynamism.name != "STATIC"}


def _tensor(tensor: "Tensor") -> dict[str, Any]:
    return {"dtype": DTYPES[tensor.scalar_type.name][0], "shape": list(tensor.sizes)}


def _tensor_bytes(tensor: "Tensor") -> int:
    return math.prod(tensor.sizes) * DTYPES[tensor.scalar_type.name][1]


def planned_memory(plan: "ExecutionPlan") -> list[dict[str, Any]]:
    """List the memory arenas of a method. A ``mutable`` one holds named buffers (caches), which persist between
    calls."""
    devices = {entry.buffer_idx: entry.device_type.name.lower() for entry in plan.non_const_buffer_device or ()}
    holds_state = {tensor.allocation_info.memory_id for _, tensor in _named_buffers(plan)}
    return [
        {"bytes": size, "device": devices.get(index, "cpu"), "mutable": index in holds_state}
        for index, size in enumerate(plan.non_const_buffer_sizes)
        if index  # the first entry stands for the constants and is not used
    ]


def delegates(pte: Pte, plan: "ExecutionPlan") -> dict[str, dict[str, Any]]:
    """Map each backend id to the count of its delegates, the bytes of their blobs, and the DELEGATE_DETAILS."""
    by_backend: dict[str, list[BackendDelegate]] = {}
    for delegate in plan.delegates:
        by_backend.setdefault(delegate.id, []).append(delegate)
    return {
        backend: {"count": len(entries), "bytes": sum(pte.delegate_bytes(entry) for entry in entries)}
        | (DELEGATE_DETAILS[backend](pte, plan, entries) if backend in DELEGATE_DETAILS else {})
        for backend, entries in by_backend.items()
    }


def xnnpack_details(pte: Pte, _plan: "ExecutionPlan", entries: list["BackendDelegate"]) -> dict[str, Any]:
    """Return the extent of the named data (packed weights) that the delegates' flatbuffers refer to. Methods may share
    it."""
    named = {item.key.encode(): item.segment_index for item in pte.program.named_data or ()}
    blobs = (pte.segment(entry.processed.index) for entry in entries if entry.processed.location.name == "SEGMENT")
    segments = {named[text] for blob in blobs for text in re.findall(rb"[\x20-\x7e]{4,}", blob) if text in named}
    return {"named_data": extent([pte.program.segments[index].size for index in segments])}


def cuda_details(pte: Pte, plan: "ExecutionPlan", _entries: list["BackendDelegate"]) -> dict[str, Any]:
    """Describe the delegates by ``cuda_library.py``. If there is a ``.ptd``, their weights must be in it."""
    stored = pte.path.parent / WEIGHTS_FILE
    tables = weight_tables(pte)
    with naming(pte, plan.name):
        if stored.is_file():
            check_stored(tables[plan.name], read_ptd_index(stored))
        return cuda_library.cuda_details(plan.name, tables, pte.named)


DELEGATE_DETAILS: dict[str, Callable[[Pte, "ExecutionPlan", list["BackendDelegate"]], dict[str, Any]]] = {
    "XnnpackBackend": xnnpack_details,
    CUDA_BACKEND: cuda_details,
}


def _named_buffers(plan: "ExecutionPlan") -> Iterator[tuple[int, "Tensor"]]:
    """Yield (index, tensor) of the values that a plan keeps in named, planned memory."""
    for index, entry in enumerate(plan.values):
        info = getattr(entry.val, "extra_tensor_info", None)
        if info is not None and info.fully_qualified_name and entry.val.allocation_info is not None:
            yield index, entry.val


def _used_values(plan: "ExecutionPlan") -> set[int]:
    """Return the indices of the values that an instruction of the plan uses, directly or in a list."""
    used = {index for call in _instructions(plan) for index in getattr(call, "args", ())}
    lists = [plan.values[index].val for index in used if index >= 0]
    return used | {item for value in lists if type(value).__name__.endswith("TensorList") for item in value.items}


def mutable_buffers(plans: Iterable["ExecutionPlan"]) -> list[dict[str, Any]]:
    """List the named buffers and the methods that use them.

    A buffer is identified by name and place (memory id and offset), so a name listed twice is not shared memory. Caches
    inside a delegate (CUDA) are not visible.
    """
    found: dict[tuple, dict[str, Any]] = {}
    for plan in plans:
        used = _used_values(plan)
        for index, tensor in _named_buffers(plan):
            place, name = tensor.allocation_info, tensor.extra_tensor_info.fully_qualified_name
            at = {"memory_id": place.memory_id, "offset": place.memory_offset}
            fresh = {"name": name, **_tensor(tensor), "bytes": _tensor_bytes(tensor), **at, "methods": []}
            entry = found.setdefault((name, *at.values()), fresh)
            entry["methods"] += [plan.name] if index in used else []
    return list(found.values())


def weights(pte: Pte) -> dict[str, Any]:
    """Count the bytes of the parts of the ``.pte``, each once. The parts and ``padding_bytes`` add up to the file."""
    program = pte.program
    blobs = {(d.processed.location.name, d.processed.index): d for p in program.execution_plan for d in p.delegates}
    inline = sum(pte.delegate_bytes(delegate) for (place, _), delegate in blobs.items() if place == "INLINE")
    named = {item.segment_index for item in program.named_data or ()}
    parts = {
        "delegates": extent([pte.delegate_bytes(delegate) for delegate in blobs.values()]),
        "constants": _subsegments(program, [program.constant_segment]),
        "named_data": extent([program.segments[index].size for index in named]),
        "initial_state": _subsegments(program, program.mutable_data_segments or []),
    }
    structure = pte.program_bytes - inline
    padding = pte.file_bytes - structure - sum(part["bytes"] for part in parts.values())
    parts["constants"] |= constant_tensors(program)
    return {"file_bytes": pte.file_bytes, "program_bytes": structure, **parts, "padding_bytes": padding}


def _subsegments(program: "Program", entries: list["SubsegmentOffsets"]) -> dict[str, int]:
    """Return the extent of segments that hold many tensors each. The first offset stands for "no data"."""
    entries = [entry for entry in entries if entry is not None and entry.offsets]
    size = sum(program.segments[entry.segment_index].size for entry in entries)
    return {"count": sum(len(entry.offsets) - 1 for entry in entries), "bytes": size}


def constant_tensors(program: "Program") -> dict[str, Any]:
    """Return the extent of the constants by dtype, and of those that no instruction uses. Those are left over, or a
    delegate has a copy of its own."""
    tensors: dict[int, Tensor] = {}
    used: set[int] = set()
    for plan in program.execution_plan:
        taken = _used_values(plan) | set(plan.outputs)
        for index, entry in enumerate(plan.values):
            buffer = getattr(entry.val, "data_buffer_idx", 0)
            if buffer and entry.val.allocation_info is None:
                tensors[buffer] = entry.val
                used |= {buffer} if index in taken else set()
    by_dtype: dict[str, list[int]] = {}
    for tensor in tensors.values():
        by_dtype.setdefault(_tensor(tensor)["dtype"], []).append(_tensor_bytes(tensor))
    unused = [_tensor_bytes(tensor) for buffer, tensor in tensors.items() if buffer not in used]
    return {"by_dtype": {name: extent(sizes) for name, sizes in by_dtype.items()}, "unused": extent(unused)}
