"""The calls of a runner on one recurrent layer, whose rows the kernels compute: of the gated delta rule, of Kimi's or
of Mamba 2. The rules' definitions in float64 give the right outputs."""

import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3.export.lowering.cuda.kernels import recurrent as kernels
from eagle3.targets.spec import ROLLBACK_ROWS

CLOSE = 5e-6
"""The largest difference from float64, in standard deviations of the outputs."""
KEY_HEADS, HEADS, D_K = 2, 4, 24  # no power of 2

Rows = list[Tensor | None]
"""Query, key, value, decay and, of the delta rules, beta."""


class Rule(NamedTuple):
    """The rule of a layer, and the columns of its states."""

    delta: bool
    d_v: int = 24  # more columns than a program has
    channels: bool = False
    """True if each key channel has a log decay of its own."""
    strongest: float = 1.0
    """The largest decay of a row. Beyond 1 most decays are far smaller, and beta is 1."""

    @property
    def width(self) -> int:
        """Numbers of a row of the ring."""
        return KEY_HEADS * D_K + HEADS * self.d_v + HEADS * (D_K if self.channels else 1)

    def rows(self, count: int, seed: int) -> Rows:
        """Return random rows. Every fifth key equals the one before it; with strong decays every second one too."""
        generator = torch.Generator().manual_seed(seed)

        def normal(heads: int, width: int) -> Tensor:
            return torch.randn(heads, count, width, generator=generator)

        query, key = (torch.nn.functional.normalize(normal(KEY_HEADS, D_K), dim=-1) for _ in range(2))
        key[:, 4::5] = key[:, 3::5][:, : key[:, 4::5].shape[1]]
        decay, beta = (torch.rand(HEADS, count, generator=generator) for _ in range(2))
        if self.channels:
            decay = torch.rand(HEADS, count, D_K, generator=generator)
        if self.strongest > 1:
            decay, beta = self.strongest * decay**8, torch.ones_like(beta)
            key[:, 1::2] = key[:, ::2][:, : key[:, 1::2].shape[1]]
        return [query, key, normal(HEADS, self.d_v), -decay, beta if self.delta else None]

    def expected(self, rows: Rows) -> Tensor:
        """Compute all rows from an empty state, one after the other, in float64, by the rule's definition."""
        query, key, value, decay, beta = (each if each is None else each.double() for each in rows)
        query, key = (each.repeat_interleave(HEADS // KEY_HEADS, 0) for each in (query, key))
        state, outs = torch.zeros(HEADS, D_K, self.d_v).double(), []
        for t in range(key.shape[1]):
            state = state * decay[:, t].reshape(HEADS, -1, 1).exp()
            update = value[:, t]
            if beta is not None:
                update = beta[:, t, None] * (update - torch.einsum("hkv,hk->hv", state, key[:, t]))
            state = state + torch.einsum("hk,hv->hkv", key[:, t], update)
            outs.append(torch.einsum("hkv,hk->hv", state, query[:, t]))
        return torch.stack(outs, 1)


class Layer:
    """The memory of a layer, which is NaN where nothing was written."""

    def __init__(self, rule: Rule):
        size = HEADS, D_K, rule.d_v
        self.state, self.saved = torch.full(size, torch.nan), torch.full(size, torch.nan)
        self.changes = torch.full((1, kernels.SLOTS, 1, rule.width), torch.nan)
        self.committed, self.position_saved = 0, 0

    def __call__(self, rows: Rows, first: int) -> Tensor:
        """Run rows as the runner's ``RecurrentPositions`` does: [value heads, T, d_v]."""
        count, out = rows[1].shape[1], torch.full_like(rows[2], torch.nan)
        chunk = count > ROLLBACK_ROWS
        from_saved = chunk and 0 < first == self.position_saved < self.committed
        committed = self.position_saved if from_saved else self.committed
        at = torch.tensor([first]), torch.tensor([committed])
        if chunk:
            given = *rows, self.state, self.saved, self.changes, *at, torch.tensor([from_saved]), out
            kernels.launch_chunk((kernels._recurrent_chunk_kernel, kernels._recurrent_rows_kernel), *given)
            self.committed = self.position_saved = first + count - ROLLBACK_ROWS
        else:
            kernels.launch_rows(kernels._recurrent_rows_kernel, *rows, self.state, self.changes, *at, out)
            self.committed = first
        return out


def part(rows: Rows, start: int, end: int) -> Rows:
    return [each if each is None else each[:, start:end].contiguous() for each in rows]


def behind(rows: Rows, others: Rows) -> Rows:
    """Return ``rows`` followed by ``others``."""
    return [a if a is None else torch.cat((a, b), 1) for a, b in zip(rows, others, strict=True)]


def gap(found: Tensor, right: Tensor) -> float:
    """Return the largest difference, in standard deviations of the right outputs."""
    return float(((found - right).abs().amax() / right.std()).nan_to_num(nan=torch.inf))


class Text:
    """Rows with their right outputs, for the calls of one layer."""

    def __init__(self, rule: Rule, rows: Rows):
        self.rule, self.rows, self.right = rule, rows, rule.expected(rows)

    def gap(self, layer: Layer, start: int, end: int, wrong: int = 0) -> float:
        """Run the rows from ``start`` to ``end``, and ``wrong`` others that will be rejected. Return the ``gap``."""
        out = layer(behind(part(self.rows, start, end), self.rule.rows(wrong, start)), start)
        return gap(out[:, : end - start], self.right[:, start:end])

    def changed(self, start: int, count: int, seed: int) -> "Text":
        """Return the text whose rows from ``start`` on are ``count`` others."""
        return Text(self.rule, behind(part(self.rows, 0, start), self.rule.rows(count, seed)))


def walk(rule: Rule, seed: int = 0) -> Iterator[float]:
    """Make the calls of a runner: a prompt in two chunks, windows that are accepted in part, a chunk, single rows,
    another prompt that continues from the saved state, and another conversation. Yield the gap of each call."""
    layer, dice = Layer(rule), random.Random(seed)
    text = Text(rule, rule.rows(130, seed))
    yield text.gap(layer, 0, 18)
    yield text.gap(layer, 18, 53)  # a block of rows and a part of one, and the rows that can be rejected
    at = 53
    for _ in range(4):
        good = dice.randrange(1, 9)
        yield text.gap(layer, at, at + good, dice.randrange(0, ROLLBACK_ROWS - good + 1))
        at += dice.randrange(0, good + 1)
    yield text.gap(layer, at, at + 25)
    saved = at + 25 - ROLLBACK_ROWS
    yield text.gap(layer, at + 25, at + 26, 3)
    yield text.gap(layer, at + 26, at + 27)
    other = text.changed(saved, 30, seed + 1)
    yield other.gap(layer, saved, saved + 19)
    yield other.gap(layer, saved + 19, saved + 21)
    text = Text(rule, rule.rows(20, seed + 2))
    yield text.gap(layer, 0, 3, 2)
    yield text.gap(layer, 3, 5)


def windows(rule: Rule) -> Iterator[float]:
    """Make three calls of rows that can be rejected, the second over the ring's half. Yield the gap of each."""
    layer, text = Layer(rule), Text(rule, rule.rows(21, 3))
    yield text.gap(layer, 0, 12, 2)
    yield text.gap(layer, 12, 20)
    yield text.gap(layer, 20, 21)


def chunks(rule: Rule) -> Iterator[float]:
    """Commit rows in a chunk of more than a block, run a row, and continue from the saved state. Yield the gap of
    each call."""
    layer, text = Layer(rule), Text(rule, rule.rows(38, 4))
    yield text.gap(layer, 0, 3, 1)
    yield text.gap(layer, 3, 37)
    yield text.gap(layer, 37, 38)
    saved = 37 - ROLLBACK_ROWS
    yield text.changed(saved, 17, 5).gap(layer, saved, saved + 17)
