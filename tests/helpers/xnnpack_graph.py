"""Reads the graphs of XNNPACK's delegates: their nodes, and the weights of their fully connected nodes."""

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from eagle3.runner.system.command import calm_stderr

HEADER = struct.Struct("<10xII")
"""A delegate's header (``XNNHeader``): the offset and the size of its graph."""


class FullyConnected(NamedTuple):
    """A matrix multiplication with weights [outputs, inputs] of ``bits`` bits. ``rows`` is the maximum if it is
    dynamic."""

    rows: int
    outputs: int
    inputs: int
    bits: int


@dataclass(frozen=True)
class XnnpackGraph:
    """The nodes of one or several delegates: the count of each kind, and the fully connected ones."""

    nodes: Counter[str]
    linears: list[FullyConnected]

    @property
    def multiply_adds(self) -> int:
        """The multiply-adds of one row, which is the number of weights."""
        return sum(linear.outputs * linear.inputs for linear in self.linears)

    @property
    def multiply_adds_of_all_rows(self) -> int:
        return sum(linear.rows * linear.outputs * linear.inputs for linear in self.linears)

    @property
    def weight_bytes(self) -> int:
        """The bytes of weights that a call reads, without scales and biases."""
        return sum(linear.outputs * linear.inputs * linear.bits // 8 for linear in self.linears)


def read_graphs(blobs: Iterable[bytes]) -> XnnpackGraph:
    """Read the graphs of a method's delegates as one, by the schema and the ``flatc`` that ExecuTorch ships."""
    nodes: Counter[str] = Counter()
    linears = []
    for graph in map(_decode, blobs):
        values = {value["id_out"]: value for value in map(_tensor_value, graph["xvalues"])}
        for node in graph["xnodes"]:
            nodes[node["xnode_union_type"].removeprefix("XNN")] += 1
            if node["xnode_union_type"] == "XNNFullyConnected":
                ends = node["xnode_union"]
                rows = math.prod(values[ends["output_id"]]["dims"][:-1])
                linears.append(FullyConnected(rows, *_weight(values[ends["filter_id"]])))
    return XnnpackGraph(nodes, linears)


def _decode(blob: bytes) -> dict[str, Any]:
    with calm_stderr():
        from executorch.backends.xnnpack.serialization.xnnpack_graph_serialize import _get_schema_bytes
        from executorch.exir._serialize._flatbuffer import _flatc_decompile

    offset, size = HEADER.unpack_from(blob)
    with TemporaryDirectory() as folder:
        schema, data = Path(folder, "schema.fbs"), Path(folder, "graph.bin")
        schema.write_bytes(_get_schema_bytes())
        data.write_bytes(blob[offset : offset + size])
        _flatc_decompile(folder, str(schema), str(data), ["--raw-binary"])
        # flatc writes the open end of a clamp as inf, which is not JSON
        return json.loads(re.sub(r"\binf\b", "Infinity", data.with_suffix(".json").read_text()))


def _tensor_value(value: dict[str, Any]) -> dict[str, Any]:
    """Return the tensor of a value. A quantized tensor is wrapped in another."""
    union = value["xvalue_union"]
    return union.get("tensor_value", union)


def _weight(value: dict[str, Any]) -> tuple[int, int, int]:
    datatype, dims = value["datatype"], value["dims"]
    bits = next(bits for name, bits in BITS.items() if name in datatype)
    return dims[0], math.prod(dims[1:]), bits


BITS = {"int4": 4, "int8": 8, "fp16": 16, "bf16": 16, "fp32": 32}
