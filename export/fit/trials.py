"""Runs a head over a text with one reading, and counts how many of its proposals the target accepts."""

import math
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eagle3.export.checkpoints.source import Source, TensorHeader
from eagle3.export.draft.common.field import HeadReading
from eagle3.export.draft.common.head import Head
from eagle3.export.draft.kinds.eagle.description import EagleDescription
from eagle3.export.draft.loading import load_draft
from eagle3.export.fit.attention import Blocks, Chains
from eagle3.export.fit.seen import Seen, restore
from eagle3.targets import TapTarget

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
    """bool [N, K]: True if the proposal and all before it equal the target's tokens."""
    known: Tensor
    """bool [N, K]: True if the target's token is known there, which needs a text that continues with the target's own
    tokens so far."""
    likelihood: Tensor
    """float [N]: the logarithm of the probability that the head gives to the target's next token."""

    @property
    def accepted(self) -> Tensor:
        """float [N], the number of accepted proposals of each chain, as far as the target's tokens are known."""
        return (self.hits & self.known).sum(1).float()

    @property
    def first(self) -> Tensor:
        """float [N], 1 if the first proposal is accepted."""
        return (self.hits[:, 0] & self.known[:, 0]).float()


class Trials:
    """Runs the readings of one head over a text that its target has seen."""

    def __init__(self, reading: HeadReading, target: TapTarget, seen: Sequence[Seen], length: int, dtype: torch.dtype):
        self.target, self.seen, self.dtype = target, seen, dtype
        draft = reading.draft
        self.source = HeldTensors(draft.source, list(draft.tensor_names), dtype)
        self.spans = [slice(each.begin - 1, len(each.tokens) - 1) for each in seen]
        self._set_length(length)

    def with_length(self, length: int) -> "Trials":
        """Return the same trials with chains of another length."""
        other = copy(self)
        other._set_length(length)
        return other

    def _set_length(self, length: int) -> None:
        self.length = length
        self.known = torch.cat([self._known(each) for each in self.seen])

    def _known(self, seen: Seen) -> Tensor:
        count, end = len(seen.tokens) - seen.begin, len(seen.tokens)
        follows = seen.tokens[1:] == seen.greedy[:-1]  # True if token i + 1 of the text is the greedy one
        known = torch.zeros(count, self.length, dtype=torch.bool)
        for row in range(count):
            anchor = seen.begin + row
            for step in range(min(self.length, end - anchor)):
                if step and not follows[anchor + step - 1]:
                    break
                known[row, step] = True
        return known

    @torch.no_grad()
    def head(self, reading: HeadReading) -> Head:
        """Load the head with a reading. Raises what loading raises."""
        draft = replace(reading.draft, source=self.source)
        proposals = 1 if isinstance(draft, EagleDescription) else draft.proposals(self._length(reading))
        slots = max(len(each.tokens) for each in self.seen) + self.length + draft.block_rows + 1
        attention = Blocks if draft.block_rows else Chains
        return load_draft(draft, slots, self.dtype, attention, self.target, proposals)

    def _length(self, reading: HeadReading) -> int:
        return min(self.length, reading.draft.longest_chain or self.length)

    @torch.no_grad()
    def run(self, reading: HeadReading, length: int | None = None) -> Trial:
        """Run a reading with chains of ``length``, by default the whole chain; positions after it count as misses."""
        head, steps = self.head(reading), min(length or self.length, self._length(reading))
        return self.of_head(head, reading, steps)

    @torch.no_grad()
    def of_head(self, head: Head, reading: HeadReading, steps: int | None = None) -> Trial:
        """Run a loaded head."""
        hits, likelihood, steps = [], [], steps or self._length(reading)
        ids_in_target = head.ids_in_target()
        for seen, span in zip(self.seen, self.spans, strict=True):
            restore(self.target, seen)
            feature = head.fuse(seen.feature_of(reading.taps))[:, : span.stop].to(self.dtype)
            proposed, logits = head.chains(seen.tokens[None, 1:], feature, steps, span.start)
            wanted = seen.greedy[seen.begin :]
            padded = torch.cat((wanted, wanted.new_full((steps,), -1)))
            aims = padded.unfold(0, steps, 1)[: len(wanted)]
            right = torch.zeros(len(wanted), self.length, dtype=torch.bool)
            right[:, :steps] = (proposed == aims).cumprod(1).bool()
            hits.append(right)
            likelihood.append(_likelihood(logits, wanted, ids_in_target))
        return Trial(torch.cat(hits), self.known, torch.cat(likelihood))

    def rounds(self, trial: Trial) -> list[int]:
        """Return the number of tokens of each round in which the text would be decoded. Rounds that the end of the text
        cuts short are left out."""
        found, at = [], 0
        for seen in self.seen:
            count = len(seen.tokens) - seen.begin
            accepted = (trial.hits & trial.known)[at : at + count].sum(1).tolist()
            whole, row = trial.known[at : at + count, -1].tolist(), 0
            while row < count:
                if whole[row]:
                    found.append(1 + accepted[row])
                row += found[-1] if whole[row] else 1
            at += count
        return found


def _likelihood(logits: Tensor, wanted: Tensor, ids_in_target: Tensor | None) -> Tensor:
    logs = logits.float().log_softmax(-1)
    if ids_in_target is None:
        return logs.gather(1, wanted[:, None])[:, 0].clamp_min(UNSPOKEN)
    order = ids_in_target.argsort()
    ascending = ids_in_target[order]
    place = torch.searchsorted(ascending, wanted).clamp_max(len(order) - 1)
    spoken = ascending[place] == wanted
    found = logs.gather(1, order[place][:, None])[:, 0].clamp_min(UNSPOKEN)
    return torch.where(spoken, found, torch.full_like(found, UNSPOKEN))


def mean_and_error(values: Tensor, block: int = 4) -> tuple[float, float]:
    """Return the mean of values [N] and its standard error, where each ``block`` of neighbours counts as one value."""
    if len(values) < 2 * block:
        block = 1
    means = values[: len(values) // block * block].view(-1, block).mean(1)
    error = float(means.std() / math.sqrt(len(means))) if len(means) > 1 else math.inf
    return float(values.mean()), error
