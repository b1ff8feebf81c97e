"""Chooses the attention of a layer on the CPU."""

from torch import nn

from eagle3.export.lowering.xnnpack.full_attention import FullAttention
from eagle3.export.lowering.xnnpack.llm_ops_attention import LlmOpsAttention
from eagle3.targets.attention import KVCacheShape


def cpu_attention(shape: KVCacheShape) -> nn.Module:
    """Return the attention module for a layer with such a cache; this function is an ``AttentionFactory``."""
    return (LlmOpsAttention if shape.window or shape.sinks else FullAttention)(shape)
