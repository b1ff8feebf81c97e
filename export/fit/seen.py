"""Computes a text with the target: the states of all layers at each token, and the greedy token after it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from eagle3.export.draft.common.pieces import Pieces
from eagle3.export.fit.texts import Piece
from eagle3.targets import TapTarget
from eagle3.targets.spec import is_recurrent

ROWS_AT_ONCE = 1024
"""The most tokens that one forward of the target computes, of several pieces of text."""
KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Seen:
    """One piece of text with the target's states. ``begin`` is the index of the first token that may be the anchor of a
    round."""

    kind: str
    tokens: Tensor
    """int64 [T]"""
    greedy: Tensor
    """int64 [T], the target's greedy token after each token"""
    states: tuple[Tensor, ...]
    """The states by layer, each [1, T, H]: the inputs of the layers, then the last layer's output before the final
    norm, as in transformers' ``hidden_states``."""
    final: Tensor
    """[1, T, H], the state after the target's final norm."""
    begin: int
    kept: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    """Keys and values of the last layer of each kind, for heads that attend to the target's cache."""

    def feature_of(self, taps: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Return the states that a head takes: those at its taps, or the final state if it has none."""
        return tuple(self.states[tap] for tap in taps) if taps else (self.final,)


@dataclass(frozen=True)
class Computed:
    """A target with what it computed of a text."""

    target: TapTarget
    seen: Sequence[Seen]
    pieces: Pieces
    """Read by the target's attention."""
    at_once: int
    """The number of pieces of text that fit into the target's caches."""
    written: bool
    """True if a target wrote the text, from the beginnings of pieces."""

    @property
    def chains(self) -> int:
        """The number of tokens after which a chain begins."""
        return sum(len(each.tokens) - each.begin for each in self.seen)

    def text(self) -> str:
        """Return a description of the text, for a person."""
        kinds = ", ".join(dict.fromkeys(each.kind for each in self.seen))
        whose = "the target's own greedy tokens behind" if self.written else "tokens of"
        return f"{self.chains} {whose} {kinds}"


@torch.no_grad()
def written(
    target: TapTarget, texts: Sequence[Piece], count: int, pieces: Pieces, stop: Collection[int] = ()
) -> list[list[int]]:
    """Return the texts, each continued by up to ``count`` greedy tokens; a continuation ends with the first token in
    ``stop``. The texts are continued together, a row each, so near-ties may fall otherwise than in ``look``, which
    decides the greedy tokens."""
    ids = [list(piece.ids) for piece in texts]
    for index, each in enumerate(ids):
        rows = torch.arange(len(each))
        pieces.of_rows = torch.full_like(rows, index)
        state, _ = target(torch.tensor([each]), rows, ())
        each.append(int(target.scores(state[:, -1:]).argmax(-1)))
    pieces.of_rows = torch.arange(len(ids))
    for _ in range(count - 1):
        newest = torch.tensor([[each[-1] for each in ids]])
        state, _ = target(newest, torch.tensor([len(each) - 1 for each in ids]), ())
        for each, token in zip(ids, target.scores(state).argmax(-1)[0].tolist(), strict=True):
            each.append(token)
    pieces.of_rows = None
    for each, piece in zip(ids, texts, strict=True):
        stops = (at for at in range(len(piece.ids) + 1, len(each)) if each[at] in stop)
        del each[next(stops, len(each)) + 1 :]
    return ids


def texts_at_once(config: PreTrainedConfig, length: int) -> int:
    """Return how many texts of up to ``length`` tokens one forward computes side by side.

    A recurrent layer has one state. Llama 4 scales queries by their place in the forward, from ``floor_scale`` on.
    """
    rows = min(ROWS_AT_ONCE, getattr(config, "floor_scale", None) or ROWS_AT_ONCE)
    return 1 if is_recurrent(config) else max(1, (rows - 1) // length)


@torch.no_grad()
def look(
    target: TapTarget, layers: int, texts: Sequence[Piece], whole: Sequence[list[int]], pieces: Pieces
) -> list[Seen]:
    """Compute texts with their continuations, ``whole``, side by side in one forward."""
    lengths = [len(ids) for ids in whole]
    pieces.of_rows = torch.arange(len(whole)).repeat_interleave(torch.tensor(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    final, states = target(torch.tensor([[each for ids in whole for each in ids]]), positions, tuple(range(layers + 1)))
    pieces.of_rows = None
    greedy = torch.cat([target.scores(part).argmax(-1) for part in final.split(64, dim=1)], dim=1)
    each_state = zip(*(state.split(lengths, dim=1) for state in states), strict=True)
    modules = {kind: module for kind in KINDS if (module := target.kept(kind)) is not None}
    found = []
    for index, (piece, ids, own) in enumerate(zip(texts, whole, each_state, strict=True)):
        begin = len(piece.ids) if len(ids) > len(piece.ids) else min(4, len(ids) - 1)
        slots = slice(index * pieces.length, index * pieces.length + len(ids))
        kept = {kind: _kept(module, slots) for kind, module in modules.items()}
        rows = slice(sum(lengths[:index]), sum(lengths[: index + 1]))
        found.append(Seen(piece.kind, torch.tensor(ids), greedy[0, rows], own, final[:, rows], begin, kept))
    return found


def look_at_all(
    target: TapTarget,
    config: PreTrainedConfig,
    texts: Sequence[Piece],
    whole: Sequence[list[int]],
    pieces: Pieces,
    at_once: int,
) -> list[Seen]:
    """Compute texts with their continuations, as many of them at once as ``texts_at_once`` said."""
    layers = config.num_hidden_layers
    return [
        each
        for at in range(0, len(texts), at_once)
        for each in look(target, layers, texts[at : at + at_once], whole[at : at + at_once], pieces)
    ]


def _kept(module: Any, slots: slice) -> tuple[Tensor, ...]:  # noqa: ANN401 - an attention of a factory
    return tuple(part[:, :, slots].clone() for part in module.written(None, None, None))


@torch.no_grad()
def restore(target: TapTarget, group: Sequence[Seen], pieces: Pieces) -> None:
    """Write the keys and values of pieces of text into the target's caches again, side by side."""
    for index, seen in enumerate(group):
        for kind, parts in seen.kept.items():
            module: Any = target.kept(kind)
            for cache, part in zip(module.written(None, None, None), parts, strict=True):
                first = index * pieces.length
                cache[:, :, first : first + part.shape[2]] = part
