"""The methods ``read_state`` and ``write_state``, which carry the state of the other methods out of a program and back,
a piece at a time, so that a conversation can be kept.

The state is every buffer that a traced method writes. The traces say which those are, and along which axis a buffer is
written by position. So a head or a layer of any kind takes part without a line of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node

from eagle3.export.speculator.speculator import Eagle3Speculator
from eagle3.runner.contract import StateGroup

PIECE_BYTES, LEAST_ROWS, MOST_ROWS = 16 << 20, 16, 256
"""Pieces of buffers by position have about so many bytes together, within these rows. A method needs the memory of a
piece; each call takes a fixed time, and copies the other buffers as a whole."""

AXES = {"aten::index_copy_": None, "llama::update_cache": 1, "llama::update_cache_with_indices": 1}
"""Operators that write rows of a buffer, and the axis; None: it is an argument of the operator."""

Read = Callable[[Tensor, int | None, Tensor], Tensor]
Write = Callable[[Tensor, int | None, Tensor, Tensor], None]


class RowAccess(NamedTuple):
    """The functions with which a backend's methods read and write rows [R] of a buffer along an axis, or the whole
    buffer if that is None: see ``read_rows`` and ``write_rows``."""

    read: Read
    write: Write


@dataclass(frozen=True)
class StateBuffer:
    """A buffer that a method writes. ``axis`` is the axis of positions, None if the buffer is kept as a whole."""

    name: str
    axis: int | None
    group: StateGroup


def state_buffers(programs: Mapping[str, ExportedProgram], model: nn.Module) -> list[StateBuffer]:
    """Return the state of traced methods, whose modules hold the buffers of ``model`` under ``speculator.``, in the
    order of the outputs of ``read_state``."""
    axes = written_buffers(programs)
    buffers = {name: model.get_buffer(name.removeprefix("speculator.")) for name in axes}
    in_rows = {name: buffers[name].shape[axis] for name, axis in axes.items() if axis is not None}
    row_bytes = sum(buffers[name].nbytes // rows for name, rows in in_rows.items())
    most = min(MOST_ROWS, max(LEAST_ROWS, PIECE_BYTES // max(row_bytes, 1)))

    def sizes(name: str) -> tuple[int, int, bool]:
        rows = in_rows.get(name)
        return (1, 1, False) if rows is None else (rows, min(rows, most), True)

    found = []
    for size, names in groupby(sorted(axes, key=lambda name: (sizes(name), name)), sizes):
        together = list(names)
        group = StateGroup(*size, len(together))
        found += [StateBuffer(name, axes[name], group) for name in together]
    return found


def state_groups(buffers: Sequence[StateBuffer]) -> list[StateGroup]:
    """Return the groups of ``buffers``, which are in the order of the groups."""
    return list(dict.fromkeys(buffer.group for buffer in buffers))


def written_buffers(programs: Mapping[str, ExportedProgram]) -> dict[str, int | None]:
    """Map each buffer that a traced method writes to its axis of positions; None if one of the writes is not by
    rows."""
    found: dict[str, set[int | None]] = {}
    for program in programs.values():
        buffers = program.graph_signature.inputs_to_buffers
        for node in program.graph.nodes:
            for target in _written(node):
                base = _base(target)
                if base.name in buffers:
                    axis = _axis(node) if base is target or not _is_view(target) else None
                    found.setdefault(buffers[base.name], set()).add(axis)
    return {name: next(iter(axes)) if len(axes) == 1 else None for name, axes in found.items()}


def _written(node: Node) -> list[Node]:
    """Return the arguments that a node writes."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    given = zip(node.target._schema.arguments, node.args, strict=False)
    return [
        value
        for argument, value in given
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Node)
    ]


def _is_view(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _base(node: Node) -> Node:
    """Return the placeholder whose memory a node's result is, or the node that made that memory."""
    while node.op == "call_function" and (_is_view(node) or _written(node)):
        before = node.args[0]
        assert isinstance(before, Node)
        node = before
    return node


def _axis(node: Node) -> int | None:
    name = node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""
    if name not in AXES:
        return None
    axis = AXES[name]
    return node.args[1] if axis is None else axis  # an int


class StateMethod(nn.Module):
    """The buffers of the state, for a method that reads or writes pieces of them. It has them under the names that they
    have in the other methods, and nothing else: each parameter would be an input of its graph."""

    def __init__(self, speculator: Eagle3Speculator, buffers: Sequence[StateBuffer]):
        super().__init__()
        self.buffers_of_state = list(buffers)
        self.groups = state_groups(self.buffers_of_state)
        whole = nn.Module()
        whole.speculator = speculator
        for each in buffers:
            path, _, name = each.name.rpartition(".")
            owner = whole.get_submodule(path)
            persistent = name not in owner._non_persistent_buffers_set
            _submodule(self, path).register_buffer(name, owner.get_buffer(name), persistent)

    def rows(self, pieces: Tensor) -> dict[StateGroup, Tensor]:
        """Return the rows int64 [piece_rows] of the pieces [G] of each group: [0] for a whole buffer."""
        found = {}
        for index, group in enumerate(self.groups):
            first = (pieces[index : index + 1] * group.piece_rows).clamp_max(group.rows - group.piece_rows)
            found[group] = first + torch.arange(group.piece_rows, device=pieces.device)
        return found


def _submodule(module: nn.Module, path: str) -> nn.Module:
    """Return a submodule of ``module``; those that are missing on the way are added."""
    for name in path.split("."):
        if name not in module._modules:
            module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    return module


class ReadState(StateMethod):
    """Returns a piece of each buffer."""

    def __init__(self, speculator: Eagle3Speculator, buffers: Sequence[StateBuffer], read: Read):
        super().__init__(speculator, buffers)
        self.read = read

    def forward(self, pieces: Tensor) -> tuple[Tensor, ...]:
        rows = self.rows(pieces)
        return tuple(
            self.read(self.get_buffer(each.name), each.axis, rows[each.group]) for each in self.buffers_of_state
        )


class WriteState(StateMethod):
    """Writes a piece of each buffer, and returns the pieces after them."""

    def __init__(self, speculator: Eagle3Speculator, buffers: Sequence[StateBuffer], write: Write):
        super().__init__(speculator, buffers)
        self.write = write

    def forward(self, pieces: Tensor, *values: Tensor) -> tuple[Tensor]:
        rows = self.rows(pieces)
        for each, value in zip(self.buffers_of_state, values, strict=True):
            self.write(self.get_buffer(each.name), each.axis, rows[each.group], value)
        return (pieces + 1,)


def piece_shape(buffer: Tensor, each: StateBuffer) -> list[int]:
    """Return the shape of a piece of a buffer."""
    shape = list(buffer.shape)
    if each.axis is not None:
        shape[each.axis] = each.group.piece_rows
    return shape


def trace_state(
    speculator: Eagle3Speculator, buffers: Sequence[StateBuffer], access: RowAccess
) -> tuple[ExportedProgram, ExportedProgram]:
    """Trace ``read_state`` and ``write_state``."""
    reading, writing = ReadState(speculator, buffers, access.read), WriteState(speculator, buffers, access.write)
    pieces = torch.zeros(len(reading.groups), dtype=torch.long)
    values = (reading.get_buffer(each.name) for each in buffers)
    zeros = [
        torch.zeros(piece_shape(value, each), dtype=value.dtype) for value, each in zip(values, buffers, strict=True)
    ]
    with torch.no_grad():
        return (
            torch.export.export(reading, (pieces,), strict=False),
            torch.export.export(writing, (pieces, *zeros), strict=False),
        )


def read_rows(buffer: Tensor, axis: int | None, rows: Tensor) -> Tensor:
    """Return ``rows`` [R] of a buffer along ``axis``, or a copy of the buffer."""
    return buffer.clone() if axis is None else buffer.index_select(axis, rows)


def write_rows(buffer: Tensor, axis: int | None, rows: Tensor, value: Tensor) -> None:
    """Write ``value`` into ``rows`` [R] of a buffer along ``axis``, or into the whole buffer."""
    if axis is None:
        buffer.copy_(value)
    else:
        buffer.index_copy_(axis, rows, value)
