"""The attention of a layer on the CPU, by its kind."""

from torch import nn

from eagle3.export.lowering.xnnpack.full_attention import FullAttention
from eagle3.export.lowering.xnnpack.llm_ops_attention import LlmOpsAttention
from eagle3.targets.attention import KVCacheShape


def cpu_attention(shape: KVCacheShape) -> nn.Module:
    """Return the attention of a layer with such a cache: an ``AttentionFactory``."""
    return (LlmOpsAttention if shape.window or shape.sinks else FullAttention)(shape)
