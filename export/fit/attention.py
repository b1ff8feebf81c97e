"""Attention for a measurement: the target's over a whole text at once, and a head's for chains or blocks after every
token.

These classes are factories like a backend's (``eagle3.targets.attention``), so that the models' own code runs on them.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from eagle3.export.draft.common.head import Pieces
from eagle3.targets.attention import Block, EagerAttention, KVCacheShape
from eagle3.targets.sinks import softcapped


class WholeText(EagerAttention):
    """The reference attention, but with a slot for every position in sliding layers too, so that one call can compute a
    whole text."""

    def __init__(self, shape: KVCacheShape):
        super().__init__(replace(shape, window=0, chunked=False))
        self.window, self.chunked = shape.window, shape.chunked

    def rows(self, input_pos: Tensor, block: Block | None = None) -> tuple[Tensor, Tensor]:
        if block is not None:
            return super().rows(input_pos, block)
        distance = input_pos[:, None] - torch.arange(self.shape.slots, device=input_pos.device)
        visible = distance >= 0
        if self.window:
            reach = input_pos[:, None] % self.window + 1 if self.chunked else self.window
            visible = visible & (distance < reach)
        return input_pos, visible[None, None]


class Chains(nn.Module):
    """Computes the attention of chains that begin behind many rows of a text, all at once.

    In step 0, each row attends to the rows of the text up to itself. In later steps each row continues a chain. It
    attends to the keys of step 0 up to the chain's anchor, and to its chain's own keys of steps 1, 2, ... So every row
    sees exactly what it would see if its chain were the only one.
    """

    def __init__(self, shape: KVCacheShape, pieces: Pieces):
        super().__init__()
        self.window, self.pieces, self.rows_of_text = shape.window, pieces, 0
        self.steps: list[tuple[Tensor, Tensor]] = []

    def rows(self, input_pos: Tensor, _block: Block | None = None) -> tuple[int, Tensor, Tensor | None]:
        """Return the step, which rows of the text each row sees, bool [T, rows of the text], and which rows of the step
        before go on."""
        step, anchors = self.pieces.step, self.pieces.anchors
        if step == 0 or anchors is None:
            self.rows_of_text = len(input_pos)
            anchors = torch.arange(len(input_pos))
        distance = anchors[:, None] - torch.arange(self.rows_of_text)
        visible = distance >= 0
        if self.window:
            visible = visible & (distance + step < self.window)
        return step, visible, self.pieces.kept

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: tuple[int, Tensor, Tensor | None],
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See ``EagerAttention.forward``."""
        if sinks is not None:
            raise ValueError("a draft head with attention sinks is not measured")
        (step, visible, kept), groups = rows, query.shape[2] // key.shape[2]
        own = key[0].transpose(0, 1), value[0].transpose(0, 1)  # [kv_heads, T, head_dim]
        earlier = [(keys[:, kept], values[:, kept]) for keys, values in self.steps[1:step]]
        self.steps = [*self.steps[:1], *earlier, own] if step else [own]
        (first_keys, first_values), *chain = (
            tuple(part.repeat_interleave(groups, 0) for part in each) for each in self.steps
        )
        asked = query[0].transpose(0, 1)
        seen = softcapped((asked @ first_keys.mT).float() * scale, softcap).masked_fill(~visible, float("-inf"))
        scores = [softcapped((asked * keys).sum(-1, keepdim=True).float() * scale, softcap) for keys, _ in chain]
        weights = torch.cat([seen, *scores], dim=-1).softmax(-1).to(query.dtype)
        out = weights[..., : seen.shape[-1]] @ first_values
        for index, (_, values) in enumerate(chain):
            out = out + weights[..., seen.shape[-1] + index, None] * values
        return out.transpose(0, 1)[None]


class Blocks(nn.Module):
    """Computes the attention of blocks that begin after many tokens of a text, all at once. The ``rows`` of a block are
    its positions int64 [A, B] and a ``Block``, which says what they attend to."""

    def __init__(self, _shape: KVCacheShape):
        super().__init__()
        self.context: tuple[Tensor, ...] = ()

    def write(self, key: Tensor, value: Tensor, _rows: object) -> None:
        """Keep ``key`` and ``value`` [1, T, kv_heads, head_dim] of the context, at positions 0, 1, 2, ..."""
        self.context = tuple(x[0].transpose(0, 1) for x in (key, value))  # [kv_heads, T, head_dim]

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, rows: tuple[Tensor, Block], scale: float, **_given: object
    ) -> Tensor:
        """Map query [A, B, heads, head_dim], key and value [A, B, kv_heads, head_dim] to [A, B, heads, head_dim]."""
        positions, block = rows
        last = positions if block.causal else positions[:, -1:].expand_as(positions)
        from_row = positions[:, :1].expand_as(positions) if block.from_first_row else positions
        first = torch.zeros_like(positions) if block.before is None else (from_row - block.before).clamp_min(0)
        groups = query.shape[2] // key.shape[2]
        asked = query.transpose(1, 2)  # [A, heads, B, head_dim]
        own_keys, own_values = (x.transpose(1, 2).repeat_interleave(groups, 1) for x in (key, value))
        keys, values = (x.repeat_interleave(groups, 0) for x in self.context)
        slots = torch.arange(keys.shape[1], device=query.device)
        before = (slots >= first[..., None]) & (slots < positions[:, :1, None])
        inside = (positions[:, None] >= first[..., None]) & (positions[:, None] <= last[..., None])
        scores = torch.cat((_for_each_block(asked, keys.mT), asked @ own_keys.mT), dim=-1).float() * scale
        visible = torch.cat((before, inside), dim=-1)[:, None]
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1).to(query.dtype)
        seen = _for_each_block(weights[..., : keys.shape[1]], values)
        return (seen + weights[..., keys.shape[1] :] @ own_values).transpose(1, 2)


def _for_each_block(rows: Tensor, shared: Tensor) -> Tensor:
    """Multiply the rows [A, heads, B, M] of all blocks by what they share [heads, M, N], without a copy for each
    block."""
    blocks, heads, count, _ = rows.shape
    product = rows.transpose(0, 1).flatten(1, 2) @ shared
    return product.view(heads, blocks, count, -1).transpose(0, 1)
