"""Runs a head over a text with one reading, and counts how many of its proposals the target accepts."""

import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eagle3.export.checkpoints.source import Source, TensorHeader
from eagle3.export.draft.common.field import HeadReading
from eagle3.export.draft.common.head import Head, Pieces
from eagle3.export.draft.kinds.eagle.description import EagleDescription
from eagle3.export.draft.loading import load_draft
from eagle3.export.fit import texts
from eagle3.export.fit.attention import Blocks, Chains
from eagle3.export.fit.seen import Computed, Seen, restore
from eagle3.targets.attention import AttentionFactory

UNSPOKEN = -20.0
"""The log-likelihood of a token that the head's vocabulary lacks, in nats."""


class HeldTensors(Source):
    """A head's tensors in memory, which all readings share."""

    def __init__(self, source: Source, names: Sequence[str], dtype: torch.dtype):
        super().__init__(source.path)
        self._source, wanted = source, set(names)
        self._held = [
            (name, tensor.to(dtype) if tensor.is_floating_point() else tensor)
            for name, tensor in source.tensors()
            if name in wanted
        ]

    @staticmethod
    def recognizes(path: object) -> bool:  # noqa: ARG004 - it is no format of files
        return False

    def files(self) -> list[Any]:
        return self._source.files()

    def headers(self) -> dict[str, TensorHeader]:
        return self._source.headers()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._held)


@dataclass(frozen=True)
class Trial:
    """The outcome of N chains, each of K proposals after an anchor."""

    hits: Tensor
    """bool [N, K]: True if the proposal and all before it equal the target's tokens, as far as those are known."""
    known: Tensor
    """bool [N, K]: True if the target's token is known there, which needs a text that continues with the target's own
    tokens so far."""
    likelihood: Tensor
    """float [N]: the logarithm of the probability that the head gives to the target's next token."""
    half: int
    """The number of chains in the first half of the text. A reading that was given up has no others."""

    @property
    def accepted(self) -> Tensor:
        """float [N], the number of accepted proposals of each chain, as far as the target's tokens are known."""
        return self.hits.sum(1).float()

    @property
    def first(self) -> Tensor:
        """float [N], 1 if the first proposal is accepted."""
        return self.hits[:, 0].float()

    def first_chains(self, count: int) -> "Trial":
        """Return the first ``count`` chains."""
        return Trial(self.hits[:count], self.known[:count], self.likelihood[:count], self.half)


class Trials:
    """Runs the readings of one head over a text that its target has seen."""

    def __init__(self, reading: HeadReading, over: Computed, length: int, dtype: torch.dtype):
        """Hold the head's tensors. ``length`` is that of the chains."""
        self.over, self.dtype, self.pieces = over, dtype, Pieces()
        draft, seen = reading.draft, over.seen
        self.source = HeldTensors(draft.source, list(draft.tensor_names), dtype)
        middle = (len(seen) + 1) // 2
        self.halves = seen[:middle], seen[middle:]
        self.every = 1 if over.written else math.ceil(over.chains * draft.block_rows / texts.BLOCK_ROWS) or 1
        chains = [sum(self._chains(each) for each in part) for part in (seen[:middle], seen[middle:])]
        self.half = chains[0] if chains[1] else (chains[0] + 1) // 2
        self._set_length(length)

    def with_length(self, length: int) -> "Trials":
        """Return the same trials with chains of another length."""
        other = copy(self)
        other._set_length(length)
        return other

    def _set_length(self, length: int) -> None:
        self.length = length
        self.known = torch.cat([self._known(each) for each in self.over.seen])

    def text(self) -> str:
        """Return a description of the text and of its tokens after which a chain begins."""
        return self.over.text() + (f", a block behind each {self.every}th" if self.every > 1 else "")

    def _chains(self, seen: Seen) -> int:
        return math.ceil((len(seen.tokens) - seen.begin) / self.every)

    def _known(self, seen: Seen) -> Tensor:
        follows = (
            seen.tokens[seen.begin + 1 :] == seen.greedy[seen.begin : -1]
        )  # the text goes on with the greedy token
        padded = torch.cat((follows, follows.new_zeros(self.length)))
        so_far = padded.unfold(0, self.length, 1)[: len(follows) + 1, :-1].cumprod(1).bool()
        return torch.cat((torch.ones(len(so_far), 1, dtype=torch.bool), so_far), dim=1)[:: self.every]

    @torch.no_grad()
    def head(self, reading: HeadReading) -> Head:
        """Load the head with a reading. Raises what loading raises."""
        draft = replace(reading.draft, source=self.source)
        proposals = 1 if isinstance(draft, EagleDescription) else draft.proposals(self._length(reading))
        slots = max(len(each.tokens) for each in self.over.seen) + self.length + draft.block_rows + 1
        attention: AttentionFactory = Blocks if draft.block_rows else lambda shape: Chains(shape, self.pieces)
        head = load_draft(draft, slots, self.dtype, attention, self.over.target, proposals)
        head.checks_positions = False
        return head

    def _length(self, reading: HeadReading) -> int:
        return min(self.length, reading.draft.longest_chain or self.length)

    def run(self, reading: HeadReading, goes_on: Callable[[Trial], bool] = lambda _begun: True) -> Trial:
        """Run a reading. In the first half of the text, ``goes_on`` is asked after each piece whether to run it
        further."""
        return self.of_head(self.head(reading), reading, goes_on=goes_on)

    @torch.no_grad()
    def of_head(
        self,
        head: Head,
        reading: HeadReading,
        steps: int | None = None,
        goes_on: Callable[[Trial], bool] = lambda _begun: True,
    ) -> Trial:
        """Run a loaded head. ``steps`` is the number of proposals of a chain; those after it count as missed."""
        steps = min(steps or self.length, self._length(reading))
        found: list[tuple[Tensor, Tensor]] = []
        first, other = self.halves
        for seen in first:
            found.append(self._of_text(head, reading, seen, steps))
            if not goes_on(trial := self._trial(found)):
                return trial
        return self._trial([*found, *(self._of_text(head, reading, seen, steps) for seen in other)])

    def _trial(self, found: list[tuple[Tensor, Tensor]]) -> Trial:
        hits = torch.cat([each for each, _ in found])
        return Trial(hits, self.known[: len(hits)], torch.cat([each for _, each in found]), self.half)

    def _of_text(self, head: Head, reading: HeadReading, seen: Seen, steps: int) -> tuple[Tensor, Tensor]:
        """Return the hits and likelihoods of the chains behind a piece of text."""
        restore(self.over.target, seen)
        rows, wanted = torch.arange(len(seen.tokens) - 1), self._wanted(seen, steps)
        states = tuple(state[:, : len(rows)] for state in seen.feature_of(reading.taps))
        feature = head.fuse(states).to(self.dtype)
        anchors = rows[seen.begin - 1 :: self.every]
        hits, logits = head.chains(seen.tokens[None, 1:], feature, rows, anchors, wanted, self.pieces)
        missed = hits.new_zeros(len(hits), self.length - steps)
        return torch.cat((hits, missed), dim=1), _likelihood(logits, wanted[:, 0], head.ids_in_target())

    def _wanted(self, seen: Seen, steps: int) -> Tensor:
        """Return int64 [N, steps], the target's tokens after each anchor, -1 where they are not known."""
        greedy = seen.greedy[seen.begin :]
        aims = torch.cat((greedy, greedy.new_full((steps,), -1))).unfold(0, steps, 1)[: len(greedy) : self.every]
        return aims.masked_fill(~self._known(seen)[:, :steps], -1)

    def rounds(self, trial: Trial) -> list[int]:
        """Return the number of tokens of each round in which the text would be decoded. Rounds that the end of the text
        cuts short are left out."""
        found, at = [], 0
        for seen in self.over.seen:
            if at == len(trial.hits):  # given up here
                break
            count = len(seen.tokens) - seen.begin
            accepted = trial.hits[at : at + count].sum(1).tolist()
            whole, row = trial.known[at : at + count, -1].tolist(), 0
            while row < count:
                if whole[row]:
                    found.append(1 + accepted[row])
                row += found[-1] if whole[row] else 1
            at += count
        return found


def _likelihood(logits: Tensor, wanted: Tensor, ids_in_target: Tensor | None) -> Tensor:
    whole = torch.cat([part.float().logsumexp(-1) for part in logits.split(64)])
    if ids_in_target is None:
        return (logits.gather(1, wanted[:, None])[:, 0].float() - whole).clamp_min(UNSPOKEN)
    order = ids_in_target.argsort()
    ascending = ids_in_target[order]
    place = torch.searchsorted(ascending, wanted.contiguous()).clamp_max(len(order) - 1)
    spoken = ascending[place] == wanted
    found = (logits.gather(1, order[place][:, None])[:, 0].float() - whole).clamp_min(UNSPOKEN)
    return torch.where(spoken, found, torch.full_like(found, UNSPOKEN))


def mean_and_error(values: Tensor, block: int = 4) -> tuple[float, float]:
    """Return the mean of values [N] and its standard error, where each ``block`` of neighbours counts as one value."""
    if len(values) < 2 * block:
        block = 1
    means = values[: len(values) // block * block].view(-1, block).mean(1)
    error = float(means.std() / math.sqrt(len(means))) if len(means) > 1 else math.inf
    return float(values.mean()), error
