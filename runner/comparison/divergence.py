"""Explains where a generation and its replay part: it asks each of the artifact's methods at that position."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3.runner.artifact.near_ties import NEAR_TIE
from eagle3.runner.cache.cached_tokens import still_held
from eagle3.runner.chain.chain import ChainLength
from eagle3.runner.chain.lookup_choice import LookupChoice
from eagle3.runner.contract import DECODE, PREFILL, SPECULATE, TARGET_VERIFY, Metadata
from eagle3.runner.hosts.session import Session, Step
from eagle3.runner.rounds.choice import Choice
from eagle3.runner.rounds.loop import generate

MakeChoice = Callable[[], Choice]
"""A choice as it stood before the first token; a sampler with the same seed."""


@dataclass(frozen=True)
class Said:
    """The token that one probe of a position says."""

    method: str
    rows: int
    """The rows of the call."""
    row: int
    """The position's among them, from 0."""
    token: int
    margin: float | None
    """Difference of the two best logits; None without logits (``speculate`` gives none), as the next."""
    moved: float | None
    """The change of the two tokens' logits against each other since the replay, in standard deviations of
    its logits."""
    speculated: bool = False
    """The generation's own verify window, run again: over caches that speculation wrote."""


@dataclass(frozen=True)
class Divergence:
    """The first token that differs. All that is not ``speculated`` was computed over the caches of the replay."""

    index: int
    """The index among the generated tokens, from 0."""
    position: int
    """The position in the context, from 0."""
    token: int
    """The token of the generation that was checked."""
    replayed: int
    margin: float | None
    """Difference of the replay's two best logits; None without logits, as the next four."""
    relative_margin: float | None
    """Like the next two, in standard deviations of the replay's logits."""
    moved: float | None
    """The least that the two tokens' logits moved against each other where ``token`` is said; where no method says it,
    what they would have to."""
    threshold: float | None
    """The distance by which rounding may move them."""
    near_tie: bool | None
    """True if rounding explains it; False for a defect."""
    reproduced: bool
    """True if speculation, run again over empty caches, says its token again."""
    said: tuple[Said, ...]


class Probe(NamedTuple):
    """A call that computes a position: its ``row`` (from 0) of a call of ``method`` with ``rows`` rows."""

    method: str
    rows: int
    row: int

    def span(self, position: int) -> tuple[int, int]:
        """Return the call's first position, and the one behind its last."""
        return position - self.row, position - self.row + self.rows


def probes(metadata: Metadata, has_decode: bool, position: int) -> list[Probe]:
    """Return every call that computes ``position`` over caches that hold what is before it.

    None reads what an earlier one wrote in front of its own first row: first come those that begin at the position,
    then verify windows that begin ever earlier, last the longest chunk of prefill. Recurrent layers have committed what
    is before the position: only calls that begin there are left.
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
    """A choice whose last step of the target is kept."""

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
    """The position at which a generation and its replay differ. The session's caches hold what is before."""

    session: Session
    prompt: Sequence[int]
    token_ids: Sequence[int]
    """The generation's tokens, up to the one that differs."""
    replayed: int
    step: Step
    """[1, 1], of which ``replayed`` was chosen."""
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
        """The activations' dtype. Without a draft no method returns any, but CUDA's are bfloat16."""
        if self.step.feature is not None:
            return self.step.feature.dtype
        return torch.bfloat16 if self.session.metadata.manifest.get("backend") == "cuda" else torch.float32

    @property
    def _logits(self) -> Tensor | None:
        """[V] of the replay."""
        return None if self.step.logits is None else self.step.logits[0, 0]

    def _gap(self, logits: Tensor, replay: Tensor) -> float:
        """Return how far the replay's token is ahead, in standard deviations of the replay's logits."""
        return float((logits[self.replayed] - logits[self.token_ids[-1]]) / replay.std())

    def _smallest_move(self, said: list[Said], replay: Tensor) -> float:
        moves = [each.moved for each in said if each.token == self.token_ids[-1] and each.moved is not None]
        return min(moves, default=abs(self._gap(replay, replay)))

    def _probed(self) -> Iterator[Said]:
        session, tokens = self.session, [*self.prompt, *self.token_ids[:-1]]
        last = len(tokens) - 1
        for probe in probes(session.metadata, session.has_decode, last):
            start, end = probe.span(last)
            fed = (tokens + tokens[-1:] * probe.rows)[start:end]  # what stands behind the position is of no account
            step = getattr(session, probe.method)(torch.tensor([fed]), session.positions[start:end])
            yield self._read(step, probe, -1 if probe.method == PREFILL else probe.row)

    def _speculated(self, chain: int | ChainLength | None, lookup: LookupChoice | None) -> Said | None:
        """Return the generation again, to the end of this round; None where it does not say the same."""
        watched, wanted, done = Watched(self.make_choice()), list(self.token_ids), 0
        steps = generate(self.session, self.prompt, len(wanted), chain, stop_ids=(), choice=watched, lookup=lookup)
        with closing(steps):
            for fresh in steps:
                if fresh != wanted[done : done + len(fresh)]:
                    return None
                row, done = len(wanted) - 1 - done, done + len(fresh)
        step = watched.step
        assert step is not None  # there was a token
        rows = step.ids.shape[1]
        one = Probe(DECODE, 1, 0) if self.session.has_decode else Probe(TARGET_VERIFY, 2, 0)
        if step.ids.shape[0] == 2:  # of a fused round, with the next verify window
            return self._read(step._replace(ids=step.ids[:1]), Probe(SPECULATE, rows, row), row, speculated=True)
        probe = Probe(TARGET_VERIFY, rows, row) if rows > 1 else one
        return self._read(step, probe, row, speculated=True)

    def _read(self, step: Step, probe: Probe, output: int, speculated: bool = False) -> Said:
        """Return what a step says at a position. ``output``: the position's row of ``step``."""
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
    """Return how far two of the logits [V] may be moved, in standard deviations: by two steps of the activations'
    ``dtype`` at the size of the largest logit, or by ``tie`` if that is more: rounding in float32 adds up to it."""
    return max(tie, 2 * torch.finfo(dtype).eps * float(logits.abs().max() / logits.std()))
