"""Names quantized weights by codes and scales, because a process has one cache of XNNPACK's packed weights, keyed by
name.

ExecuTorch 1.5 names a weight by its codes alone, although scales are packed with them. Of two weights with equal codes
and different scales, in one artifact or in two of a process, the one that loads second would compute with the first
one's scales. Equal codes would also share one buffer in the file, and the runtime finds a name by the buffer's address.
So the hash of the scales is also appended to the codes, after the bytes that are read. A weight of several methods is
packed, hashed and copied only once.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from executorch.backends.xnnpack.operators.node_visitor import NodeVisitor
from executorch.backends.xnnpack.operators.quant_params import QuantParams
from executorch.backends.xnnpack.serialization.xnnpack_graph_schema import ConstantDataOffset, XNNGraph
from executorch.backends.xnnpack.utils.utils import get_param_tensor, is_param_node
from executorch.exir._serialize._named_data_store import NamedDataStore
from torch import Tensor
from torch.fx import Node

from eagle3.export.patching.patches import original, replaced

NAMING = "executorch.backends.xnnpack.operators.node_visitor.NodeVisitor.get_serialized_buffer_index"


class _Marked:
    """A store of named data that appends ``mark`` to names and data. ``added`` holds the last addition with its
    options."""

    def __init__(self, store: NamedDataStore, mark: bytes):
        self.store, self.mark = store, mark
        self.added: tuple[tuple[str, bytes], dict[str, Any]]

    def add_named_data(self, key: str, data: bytes, **options: Any) -> None:
        self.added = (key + self.mark.hex(), data + self.mark), options
        self.store.add_named_data(*self.added[0], **options)


@contextmanager
def scales_in_names() -> Iterator[None]:
    """Make XNNPACK's preprocessing name weights by codes and scales."""
    name_and_store = original(NAMING)
    packed: dict[tuple, tuple[Tensor, Any, ConstantDataOffset]] = {}

    def serialized(
        self: NodeVisitor,
        tensor: Node,
        graph: XNNGraph,
        ids: dict[Node, int],
        nhwc: bool,
        swapped: bool,
        quant_params: QuantParams | None,
        *rest: Any,
    ) -> int:
        given = (tensor, graph, ids, nhwc, swapped, quant_params, *rest)
        scale = None if quant_params is None else quant_params.scale
        if (
            quant_params is None
            or not isinstance(scale, Tensor)
            or not is_param_node(self.exported_program, quant_params.q_input)
        ):
            return name_and_store(self, *given)
        mark = hashlib.sha256(scale.float().numpy().tobytes()).digest()
        weight = get_param_tensor(self.exported_program, quant_params.q_input)
        key = _memory(weight), mark, quant_params.dtype, quant_params.is_qc4w, nhwc, swapped, *rest
        if key not in packed:
            store = self._named_data_store
            self._named_data_store = marked = _Marked(store, mark)
            try:
                index = name_and_store(self, *given)
            finally:
                self._named_data_store = store
            graph.constant_data[index].named_key += mark.hex()
            if weight.dtype == quant_params.dtype:  # codes are packed unchanged
                packed[key] = weight, marked.added, graph.constant_data[index]
            return index
        _, (data, options), entry = packed[key]
        self._named_data_store.add_named_data(*data, **options)
        graph.constant_data.append(replace(entry))
        return len(graph.constant_data) - 1

    with replaced(NAMING, serialized):
        yield


def _memory(weight: Tensor) -> tuple:
    """Return a key for a weight's memory. It is the same in each method, and valid as long as the weight exists."""
    return weight.data_ptr(), weight.dtype, weight.shape, weight.stride()
