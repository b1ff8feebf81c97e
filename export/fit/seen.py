"""Computes a text with the target: the states of all layers at each token, and the greedy token after it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eagle3.export.fit.texts import Piece
from eagle3.targets import TapTarget

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
    """A target with what it computed of some texts."""

    target: TapTarget
    seen: Sequence[Seen]
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
def look(target: TapTarget, layers: int, piece: Piece, count: int = 0, stop: Collection[int] = ()) -> Seen:
    """Compute a piece of text, and up to ``count`` greedy tokens behind it, one by one as in use. They end with the
    first token in ``stop``.

    A forward has rows of one text, from its position 0 on, so that the target may keep whatever it likes of earlier
    positions: keys and values, recurrent states, the rows of convolutions.
    """
    ids = list(piece.ids)
    greedy: list[Tensor] = []
    parts: list[tuple[Tensor, ...]] = []
    begin = len(ids) if count else min(4, len(ids) - 1)
    at, most = 0, len(ids) + count
    while at < len(ids):
        state, taps = target(torch.tensor([ids[at:]]), torch.arange(at, len(ids)), tuple(range(layers + 1)))
        greedy += [target.scores(part).argmax(-1)[0] for part in state.split(64, dim=1)]
        parts.append((state, *taps))
        at = len(ids)
        if at < most and not (at > begin + 1 and ids[-1] in stop):
            ids.append(int(greedy[-1][-1]))
    final, *states = (torch.cat(each, dim=1) for each in zip(*parts, strict=True))
    kept = {kind: _kept(module, len(ids)) for kind in KINDS if (module := target.kept(kind)) is not None}
    return Seen(piece.kind, torch.tensor(ids), torch.cat(greedy), tuple(states), final, begin, kept)


def _kept(module: Any, count: int) -> tuple[Tensor, ...]:  # noqa: ANN401 - an attention of a factory
    return tuple(part[:, :, :count].clone() for part in module.written(None, None, None))


@torch.no_grad()
def restore(target: TapTarget, seen: Seen) -> None:
    """Write the keys and values of a text into the target's caches again."""
    for kind, parts in seen.kept.items():
        module: Any = target.kept(kind)
        for cache, part in zip(module.written(None, None, None), parts, strict=True):
            cache[:, :, : part.shape[2]] = part
