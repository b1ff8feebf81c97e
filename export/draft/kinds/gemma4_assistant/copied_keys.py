"""Copies of the keys and values that an assistant attends to, for a program whose methods share no caches."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from eagle3.targets import TapTarget
from eagle3.targets.attention import AttentionFactory


class CopiedKeys(nn.Module):
    """Caches that a head fills from its features.

    The target's method returns a row's keys and values with its feature, which is [state, steps, keys and values of
    each kind]. ``steps`` counts the steps of a chain since the target's last row, so that a step knows which row that
    was: it is 0 in the target's rows. A step has no keys. It writes zeros into a slot to which no query of its round
    attends, and which the target's next rows replace.
    """

    def __init__(self, target: TapTarget, kinds: Iterable[str], heads: int, attention: AttentionFactory, width: int):
        super().__init__()
        kept: dict[str, Any] = {kind: target.kept(kind) for kind in kinds}
        self.caches = nn.ModuleDict({kind: attention(replace(kept[kind].shape, heads=heads)) for kind in kept})
        self._kept = [kept]  # in a list, so that the target's modules are not submodules
        self.width = width

    def joined(self, state: Tensor, input_pos: Tensor) -> Tensor:
        """Return the features [1, T, H] of the target's rows at ``input_pos`` [T], which are in its caches."""
        parts = [state, state.new_zeros(1, state.shape[1], 1)]
        for kept in self._kept[0].values():
            slots = kept.shape.slots_of(input_pos)
            for cache in kept.written(input_pos, None, None):
                parts.append(cache.index_select(2, slots).transpose(1, 2).flatten(2))
        return torch.cat(parts, dim=-1)

    def write(self, feature: Tensor, input_pos: Tensor) -> None:
        """Write the keys and values in features [1, T, H] at ``input_pos`` [T]."""
        at = self.width + 1
        caches: list[Any] = list(self.caches.values())
        for cache in caches:
            shape = cache.shape
            pair = []
            for _ in ("keys", "values"):
                end = at + shape.kv_heads * shape.head_dim
                pair.append(feature[..., at:end].unflatten(-1, (shape.kv_heads, shape.head_dim)))
                at = end
            cache.write(*pair, cache.rows(input_pos))

    def split(self, feature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the state [1, 1, width] in the feature of a row, its steps int64 [1], and the feature without a state
        that the next step of the chain gets: one step more, and no keys."""
        state, steps = feature[..., : self.width], feature[..., self.width : self.width + 1]
        keys = feature.new_zeros(1, 1, feature.shape[-1] - self.width - 1)
        return state, steps.flatten().long(), torch.cat((steps + 1, keys), dim=-1)
