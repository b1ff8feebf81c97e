"""Runs a head over the texts by one reading, and counts how many of its proposals the target accepts.

A chain or a block begins after every token. The head's own code computes all of them at once, on attention of its own
that shows each row what it would see if its chain were the only one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from eagle3.export.checks.fit.target import BLOCK_ROWS, DTYPE, Measured, Seen, restore
from eagle3.export.draft.common.field import HeadReading
from eagle3.export.draft.common.head import Head, Pieces
from eagle3.export.draft.kinds.eagle.description import EagleDescription
from eagle3.export.draft.loading import NoFiles, load_draft
from eagle3.targets.attention import AttentionFactory, Block, EagerAttention, KVCacheShape

UNSPOKEN = -20.0
"""The least log-likelihood of a token, in nats; that of tokens that the head's vocabulary lacks."""


class Chains(EagerAttention):
    """The attention of chains that begin after many rows of a text, all at once. The rows of step 0 are those of the
    text; each row of a later step attends to the text up to its chain's anchor, and to the rows of its own chain."""

    def __init__(self, shape: KVCacheShape, pieces: Pieces):
        nn.Module.__init__(self)
        self.window, self.pieces = shape.window, pieces
        self.anchors: list[Tensor] = []
        self.kept: tuple[Tensor, ...] = ()

    def rows(self, input_pos: Tensor, block: Block | None = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        step, anchors = self.pieces.step, self.pieces.anchors
        if step == 0 or anchors is None:
            anchors = torch.arange(len(input_pos))
        self.anchors = [*self.anchors[:step], anchors]
        distance = anchors[:, None] - self.anchors[0]
        visible = (distance >= 0) & (distance + step < (self.window or math.inf))
        return input_pos, torch.cat([visible, *(anchors[:, None] == each for each in self.anchors[1:])], 1)[None, None]

    def written(self, input_pos: Tensor, key: Any, value: Any) -> tuple[Tensor, ...]:  # noqa: ANN401, ARG002
        before = self.kept if self.pieces.step else (key[:, :0], value[:, :0])
        self.kept = tuple(torch.cat(each, 1) for each in zip(before, (key, value), strict=True))
        return tuple(each.transpose(1, 2) for each in self.kept)


class Blocks(EagerAttention):
    """The attention of blocks that begin after many tokens of a text, all at once. The ``rows`` of a forward are the
    positions of the blocks int64 [A, B] and a ``Block``, which says what they attend to."""

    def __init__(self, _shape: KVCacheShape):
        nn.Module.__init__(self)
        self.context: tuple[Tensor, ...] = ()

    def write(self, key: Tensor, value: Tensor, rows: object) -> None:  # noqa: ARG002
        """Keep ``key`` and ``value`` [1, T, kv_heads, head_dim] of the context, at positions 0, 1, 2, ..."""
        self.context = key, value

    def written(self, input_pos: Tensor, key: Any, value: Any) -> tuple[Tensor, ...]:  # noqa: ANN401, ARG002
        both = zip(self.context, (key, value), strict=True)
        return tuple(torch.cat((text.expand(len(own), -1, -1, -1), own), 1).transpose(1, 2) for text, own in both)

    def forward(self, query: Tensor, key: Any, value: Any, rows: Any, *given: Any, **named: Any) -> Tensor:  # noqa: ANN401
        """Map query [A, B, heads, head_dim], key and value [A, B, kv_heads, head_dim] to [A, B, heads, head_dim]."""
        positions, block = rows
        first, last = (torch.stack(each)[..., None] for each in zip(*map(block.bounds, positions), strict=True))
        text = torch.arange(self.context[0].shape[1]).expand(len(positions), -1)
        text = text.masked_fill(text >= positions[:, :1], -1)  # the block stands there
        at = torch.cat((text, positions), 1)[:, None]
        visible = (at >= first) & (at <= last)
        return super().forward(query, key, value, (positions, visible[:, None]), *given, **named)


class HeldTensors(NoFiles):
    """A head's tensors in memory, which all readings share."""

    def __init__(self, reading: HeadReading):
        source, names = reading.draft.source, set(reading.draft.tensor_names)
        super().__init__(source.path)
        read = ((name, value) for name, value in source.tensors() if name in names)
        self.held = [(name, value.to(DTYPE) if value.is_floating_point() else value) for name, value in read]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.held)


@dataclass(frozen=True)
class Trial:
    """The outcome of N chains, each of K proposals after a token of the texts.

    ``hits``, bool [N, K], is True if the proposal and all before it equal the target's tokens, as far as those are
    ``known``, bool [N, K]: as long as the text continues with the target's own tokens. ``likelihood``, float [N], is
    the logarithm of the probability that the head gives to the target's next token. ``lengths`` are the numbers of
    chains of each text.
    """

    hits: Tensor
    known: Tensor
    likelihood: Tensor
    lengths: tuple[int, ...] = ()

    @property
    def accepted(self) -> Tensor:
        """float [N], the number of accepted proposals of each chain."""
        return self.hits.sum(1).float()

    @property
    def first(self) -> Tensor:
        """float [N], 1 if the first proposal is accepted."""
        return self.hits[:, 0].float()

    def rounds(self) -> Tensor:
        """Return bool [N], True for the chains of the rounds in which the texts would be decoded. Rounds that the end
        of a text cuts short are left out."""
        starts, at, end = torch.zeros(len(self.hits), dtype=torch.bool), 0, 0
        accepted, whole = self.hits.sum(1).tolist(), self.known[:, -1].tolist()
        for length in self.lengths:
            at, end = end, end + length
            while at < end:
                starts[at] = whole[at]
                at += 1 + accepted[at] * whole[at]
        return starts


class Trials:
    """Runs the readings of one head over the texts of its target."""

    def __init__(self, reading: HeadReading, over: Measured):
        self.over, self.pieces, self.source = over, Pieces(), HeldTensors(reading)
        rows = over.chains * reading.draft.block_rows
        self.every = 1 if over.written else math.ceil(rows / BLOCK_ROWS) or 1

    def text(self) -> str:
        """Return a description of the text and of its tokens after which a chain begins."""
        return self.over.text() + (f", a block behind each {self.every}th" if self.every > 1 else "")

    @torch.no_grad()
    def head(self, reading: HeadReading, length: int) -> Head:
        """Load the head with a reading, for chains of a length. Raises what loading raises."""
        draft = replace(reading.draft.in_program(shares_caches=True), source=self.source)
        proposals = 1 if isinstance(draft, EagleDescription) else draft.proposals(length)
        slots = max(len(each.tokens) for each in self.over.seen) + length + draft.block_rows + 1
        attention: AttentionFactory = Blocks if draft.block_rows else lambda shape: Chains(shape, self.pieces)
        head = load_draft(draft, slots, DTYPE, attention, self.over.target, proposals)
        head.checks_positions = False
        return head

    @torch.no_grad()
    def run(self, reading: HeadReading, length: int) -> Trial:
        """Run a reading with chains of ``length`` proposals. Those that the head cannot make count as missed."""
        steps = min(length, reading.draft.longest_chain or length)
        head, found = self.head(reading, steps), []
        wanted = [wanted_tokens(seen, length)[:: self.every] for seen in self.over.seen]
        for seen, tokens in zip(self.over.seen, wanted, strict=True):
            restore(self.over.target, seen)
            rows = torch.arange(len(seen.tokens) - 1)
            states = tuple(seen.states[tap] for tap in reading.taps) or (seen.final,)
            feature = head.fuse(tuple(state[:, : len(rows)] for state in states)).to(DTYPE)
            given = seen.tokens[None, 1:], feature, rows, rows[seen.begin - 1 :: self.every]
            hits, logits = head.chains(*given, tokens[:, :steps], self.pieces)
            found.append((hits, _likelihood(logits, tokens[:, 0], head.ids_in_target())))
        hits, likelihood = (torch.cat(each) for each in zip(*found, strict=True))
        missed = hits.new_zeros(len(hits), length - steps)
        return Trial(torch.cat((hits, missed), 1), torch.cat(wanted) >= 0, likelihood, tuple(map(len, wanted)))


def wanted_tokens(seen: Seen, length: int) -> Tensor:
    """Return int64 [N, length], the target's tokens after each token of a text. A token is -1 if it is unknown, since
    the text before it differs from what the target chose."""
    greedy = torch.cat((seen.greedy[seen.begin :], torch.full((length - 1,), -1)))
    text = torch.cat((seen.tokens[seen.begin + 1 :], torch.full((length,), -2)))
    known = (text == greedy).unfold(0, length, 1)[:, :-1].cumprod(1)
    wanted = greedy.unfold(0, length, 1).clone()
    wanted[:, 1:].masked_fill_(known == 0, -1)
    return wanted


def _likelihood(logits: Tensor, wanted: Tensor, ids_in_target: Tensor | None) -> Tensor:
    """Return the log-likelihoods [N] of the target's tokens by the head's logits [N, draft_vocab_size]."""
    place = wanted
    if ids_in_target is not None:
        places = wanted.new_full((int(max(ids_in_target.max(), wanted.max())) + 1,), -1)
        places[ids_in_target] = torch.arange(len(ids_in_target))
        place = places[wanted]
    whole = torch.cat([part.float().logsumexp(-1) for part in logits.split(64)])
    said = logits.gather(1, place.clamp_min(0)[:, None])[:, 0].float() - whole
    return said.masked_fill(place < 0, UNSPOKEN).clamp_min(UNSPOKEN)
