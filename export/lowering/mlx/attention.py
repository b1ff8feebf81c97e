"""Attention for MLX: plain PyTorch operations, each of which is one node of MLX."""

import torch
from torch import Tensor

from eagle3.targets.attention import Block, EagerAttention, KVCacheShape, attention_mask


class MlxAttention(EagerAttention):
    """The reference attention, with one write of each cache in a forward, and with the slots of a ring computed once.

    The partitioner takes one write of a cache in a method. Some heads write rows before others attend (DFlash, Gemma's
    assistant), so ``write`` leaves them to the ``forward`` that follows it. MLX's runtime reads the indices of a write
    on the host, and waits for the GPU if a node computes them: all layers of a kind share them.
    """

    def __init__(self, shape: KVCacheShape):
        super().__init__(shape)
        self.unwritten: list[tuple[Tensor, Tensor, Tensor]] = []

    def rows(self, input_pos: Tensor, block: Block | None = None) -> tuple[Tensor, Tensor]:
        return self.shape.slots_of(input_pos), attention_mask(input_pos, self.shape, block)

    def write(self, key: Tensor, value: Tensor, rows: tuple[Tensor, Tensor]) -> None:
        self.unwritten.append((rows[0], key, value))

    def written(self, input_pos: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, ...]:
        cache = self.kv_cache
        if self.unwritten:
            slots, keys, values = self.unwritten.pop()
            input_pos = slots if key is None else torch.cat((slots, input_pos))
            key = keys if key is None else torch.cat((keys, key), dim=1)
            value = values if value is None else torch.cat((values, value), dim=1)
        if key is not None and value is not None:
            cache.k_cache.index_copy_(2, input_pos, key.transpose(1, 2))
            cache.v_cache.index_copy_(2, input_pos, value.transpose(1, 2))
        return cache.k_cache, cache.v_cache
