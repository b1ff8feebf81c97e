"""Computes from configurations the memory that the parts of a run take, and the bytes of an artifact's KV caches."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import nn

from eagle3.export.draft.common.description import DraftDescription
from eagle3.runner.system.gpus import CONTEXT_BYTES
from eagle3.targets import TargetSpec
from eagle3.targets.attention import KVCacheShape, ring_window, with_int8_caches
from eagle3.targets.recurrent import RecurrentPositions, RecurrentState
from eagle3.targets.short_conv import ShortConvState

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

GIB = 1 << 30
KEEPING = (RecurrentPositions, RecurrentState, ShortConvState)
"""The modules that hold the states of layers without a KV cache."""


@dataclass(frozen=True)
class GpuMemory:
    """The bytes of GPU memory that each part of a run takes."""

    target: int
    draft: int
    caches: int
    workspace: int
    context: int = CONTEXT_BYTES

    @classmethod
    def of(cls, parts: Mapping[str, int]) -> "GpuMemory":
        """Return the memory with these parts, as ``asdict`` names them. Other entries of ``parts`` are ignored."""
        return cls(**{each.name: parts[each.name] for each in fields(cls)})

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {size / GIB:.2f}" for part, size in asdict(self).items())
        return f"{self.total / GIB:.2f} GiB of GPU memory ({parts})"


def target_caches(
    spec: TargetSpec, config: "PreTrainedConfig", max_seq_len: int, dtype: torch.dtype, int8: bool = False
) -> list[KVCacheShape]:
    """Return the KV caches of a target with transformers' text configuration ``config``. With ``int8``, its layers of
    full attention keep INT8 codes."""
    return _target_parts(spec, config, max_seq_len, dtype, int8)[0]


def state_bytes(spec: TargetSpec, config: "PreTrainedConfig", max_seq_len: int, dtype: torch.dtype) -> int:
    """Return the bytes of the states of a target's layers without a KV cache: recurrent states and rings of
    convolutions."""
    _, target = _target_parts(spec, config, max_seq_len, dtype)
    kept = (module for module in target.modules() if isinstance(module, KEEPING))
    return sum(buffer.nbytes for module in kept for buffer in module.buffers())


def _target_parts(
    spec: TargetSpec, config: "PreTrainedConfig", max_seq_len: int, dtype: torch.dtype, int8: bool = False
) -> tuple[list[KVCacheShape], nn.Module]:
    """Return the KV caches of a target, and the target itself without caches and weights."""
    shapes: list[KVCacheShape] = []

    def note(shape: KVCacheShape) -> nn.Module:
        shapes.append(shape)
        return nn.Module()

    family = spec.module()
    attention = with_int8_caches(note) if int8 else note
    target = family.Target(family.skeleton(config, max_seq_len).model, max_seq_len, attention, dtype)
    return shapes, target


def draft_caches(draft: DraftDescription, max_seq_len: int, dtype: torch.dtype) -> list[KVCacheShape]:
    slots = max_seq_len + draft.block_rows  # a block may lie beyond the last position of the context
    rings = (ring_window(window, slots) for window in draft.windows)
    return [KVCacheShape(*keys, slots, ring, dtype) for keys, ring in zip(draft.keys, rings, strict=True)]


def cache_bytes(shapes: Iterable[KVCacheShape]) -> int:
    return sum(shape.bytes for shape in shapes)


def longest_context(shapes: Iterable[KVCacheShape], tokens: int, spare: int, most: int) -> int:
    """Return the longest context, at most ``most`` tokens, whose caches take at most ``spare`` bytes more than
    ``shapes``, the caches for ``tokens``. Rings do not grow with the context."""
    each = sum(shape.bytes / shape.slots for shape in shapes if not shape.window)
    more = int(spare / each) // 256 * 256 if each else most
    return max(0, min(most, tokens + more))
