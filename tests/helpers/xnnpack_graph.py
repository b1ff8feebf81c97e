"""Reads the nodes in the graphs of XNNPACK's delegates."""

import json
import re
import struct
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from executorch.backends.xnnpack.serialization.xnnpack_graph_serialize import _get_schema_bytes
from executorch.exir._serialize._flatbuffer import _flatc_decompile

HEADER = struct.Struct("<10xII")
"""A delegate's header (``XNNHeader``): the offset and the size of its graph."""


def node_counts(blobs: Iterable[bytes]) -> Counter[str]:
    """Count the nodes of each kind in a method's delegates, by the schema and the ``flatc`` that ExecuTorch ships."""
    kinds = (node["xnode_union_type"] for graph in map(_decode, blobs) for node in graph["xnodes"])
    return Counter(kind.removeprefix("XNN") for kind in kinds)


def _decode(blob: bytes) -> dict[str, Any]:
    offset, size = HEADER.unpack_from(blob)
    with TemporaryDirectory() as folder:
        schema, data = Path(folder, "schema.fbs"), Path(folder, "graph.bin")
        schema.write_bytes(_get_schema_bytes())
        data.write_bytes(blob[offset : offset + size])
        _flatc_decompile(folder, str(schema), str(data), ["--raw-binary"])
        # flatc writes the open end of a clamp as inf, which is not JSON
        return json.loads(re.sub(r"\binf\b", "Infinity", data.with_suffix(".json").read_text()))
