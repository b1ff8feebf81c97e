"""Names of quantized weights, by codes and scales: XNNPACK's packed weights are one cache for a process, by name.

ExecuTorch (1.5) names a weight by its codes alone, though scales are packed with them: of two weights with the same
codes and other scales, in one artifact or in two of a process, the second to load would compute with the first one's.
Equal codes would also be one buffer in the file, and a name is found by its address: so the scales' hash stands behind
the codes too, where nothing reads it.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from executorch.backends.xnnpack.operators.node_visitor import NodeVisitor
from executorch.backends.xnnpack.operators.quant_params import QuantParams
from executorch.backends.xnnpack.serialization.xnnpack_graph_schema import XNNGraph
from executorch.exir._serialize._named_data_store import NamedDataStore
from torch import Tensor
from torch.fx import Node

from eagle3.export.patches import original, replaced

NAMING = "executorch.backends.xnnpack.operators.node_visitor.NodeVisitor.get_serialized_buffer_index"


class _Marked:
    """A store whose names and data end in ``mark``."""

    def __init__(self, store: NamedDataStore, mark: bytes):
        self.store, self.mark = store, mark

    def add_named_data(self, key: str, data: bytes, *args: Any, **kwargs: Any) -> None:
        self.store.add_named_data(key + self.mark.hex(), data + self.mark, *args, **kwargs)


@contextmanager
def scales_in_names() -> Iterator[None]:
    """Within it XNNPACK's preprocessing names weights that way."""
    name_and_store = original(NAMING)

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
        scale = getattr(quant_params, "scale", None)
        if not isinstance(scale, Tensor):
            return name_and_store(self, *given)
        store, mark = self._named_data_store, hashlib.sha256(scale.float().numpy().tobytes()).digest()
        self._named_data_store = _Marked(store, mark)
        try:
            index = name_and_store(self, *given)
        finally:
            self._named_data_store = store
        graph.constant_data[index].named_key += mark.hex()
        return index

    with replaced(NAMING, serialized):
        yield
