"""Attention over a KV cache, which every target and draft head leaves to the backend.

A layer computes projections, norms and RoPE. The rest, which writes keys and values at their positions and attends to
the cache, is a module made by an ``AttentionFactory``. ``EagerAttention`` here is the reference; each backend in
``eagle3.export.lowering`` has its own. Writing a position again replaces it, and no query attends past its own
position. So rejected tokens need no other rollback.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from executorch.examples.models.gemma4.text_decoder import Gemma4KVCache
from executorch.examples.models.gemma4_31b.model import RingKVCache
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from eagle3.targets.sinks import softcapped
from eagle3.targets.spec import Window

SCALE_BYTES = 4
"""The bytes of a scale in a cache of 8 bits: one float32 for each token and head."""
SMALLEST = 1e-20
"""The smallest magnitude from which a scale is computed, so that a head of zeros has a scale too."""


@dataclass(frozen=True)
class KVCacheShape:
    """The shape of one layer's KV cache. ``window`` is the sliding window or the attention chunk in tokens, 0 for full
    attention; ``chunked`` is True for a chunk. ``sinks`` is True if each head has an attention sink. ``int8`` is True
    if keys and values are kept as 8-bit codes, with a scale for each token and head. ``heads`` is the number of query
    heads that attend to the cache, 0 if it is not known."""

    kv_heads: int
    head_dim: int
    max_seq_len: int
    window: int = 0
    dtype: torch.dtype = torch.float32
    sinks: bool = False
    chunked: bool = False
    int8: bool = False
    heads: int = 0

    @property
    def slots(self) -> int:
        """The slots of the cache. A sliding layer has a ring of two windows, so that a forward of up to one window does
        not overwrite positions that it attends to."""
        return 2 * self.window if self.window else self.max_seq_len

    def slots_of(self, input_pos: Tensor) -> Tensor:
        """Return the slots [T] of positions [T]."""
        return input_pos % self.slots if self.window else input_pos

    @property
    def bytes(self) -> int:
        """The bytes of keys and values. With sinks this is an upper bound, because some backends double the width of a
        head. The few columns and slots that the CPU adds for sinks and verify windows are not counted."""
        head = self.head_dim + SCALE_BYTES if self.int8 else self.head_dim * self.dtype.itemsize
        return (4 if self.sinks else 2) * self.kv_heads * head * self.slots


@dataclass(frozen=True)
class Block:
    """The positions that the rows of a draft block attend to, if that is not every position up to their own. The rows
    are at consecutive positions, and each attends to a range of positions."""

    before: int | None = None
    """The number of positions before a row at which the range begins; None: it begins at position 0."""
    from_first_row: bool = False
    """True if ``before`` counts from the block's first row, for all of its rows."""
    causal: bool = False
    """True if the range ends at the row itself, False if it ends at the block's last row."""

    def bounds(self, input_pos: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and the last position that rows at ``input_pos`` [T] attend to, [T] each."""
        last = input_pos if self.causal else input_pos[-1:].expand_as(input_pos)
        if self.before is None:
            return torch.zeros_like(input_pos), last
        row = input_pos[:1].expand_as(input_pos) if self.from_first_row else input_pos
        return (row - self.before).clamp_min(0), last


AttentionFactory = Callable[[KVCacheShape], nn.Module]
"""Returns a module with the methods of ``EagerAttention``: ``write``, ``rows``, which is called once per forward, and
``forward``, which is called once per layer."""


def with_int8_caches(attention: AttentionFactory) -> AttentionFactory:
    """Return a factory whose layers of full attention keep keys and values in 8 bits. Sliding layers keep their dtype,
    since their caches do not grow with the context."""
    return lambda shape: attention(replace(shape, int8=not shape.window))


class Int8KVCache(nn.Module):
    """Keys and values as symmetric int8 codes [1, kv_heads, slots, head_dim] with float32 scales [1, kv_heads, slots].
    A scale is the largest magnitude of a token's head divided by 127."""

    k_cache: Tensor
    v_cache: Tensor
    k_cache_scales: Tensor
    v_cache_scales: Tensor

    def __init__(self, shape: KVCacheShape):
        super().__init__()
        size = 1, shape.kv_heads, shape.slots, shape.head_dim
        for name in ("k", "v"):
            self.register_buffer(f"{name}_cache", torch.zeros(size, dtype=torch.int8))
            self.register_buffer(f"{name}_cache_scales", torch.zeros(size[:3]))

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The codes of keys and values, then their scales."""
        return self.k_cache, self.v_cache, self.k_cache_scales, self.v_cache_scales

    def update(self, input_pos: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Write ``key`` and ``value`` [1, kv_heads, T, head_dim] at ``input_pos`` [T]; return the cache's ``parts``."""
        (keys, key_scales), (values, value_scales) = int8_codes(key), int8_codes(value)
        for kept, new in zip(self.parts, (keys, values, key_scales, value_scales), strict=True):
            kept.index_copy_(2, input_pos, new)
        return self.parts


def int8_codes(heads: Tensor) -> tuple[Tensor, Tensor]:
    """Return the int8 codes of heads [..., head_dim] and their float32 scales [...]."""
    heads = heads.float()
    scales = heads.abs().amax(-1).clamp_min(SMALLEST) / 127
    return (heads / scales.unsqueeze(-1) + 0.5).floor().to(torch.int8), scales


class EagerAttention(nn.Module):
    """The reference attention in plain PyTorch, over ExecuTorch's own caches or over an INT8 one."""

    def __init__(self, shape: KVCacheShape):
        super().__init__()
        self.shape = shape
        self.kv_cache: Int8KVCache | RingKVCache | Gemma4KVCache
        if shape.int8:
            self.kv_cache = Int8KVCache(shape)
        elif shape.window:
            self.kv_cache = RingKVCache(1, shape.window, shape.kv_heads, shape.head_dim).to(shape.dtype)
        else:
            self.kv_cache = Gemma4KVCache(
                1, shape.max_seq_len, shape.kv_heads, shape.head_dim, shape.dtype, use_index_copy=True
            )

    def rows(self, input_pos: Tensor, block: Block | None = None) -> tuple[Tensor, Tensor]:
        """Return the values that the layers of one kind (sliding or full) share in a forward. Only ``forward`` and
        ``write`` read them.

        Args:
            input_pos: int64 [T], consecutive. Each row attends to the positions up to its own, within its window
            block: if given, says what the rows attend to instead; within two windows, for a sliding layer
        """
        return input_pos, attention_mask(input_pos, self.shape, block)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        rows: tuple[Tensor, Tensor],
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write ``key`` and ``value`` at the rows' positions, then attend.

        Args:
            query: [1, T, heads, head_dim]
            key, value: [1, T, kv_heads, head_dim]; both None to attend to what is written, and write nothing
            rows: the result of ``rows`` in this forward
            scale: factor on the dot products of query and key
            softcap: a scaled dot product x becomes softcap * tanh(x / softcap)
            sinks: [heads], an additional logit of each softmax, whose value is zero; given if the shape has ``sinks``

        Returns:
            [1, T, heads, head_dim]
        """
        input_pos, mask = rows
        query = query.transpose(1, 2)  # [1, heads, T, head_dim]
        keys, values, *scales = self.written(input_pos, key, value)
        if scales:
            keys, values = dequantized((keys, values), scales, query.dtype)
        if softcap is None and sinks is None:
            out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
        else:
            out = attend(query, keys, values, mask, scale, softcap, sinks)
        return out.transpose(1, 2)

    def write(self, key: Tensor, value: Tensor, rows: tuple[Tensor, Tensor]) -> None:
        """Write ``key`` and ``value`` [1, T, kv_heads, head_dim] at the rows' positions."""
        self.written(rows[0], key, value)

    def written(self, input_pos: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, ...]:
        """Return both caches [1, kv_heads, slots, head_dim], with ``key`` and ``value`` written into them, and their
        scales [1, kv_heads, slots] where they hold codes."""
        if key is None or value is None:
            kept = self.kv_cache
            return kept.parts if isinstance(kept, Int8KVCache) else (kept.k_cache, kept.v_cache)
        return self.kv_cache.update(input_pos, key.transpose(1, 2), value.transpose(1, 2))


def dequantized(codes: Iterable[Tensor], scales: Iterable[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return keys and values from their codes [1, kv_heads, slots, head_dim] and scales [1, kv_heads, slots]."""
    return [(each * by.unsqueeze(-1)).to(dtype) for each, by in zip(codes, scales, strict=True)]


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention step by step, as transformers' eager attention of Gemma 2 (softcap) and gpt-oss (sinks) does.

    Args:
        query: [1, heads, T, head_dim]
        keys, values: [1, kv_heads, slots, head_dim]
        mask: bool [1, 1, T, slots]
        scale, softcap, sinks: see ``EagerAttention``

    Returns:
        [1, heads, T, head_dim]
    """
    _, kv_heads, slots, head_dim = keys.shape
    heads, length = query.shape[1:3]
    groups = heads // kv_heads  # the heads that share keys are stacked and computed by one matmul
    packed = query.contiguous().view(kv_heads, groups * length, head_dim)
    scores = softcapped(torch.bmm(packed * scale, keys[0].transpose(1, 2)).float(), softcap)
    hidden = ~mask[0].expand(groups, length, slots).reshape(1, groups * length, slots)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.float().view(kv_heads, groups, 1).expand(kv_heads, groups, length)
        scores = torch.cat((scores, column.reshape(kv_heads, groups * length, 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :slots].to(values.dtype)
    # Split dimensions only: with dynamic lengths a trace does not know that the result of bmm is contiguous.
    out = torch.bmm(weights, values[0]).unflatten(1, (groups, length))
    return out.permute(2, 0, 1, 3).contiguous().view(1, length, heads, head_dim).transpose(1, 2)


def ring_window(window: int, max_seq_len: int) -> int:
    """Return the size of the window for which a layer needs a ring: 0 if it has no window, or if the window covers the
    whole context."""
    return window if window < max_seq_len else 0


def attention_mask(input_pos: Tensor, shape: KVCacheShape, block: Block | None = None) -> Tensor:
    """Return the mask of rows at ``input_pos`` [T]: bool [1, 1, T, slots]."""
    if block is not None:
        return block_mask(input_pos, shape, block)
    if not shape.window:
        return causal_mask(input_pos, shape.slots)
    return ring_mask(input_pos, shape.window, shape.chunked)


def causal_mask(input_pos: Tensor, slots: int) -> Tensor:
    """Return a mask by which rows at ``input_pos`` [T] attend to every slot up to their own: bool [1, 1, T, slots]."""
    columns = torch.arange(slots, device=input_pos.device)
    return (columns[None, :] <= input_pos[:, None])[None, None]


def ring_mask(input_pos: Tensor, window: int, chunked: bool = False) -> Tensor:
    """Return a mask by which rows at ``input_pos`` [T] attend to the ``window`` positions up to their own: bool
    [1, 1, T, 2 * window].

    With ``chunked``, rows attend only to positions of their own chunk, which begins at a multiple of ``window``. Slot j
    of the ring holds the last written position that equals j modulo the ring's length, counting the T positions of this
    forward.
    """
    positions = ring_positions(input_pos, 2 * window)
    distance = input_pos[:, None] - positions[None, :]
    reach = input_pos[:, None] % window + 1 if chunked else window
    return ((positions >= 0) & (distance >= 0) & (distance < reach))[None, None]


def block_mask(input_pos: Tensor, shape: KVCacheShape, block: Block) -> Tensor:
    """Return a mask by which rows at ``input_pos`` [T] attend to the positions in ``block``: bool [1, 1, T, slots]."""
    first, last = block.bounds(input_pos)
    whole = torch.arange(shape.slots, device=input_pos.device)
    positions = ring_positions(input_pos, shape.slots) if shape.window else whole
    return ((positions >= first[:, None]) & (positions <= last[:, None]))[None, None]


def ring_positions(input_pos: Tensor, slots: int) -> Tensor:
    """Return the last position written into each slot of a ring, after the rows at ``input_pos`` have been written:
    int64 [slots]. It is negative for an empty slot."""
    columns, last = torch.arange(slots, device=input_pos.device), input_pos[-1]
    return columns + (last - columns).div(slots, rounding_mode="floor") * slots


_NEUTRAL = {
    "dropout": (0.0,),
    "is_causal": (True,),
    "use_cache": (False, True),
    "output_attentions": (False,),
    "output_router_logits": (False,),
}
"""Arguments of transformers' attention functions, with the values that have no effect. None never has an effect, nor
has ``position_ids``, which kernels use to find packed sequences."""


class ForwardRows:
    """Passes the ``rows`` of a forward, by window, to layers that transformers' own code calls. Not every family passes
    keyword arguments on to its attention."""

    def __init__(self) -> None:
        self.by_window: dict[Window, Any] = {}


def _attend(
    module: Any,  # noqa: ANN401 - any class of attention that transformers has
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,  # noqa: ANN401 - a draft head's rows, of whatever its backend makes them
    scaling: float,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,  # noqa: ARG001 - kept out of ``given``
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **given: object,
) -> tuple[Tensor, None]:
    shared = getattr(module, "forward_rows", None)  # a draft head passes its rows as the mask
    if shared is not None and attention_mask is not None:
        raise ValueError("its attention takes an attention_mask of its own, which ours does not compute")
    rows = attention_mask if shared is None else shared.by_window[module.kv_window]
    if sliding_window and sliding_window != module.kv_window.tokens:
        raise ValueError(f"its attention takes a window of {sliding_window}, its layer has {module.kv_window.tokens}")
    if (s_aux is not None) != has_sinks(module):
        raise ValueError("its attention takes sinks that are not a parameter of its layer")
    for name, argument in given.items():
        plain = isinstance(argument, bool | float)
        if argument is not None and not (plain and argument in _NEUTRAL.get(name, ())):
            raise ValueError(f"its attention takes {name}, which ours does not compute")
    if shares_keys(module):
        (kept,) = module.kept
        return kept(query.transpose(1, 2), None, None, rows, scaling), None
    narrower = key.shape[-1] - value.shape[-1]  # in multi-head latent attention keys have an additional rotary part
    value = F.pad(value, (0, narrower)) if narrower > 0 else value
    if narrower < 0:  # padding with zeros changes no score
        query, key = F.pad(query, (0, -narrower)), F.pad(key, (0, -narrower))
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # [1, T, heads, head_dim]
    extras = {name: extra for name, extra in (("softcap", softcap), ("sinks", s_aux)) if extra is not None}
    out = module.kv_attention(query, key, value, rows, scaling, **extras)
    return out[..., :-narrower] if narrower > 0 else out, None


def shares_keys(module: nn.Module) -> bool:
    """Return True if an attention layer of transformers writes no keys, but attends to those of the last earlier layer
    of its kind that has its own."""
    return getattr(module, "is_kv_shared_layer", False)


def has_sinks(module: nn.Module) -> bool:
    """Return True if an attention layer of transformers has attention sinks."""
    return isinstance(getattr(module, "sinks", None), Tensor)


HF_ATTENTION = "eagle3"
"""The ``_attn_implementation`` with which a transformers layer that was given ``rows`` calls ``kv_attention``."""
ALL_ATTENTION_FUNCTIONS.register(HF_ATTENTION, _attend)
