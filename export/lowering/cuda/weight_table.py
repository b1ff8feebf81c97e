"""Writes weight tables for the CUDA runtime that follows ExecuTorch 1.5: ``ETCUDAFQN0``, of its pull request 22198.

A table of 1.5, ``ETCUDAFQN3``, begins with the key of one library. The later one begins with a list of entries: a
compute capability, that of the PTX, flags, and the key of a library. The runtime takes the entry of exactly its GPU,
or else the one fallback, if its PTX is of no later compute capability (``CudaWeightCache::parse`` and
``select_variant`` in ``backends/cuda/runtime/cuda_weight_cache.cpp``, ``encode_cuda_aoti_metadata`` in
``backends/cuda/cuda_weight_collector.py``). There each library is of one export on one GPU; here every entry names the
method's one library, whose kernels have an image for each GPU. The weights that follow are equal in both tables.
"""

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from executorch.backends.cuda import cuda_weight_collector

from eagle3.export.patching.patches import replaced
from eagle3.runner.artifact.cuda_weights import FALLBACK, TABLE_MAGIC, VARIANTS_MAGIC
from eagle3.runner.system.gpus import capability_of


@contextmanager
def tables_by_gpu(archs: Sequence[str], ptx: bool) -> Iterator[None]:
    """Make ExecuTorch write tables with an entry for each architecture ("sm_90", the lowest first), and with ``ptx`` a
    fallback for later GPUs."""
    encode, capabilities = cuda_weight_collector.encode_cuda_weight_metadata, list(map(capability_of, archs))

    def by_gpu(*given: Any) -> bytes:  # noqa: ANN401 - the arguments of another function
        return table_by_gpu(encode(*given), capabilities, ptx)

    with replaced("executorch.backends.cuda.cuda_weight_collector.encode_cuda_weight_metadata", by_gpu):
        yield


def table_by_gpu(table: bytes, capabilities: Sequence[int], ptx: bool) -> bytes:
    """Return a table of ExecuTorch 1.5 in the later form, for these compute capabilities (90 for 9.0)."""
    at = len(TABLE_MAGIC)
    end = at + 4 + struct.unpack_from("<I", table, at)[0]
    library = table[at:end]
    entries = [struct.pack("<III", capability, 0, 0) for capability in capabilities]
    if ptx:
        entries.append(struct.pack("<III", capabilities[-1], capabilities[0], FALLBACK))
    return VARIANTS_MAGIC + struct.pack("<I", len(entries)) + b"".join(each + library for each in entries) + table[end:]
