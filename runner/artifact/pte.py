"""Reads the program at the head of a ``.pte`` with ExecuTorch's own schema and generated reader.

It uses neither ExecuTorch's runtime nor its compiler, so constants can be read under every host. The runtime's Python
bindings return tensors only to the PyTorch that they were built with.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.runner.artifact.light_imports import without_compiler
from eagle3.runner.system.command import calm_stderr

if TYPE_CHECKING:
    from executorch.exir._serialize.generated.executorch_flatbuffer.EValue import EValue
    from executorch.exir._serialize.generated.executorch_flatbuffer.ExecutionPlan import ExecutionPlan as StoredPlan
    from executorch.exir._serialize.generated.executorch_flatbuffer.Program import Program as StoredProgram
    from executorch.exir._serialize.generated.executorch_flatbuffer.Tensor import TensorT
    from executorch.exir.schema import BackendDelegate, ExecutionPlan, Program
    from torch import Tensor

EXTENDED_HEADER = struct.Struct("<8x4sIQQ")
"""The header after the flatbuffer's root and identifier: "eh00", the header's length, the program's size, the offset of
the segments."""

DTYPES = {
    "BYTE": ("uint8", 1), "CHAR": ("int8", 1), "SHORT": ("int16", 2), "INT": ("int32", 4), "LONG": ("int64", 8),
    "UINT16": ("uint16", 2), "UINT32": ("uint32", 4), "HALF": ("float16", 2), "BFLOAT16": ("bfloat16", 2),
    "FLOAT": ("float32", 4), "DOUBLE": ("float64", 8), "BOOL": ("bool", 1), "FLOAT8E5M2": ("float8_e5m2", 1),
    "FLOAT8E4M3FN": ("float8_e4m3fn", 1),
}  # fmt: skip
"""Maps ExecuTorch's scalar types to torch's names and to the bytes of an element. ExecuTorch's own map imports its
compiler, which takes 4 s."""


@dataclass(frozen=True)
class Pte:
    """A ``.pte`` file: its program, followed by the segments that the program lists."""

    path: Path
    file_bytes: int
    program: "Program"
    program_bytes: int
    segments_at: int

    def plan(self, method: str) -> "ExecutionPlan":
        """Return the execution plan of a method."""
        return next(plan for plan in self.program.execution_plan if plan.name == method)

    def segment(self, index: int) -> bytes:
        entry = self.program.segments[index]
        with self.path.open("rb") as file:
            file.seek(self.segments_at + entry.offset)
            return file.read(entry.size)

    def named(self, key: str) -> bytes:
        """Return the named data of a delegate, such as a library."""
        named = {item.key: item.segment_index for item in self.program.named_data or ()}
        return self.segment(named[key])

    def delegate_bytes(self, delegate: "BackendDelegate") -> int:
        index = delegate.processed.index
        if delegate.processed.location.name == "SEGMENT":
            return self.program.segments[index].size
        return len(self.program.backend_delegate_data[index].data)

    def delegate_blob(self, delegate: "BackendDelegate") -> bytes:
        index = delegate.processed.index
        if delegate.processed.location.name == "SEGMENT":
            return self.segment(index)
        return bytes(self.program.backend_delegate_data[index].data)


def read_pte(path: Path) -> Pte:
    """Read the program of a file but none of its segments. Raises ValueError if it cannot be parsed."""
    head, segments_at, size = _head(path)
    with calm_stderr(), without_compiler():
        from executorch.exir._serialize._flatbuffer_program import _flatbuffer_to_program

        try:
            program = _flatbuffer_to_program(head)
            _check_methods(len(program.execution_plan))
        except Exception as error:  # a damaged flatbuffer fails wherever its offsets lead
            raise ValueError(f"{path} is damaged (its program does not parse: {error}): export it again") from error
    return Pte(path, size, program, len(head), segments_at)


def read_constants(path: Path) -> tuple[dict[str, list[Any]], set[str]]:
    """Return the outputs of the program's constant methods by name (int, bool, float, str or tensor), and the names of
    the other methods. Only the constants are parsed.

    Raises ValueError if the program cannot be parsed.
    """
    head, segments_at, _ = _head(path)
    with calm_stderr(), without_compiler():
        from executorch.exir._serialize import _flatbuffer_program
        from executorch.exir._serialize.generated.executorch_flatbuffer.Program import Program

        _flatbuffer_program._patch_generated_flatbuffer_aliases()
        try:
            program = Program.GetRootAs(head)
            plans = [program.ExecutionPlan(index) for index in range(program.ExecutionPlanLength())]
            _check_methods(len(plans))
            found = {}
            for plan in filter(_is_constant, plans):
                values = [plan.Values(plan.Outputs(place)) for place in range(plan.OutputsLength())]
                found[plan.Name().decode()] = [_constant(path, program, segments_at, value) for value in values]
            return found, {plan.Name().decode() for plan in plans} - set(found)
        except Exception as error:  # a damaged flatbuffer fails wherever its offsets lead
            raise ValueError(f"{path} is damaged (its constants do not parse: {error}): export it again") from error


def _check_methods(count: int) -> None:
    """Raise ValueError for a program without methods: damaged offsets may lead to zeros, which read as an empty
    list."""
    if not count:
        raise ValueError("it has no methods")


def program_bytes(path: Path) -> bytes:
    """Return the program at the head of a file as it is stored. The program names each weight by a hash of its
    values."""
    return _head(path)[0]


def _is_constant(plan: "StoredPlan") -> bool:
    instructions = sum(plan.Chains(place).InstructionsLength() for place in range(plan.ChainsLength()))
    return not plan.InputsLength() and not instructions


def _head(path: Path) -> tuple[bytes, int, int]:
    """Return the program's bytes, the offset of the segments, and the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        magic, _, program_bytes, segments_at = EXTENDED_HEADER.unpack(file.read(EXTENDED_HEADER.size).ljust(32, b"\0"))
        if magic != b"eh00":
            program_bytes, segments_at = size, 0
        file.seek(0)
        return file.read(program_bytes), segments_at, size


def _constant(
    path: Path, program: "StoredProgram", segments_at: int, value: "EValue"
) -> "int | bool | float | str | Tensor":
    from executorch.exir._serialize.generated.executorch_flatbuffer.EValue import EValueT

    found = EValueT.InitFromObj(value).val
    kind = type(found).__name__
    if kind == "TensorT":
        return _tensor(path, program, segments_at, found)
    return {
        "IntT": lambda: found.intVal,
        "BoolT": lambda: bool(found.boolVal),
        "DoubleT": lambda: found.doubleVal,
        "StringT": lambda: found.stringVal.decode(),
    }[kind]()


def _tensor(path: Path, program: "StoredProgram", segments_at: int, tensor: "TensorT") -> "Tensor":
    """Read a tensor of dtype int64, the only dtype that the contract's constants have. Raises ValueError for others."""
    import torch
    from executorch.exir.schema import ScalarType

    if tensor.scalarType != ScalarType.LONG:
        raise ValueError(f"a constant of {ScalarType(tensor.scalarType).name}")
    stored = program.ConstantSegment()
    segment = program.Segments(stored.SegmentIndex())
    sizes = [int(size) for size in tensor.sizes]
    with path.open("rb") as file:
        file.seek(segments_at + segment.Offset() + stored.Offsets(tensor.dataBufferIdx))
        data = bytearray(file.read(8 * math.prod(sizes)))
    return torch.frombuffer(data, dtype=torch.int64).reshape(sizes)
