"""Explains the first difference between a generation and its replay: every method computes that position again."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3.runner.artifact.near_ties import NEAR_TIE
from eagle3.runner.contract import DECODE, PREFILL, SPECULATE, TARGET_VERIFY, Metadata
from eagle3.runner.hosts.session import Session, Step
from eagle3.runner.loop.adaptive_chain import ChainLength
from eagle3.runner.loop.cached_tokens import still_held
from eagle3.runner.loop.choice import Choice
from eagle3.runner.loop.generation import generate
from eagle3.runner.loop.lookup_choice import LookupChoice

MakeChoice = Callable[[], Choice]
"""A function that returns a new choice in its state before the first token, such as a sampler with the same seed."""


@dataclass(frozen=True)
class Said:
    """The token that one probe gives for the position."""

    method: str
    rows: int
    """The rows of the call."""
    row: int
    """The index of the position among these rows, from 0."""
    token: int
    margin: float | None
    """The difference of the two best logits. Without logits (``speculate`` returns none) this and ``moved`` are
    None."""
    moved: float | None
    """The change of the two tokens' logits against each other since the replay, in standard deviations of the replay's
    logits."""
    speculated: bool = False
    """True if this is the generation's own verify window, run again over caches that speculation wrote."""


@dataclass(frozen=True)
class Divergence:
    """The first token that differs. Tokens that are not ``speculated`` were computed over the caches of the replay."""

    index: int
    """The index among the generated tokens, from 0."""
    position: int
    """The position in the context, from 0."""
    token: int
    """The token of the generation that was checked."""
    replayed: int
    margin: float | None
    """The difference of the replay's two best logits. Without logits, this and the next four fields are None."""
    relative_margin: float | None
    """``margin`` in standard deviations of the replay's logits, the unit of the next two fields."""
    moved: float | None
    """The least change of the two tokens' logits against each other among the probes that give ``token``; if no probe
    gives it, the change that would be needed."""
    threshold: float | None
    """The largest change that rounding may cause."""
    near_tie: bool | None
    """True if rounding explains it; False for a defect."""
    reproduced: bool
    """True if speculation, run again over empty caches, gives the same token again."""
    said: tuple[Said, ...]


class Probe(NamedTuple):
    """A call that computes a position: its ``row`` (from 0) of a call of ``method`` with ``rows`` rows."""

    method: str
    rows: int
    row: int

    def span(self, position: int) -> tuple[int, int]:
        """Return the call's first position, and the one after its last."""
        return position - self.row, position - self.row + self.rows


def probes(metadata: Metadata, has_decode: bool, position: int) -> list[Probe]:
    """Return every call that computes ``position`` over caches that hold all positions before it.

    The calls are in an order in which no call reads cache slots that an earlier call overwrote: calls that begin at the
    position come first, then verify windows that begin earlier and earlier, and the longest chunk of prefill comes
    last. Recurrent layers have already committed the positions before ``position``, so a target with such layers gets
    only the calls that begin at it.
    """
    most, longest = metadata.window, min(metadata.max_prefill, position + 1)
    found = [Probe(DECODE, 1, 0)] if has_decode else []
    found += [Probe(TARGET_VERIFY, rows, row) for row in range(most) for rows in range(max(2, row + 1), most + 1)]
    found = [probe for probe in found if probe.row <= position and probe.span(position)[1] <= metadata.max_seq_len]
    if metadata.rollback_rows is not None:
        return [probe for probe in found if not probe.row]
    highest = max(probe.span(position)[1] for probe in found) - 1

    def held(probe: Probe) -> bool:
        return still_held(probe.span(position)[0], metadata.sliding_window, highest)

    chunks = [Probe(PREFILL, rows, rows - 1) for rows in range(metadata.min_prefill, longest + 1)]
    return [*filter(held, found), *list(filter(held, chunks))[-1:]]


class Watched:
    """A choice that keeps the last step of the target."""

    def __init__(self, choice: Choice):
        self._choice, self.greedy = choice, choice.greedy
        self.step: Step | None = None

    def target(self, step: Step, proposed: list[int]) -> Tensor:
        self.step = step
        return self._choice.target(step, proposed)

    def draft(self, step: Step, proposed: Sequence[Tensor]) -> Tensor:
        return self._choice.draft(step, proposed)

    def forced(self, proposed: Sequence[Tensor], count: int) -> list[int]:
        return self._choice.forced(proposed, count)

    def accept(self, tokens: list[int]) -> None:
        self._choice.accept(tokens)


@dataclass(frozen=True)
class Place:
    """The position at which a generation and its replay differ. The session's caches hold the positions before it."""

    session: Session
    prompt: Sequence[int]
    token_ids: Sequence[int]
    """The generation's tokens, up to the one that differs."""
    replayed: int
    step: Step
    """The replay's step, ids [1, 1], from which ``replayed`` was chosen."""
    make_choice: MakeChoice
    near_tie: float
    """The tolerance in standard deviations of the logits (``artifact/near_ties.py``)."""

    def divergence(self, chain: int | ChainLength | None, lookup: LookupChoice | None = None) -> Divergence:
        said = list(self._probed())
        speculated = self._speculated(chain, lookup)
        if speculated is not None:
            said.append(speculated)
        margin = relative = moved = threshold = None
        is_tie: bool | None = None
        if (logits := self._logits) is not None:
            margin, moved = _margin(logits), self._smallest_move(said, logits)
            relative = margin / float(logits.std())
            threshold = rounding(logits, self._dtype, self.near_tie)
            is_tie = moved <= threshold
        index = len(self.token_ids) - 1
        return Divergence(
            index=index,
            position=len(self.prompt) + index,
            token=self.token_ids[-1],
            replayed=self.replayed,
            margin=margin,
            relative_margin=relative,
            moved=moved,
            threshold=threshold,
            near_tie=is_tie,
            reproduced=speculated is not None,
            said=tuple(said),
        )

    @property
    def _dtype(self) -> torch.dtype:
        """The activations' dtype: that of the feature, or without a draft head bfloat16 for CUDA and float32
        otherwise."""
        if self.step.feature is not None:
            return self.step.feature.dtype
        return torch.bfloat16 if self.session.metadata.manifest.get("backend") == "cuda" else torch.float32

    @property
    def _logits(self) -> Tensor | None:
        """The replay's logits [V], or None."""
        return None if self.step.logits is None else self.step.logits[0, 0]

    def _gap(self, logits: Tensor, replay: Tensor) -> float:
        """Return the logit of the replay's token minus that of the generation's, in standard deviations of the replay's
        logits."""
        return float((logits[self.replayed] - logits[self.token_ids[-1]]) / replay.std())

    def _smallest_move(self, said: list[Said], replay: Tensor) -> float:
        moves = [each.moved for each in said if each.token == self.token_ids[-1] and each.moved is not None]
        return min(moves, default=abs(self._gap(replay, replay)))

    def _probed(self) -> Iterator[Said]:
        session, tokens = self.session, [*self.prompt, *self.token_ids[:-1]]
        last = len(tokens) - 1
        for probe in probes(session.metadata, session.has_decode, last):
            start, end = probe.span(last)
            fed = (tokens + tokens[-1:] * probe.rows)[start:end]  # tokens after the position do not matter
            step = getattr(session, probe.method)(torch.tensor([fed]), session.positions[start:end])
            yield self._read(step, probe, -1 if probe.method == PREFILL else probe.row)

    def _speculated(self, chain: int | ChainLength | None, lookup: LookupChoice | None) -> Said | None:
        """Run the generation again up to the round with the difference. Return None if it gives other tokens."""
        watched, wanted, done = Watched(self.make_choice()), list(self.token_ids), 0
        steps = generate(self.session, self.prompt, len(wanted), chain, stop_ids=(), choice=watched, lookup=lookup)
        with closing(steps):
            for fresh in steps:
                if fresh != wanted[done : done + len(fresh)]:
                    return None
                row, done = len(wanted) - 1 - done, done + len(fresh)
        step = watched.step
        assert step is not None  # at least one token was generated
        rows = step.ids.shape[1]
        one = Probe(DECODE, 1, 0) if self.session.has_decode else Probe(TARGET_VERIFY, 2, 0)
        if step.ids.shape[0] == 2:  # a fused round: the second row is the next verify window
            return self._read(step._replace(ids=step.ids[:1]), Probe(SPECULATE, rows, row), row, speculated=True)
        probe = Probe(TARGET_VERIFY, rows, row) if rows > 1 else one
        return self._read(step, probe, row, speculated=True)

    def _read(self, step: Step, probe: Probe, output: int, speculated: bool = False) -> Said:
        """Return the token of a step at a position. ``output`` is the position's row in ``step``."""
        logits = None if step.logits is None else step.logits[:, [output]]
        choice = self.make_choice()
        choice.accept(list(self.token_ids[:-1]))
        token = int(choice.target(Step(step.ids[:, [output]], None, logits), []))
        margin = moved = None
        if logits is not None and (replay := self._logits) is not None:
            margin, moved = _margin(logits[0, 0]), abs(self._gap(logits[0, 0], replay) - self._gap(replay, replay))
        return Said(*probe, token, margin, moved, speculated)


def _margin(logits: Tensor) -> float:
    best, second = logits.topk(2).values.tolist()
    return best - second


def rounding(logits: Tensor, dtype: torch.dtype, tie: float = NEAR_TIE) -> float:
    """Return how far rounding may move two of the logits [V] against each other, in standard deviations. This is two
    steps of the activations' ``dtype`` at the size of the largest logit, or ``tie``, the effect of float32 rounding, if
    that is more."""
    return max(tie, 2 * torch.finfo(dtype).eps * float(logits.abs().max() / logits.std()))
