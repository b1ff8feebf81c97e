"""Attention on the CPU, by ExecuTorch's own LLM ops.

Plain PyTorch attention would lower to an ``index_put`` that copies each cache and a dozen portable kernels over all of
its slots. ``llama::update_cache`` writes in place and ``llama::custom_sdpa`` reads only what has been written, so a
step costs the same whatever ``max_seq_len`` is.
"""

from typing import Any

import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401  (registers torch.ops.llama)
import torch
from torch import Tensor, nn

from eagle3.targets.attention import KVCacheShape


class LlmOpsAttention(nn.Module):
    """See ``EagerAttention``. The caches are laid out [1, slots, kv_heads, head_dim], as the ops want them."""

    def __init__(self, shape: KVCacheShape):
        super().__init__()
        self.window, self.slots = shape.window, shape.slots
        for name in ("k_cache", "v_cache"):
            empty = torch.zeros(1, shape.slots, shape.kv_heads, shape.head_dim, dtype=shape.dtype)
            self.register_buffer(name, empty, persistent=False)

    def rows(self, input_pos: Tensor, mask: Tensor) -> tuple[int, Tensor | None, Tensor | None]:
        """First position, ring slots [1, T], additive mask [T, slots]; a full layer needs the first alone."""
        if self.window:
            additive = torch.zeros_like(mask[0, 0], dtype=torch.float32).masked_fill(~mask[0, 0], float("-inf"))
            return 0, (input_pos % self.slots)[None], additive
        start = input_pos[0].item()
        torch._check(start >= 0)
        torch._check(start + input_pos.shape[0] <= self.slots)
        return start, None, None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, rows: Any, scale: float) -> Tensor:
        start, ring, mask = rows
        for new, cache in ((key, self.k_cache), (value, self.v_cache)):
            if ring is None:
                torch.ops.llama.update_cache(new, cache, start)
            else:
                torch.ops.llama.update_cache_with_indices(new, cache, start, ring)
        causal = mask is None
        return torch.ops.llama.custom_sdpa(query, self.k_cache, self.v_cache, start, mask, 0.0, causal, scale)
