"""What XNNPACK's delegates hold: their nodes, and the weights of their products."""

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

from eagle3.runner.console.command import calm_stderr

HEADER = struct.Struct("<10xII")
"""Of a delegate: where its graph starts, and how long it is (``XNNHeader``)."""


class Product(NamedTuple):
    """Of ``rows`` (the most, where their number is dynamic) with weights of so many bits."""

    rows: int
    outputs: int
    inputs: int
    bits: int


@dataclass(frozen=True)
class Graph:
    """Of one delegate or several: how often each kind of node is there, and the products with weights."""

    nodes: Counter[str]
    products: list[Product]

    @property
    def multiply_adds(self) -> int:
        """Of a row, as many as there are weights."""
        return sum(product.outputs * product.inputs for product in self.products)

    @property
    def multiply_adds_of_all_rows(self) -> int:
        return sum(product.rows * product.outputs * product.inputs for product in self.products)

    @property
    def weight_bytes(self) -> int:
        """What a call reads of weights, without scales and biases."""
        return sum(product.outputs * product.inputs * product.bits // 8 for product in self.products)


def read_graphs(blobs: Iterable[bytes]) -> Graph:
    """Of the delegates of a method, together, by the schema and the ``flatc`` that ExecuTorch ships."""
    nodes: Counter[str] = Counter()
    products = []
    for graph in map(_decode, blobs):
        values = {value["id_out"]: value for value in map(_tensor_value, graph["xvalues"])}
        for node in graph["xnodes"]:
            nodes[node["xnode_union_type"].removeprefix("XNN")] += 1
            if node["xnode_union_type"] == "XNNFullyConnected":
                ends = node["xnode_union"]
                rows = math.prod(values[ends["output_id"]]["dims"][:-1])
                products.append(Product(rows, *_weight(values[ends["filter_id"]])))
    return Graph(nodes, products)


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
        # flatc writes the open end of a clamp as inf, which JSON has not
        return json.loads(re.sub(r"\binf\b", "Infinity", data.with_suffix(".json").read_text()))


def _tensor_value(value: dict[str, Any]) -> dict[str, Any]:
    """A quantized tensor has another around it."""
    union = value["xvalue_union"]
    return union.get("tensor_value", union)


def _weight(value: dict[str, Any]) -> tuple[int, int, int]:
    datatype, dims = value["datatype"], value["dims"]
    bits = next(bits for name, bits in BITS.items() if name in datatype)
    return dims[0], math.prod(dims[1:]), bits


BITS = {"int4": 4, "int8": 8, "fp16": 16, "bf16": 16, "fp32": 32}
