"""Attention for MLX: plain PyTorch operations, each of which is one node of MLX."""

from torch import Tensor

from eagle3.targets.attention import Block, EagerAttention, attention_mask


class MlxAttention(EagerAttention):
    """The reference attention, with the slots of a ring computed once in a forward.

    MLX's runtime reads the indices of a cache update on the host, and waits for the GPU if a node computes them.
    ``EagerAttention`` computes them anew in each layer with a ring. Here, all layers of a kind share them.
    """

    def rows(self, input_pos: Tensor, block: Block | None = None) -> tuple[Tensor, Tensor]:
        slots = input_pos % self.shape.slots if self.shape.window else input_pos
        return slots, attention_mask(input_pos, self.shape, block)

    def written(self, input_pos: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, ...]:
        cache = self.kv_cache
        if key is not None and value is not None:
            cache.k_cache.index_copy_(2, input_pos, key.transpose(1, 2))
            cache.v_cache.index_copy_(2, input_pos, value.transpose(1, 2))
        return cache.k_cache, cache.v_cache
