"""Computes what the target says of a text: the states of all its layers at each token, the greedy token behind it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eagle3.export.fit.texts import Piece
from eagle3.targets import TapTarget

KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Seen:
    """One piece of text. ``begin`` is the first token that a round may begin with, its anchor."""

    kind: str
    tokens: Tensor
    """int64 [T]"""
    greedy: Tensor
    """int64 [T], the target's token behind each."""
    states: tuple[Tensor, ...]
    """The states by layer, [1, T, H] each: the inputs of the layers and the last one's output, transformers'
    ``hidden_states`` before the last norm."""
    final: Tensor
    """[1, T, H], after the target's norm."""
    begin: int
    kept: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    """Keys and values of the last layer of each kind, for heads that attend to the target's."""

    def feature_of(self, taps: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Return what a head takes: taps, or for none the final state."""
        return tuple(self.states[tap] for tap in taps) if taps else (self.final,)


@torch.no_grad()
def look(
    target: TapTarget,
    layers: int,
    texts: Sequence[Piece],
    written: int,
    say: Callable[[int], None] = lambda _done: None,
) -> list[Seen]:
    """Compute each piece of text, and ``written`` greedy tokens behind it, one at a time."""
    taps, found = tuple(range(layers + 1)), []
    for number, piece in enumerate(texts):
        ids, parts = list(piece.ids), []
        rows = torch.tensor([ids])
        for _ in range(written + 1):
            start = len(ids) - rows.shape[1]
            state, states = target(rows, torch.arange(start, len(ids)), taps)
            said = torch.cat([target.scores(part).argmax(-1) for part in state.split(256, dim=1)], dim=1)
            parts.append((said, state, states))
            if len(parts) > written:
                break
            ids.append(int(said[0, -1]))
            rows = said[:, -1:]
        greedy, final, by_layer = zip(*parts, strict=True)
        found.append(
            Seen(
                piece.kind,
                torch.tensor(ids),
                torch.cat(greedy, dim=1)[0],
                tuple(torch.cat(each, dim=1) for each in zip(*by_layer, strict=True)),
                torch.cat(final, dim=1),
                begin=len(piece.ids) if written else min(4, len(ids) - 1),
                kept={kind: _kept(module, len(ids)) for kind in KINDS if (module := target.kept(kind)) is not None},
            )
        )
        say(number + 1)
    return found


def _kept(module: Any, length: int) -> tuple[Tensor, ...]:  # noqa: ANN401 - an attention of a factory
    return tuple(part[:, :, :length].clone() for part in module.written(None, None, None))


@torch.no_grad()
def restore(target: TapTarget, seen: Seen) -> None:
    """Write a text's keys and values back into the target's caches, as they were behind it."""
    for kind, parts in seen.kept.items():
        module: Any = target.kept(kind)
        for cache, part in zip(module.written(None, None, None), parts, strict=True):
            cache[:, :, : part.shape[2]] = part
