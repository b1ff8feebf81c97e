"""Measures how a draft head is to be read and what it is worth, before anything is lowered.

    text ─ the target over it: states of all layers, greedy tokens ─ the head by each reading ─ verdict

A head's files do not state some of its fields, and sometimes contradict what the trainer did. A wrong reading loads and
runs, but fewer proposals are accepted. So the readings are compared by how many of their proposals the target would
accept.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from eagle3.export.checkpoints.json_fields import read_object
from eagle3.export.configuration.backends import BACKENDS
from eagle3.export.draft.common.field import Field, HeadReading, said_in
from eagle3.export.draft.kinds import KINDS
from eagle3.export.fit import texts
from eagle3.export.fit.attention import WholeText
from eagle3.export.fit.cost import cost, not_measured, recipes_of
from eagle3.export.fit.gain import Rounds
from eagle3.export.fit.quantized import Quantized, share_of_quantization
from eagle3.export.fit.search import Search, Tried
from eagle3.export.fit.seen import Computed, Seen, look
from eagle3.export.fit.streamed import Load, in_memory, streamed
from eagle3.export.fit.trials import Trials
from eagle3.export.fit.verdict import ANOTHER, FITS, NO_PAIR, Expected, chance, expected
from eagle3.export.planning.plan import LARGE, Plan
from eagle3.export.planning.taps import Taps
from eagle3.runner.contract import DRAFT_STEP, TARGET_VERIFY, TWO_ROWS
from eagle3.runner.system.command import one_line
from eagle3.targets import TapTarget

COMPARED = 3
"""The longest chains on which readings are compared. The files' reading and the best one are also run with the head's
own chain length."""


@dataclass(frozen=True)
class Fit:
    """The result of the measurement of one head."""

    verdict: str
    file: Tried
    best: Tried
    tried: tuple[Tried, ...]
    expected: dict[int, Expected]
    """The expected rounds of each reading, by its index in ``tried``."""
    fields: Sequence[Field]
    open: frozenset[str]
    """The fields that the head's files do not state."""
    facts: dict[str, Any]

    def of(self, tried: Tried) -> Expected:
        return self.expected[self.tried.index(tried)]

    @property
    def left_open(self) -> bool:
        """True if the best reading changes only fields that the files do not state."""
        return set(self.best.changes) <= self.open

    def typed(self, tried: Tried) -> str:
        """Return the flags that select a reading."""
        by_name = {field.name: field for field in self.fields}
        return " ".join(by_name[name].typed(value) for name, value in tried.changes.items())

    def as_json(self) -> dict[str, Any]:
        """Return the entry of ``export.json``, which ``eagle3-fit --json`` prints."""
        ordered = sorted(self.tried, key=lambda each: -self.of(each).length)
        return {
            "verdict": self.verdict,
            "file": self._entry(self.file),
            "best": self._entry(self.best),
            "readings": [self._entry(each) for each in ordered],
            "left_open": sorted(self.open),
            **self.facts,
        }

    def _entry(self, tried: Tried) -> dict[str, Any]:
        changes = {name: list(value) if isinstance(value, tuple) else value for name, value in tried.changes.items()}
        first = float(tried.trial.first.mean())
        tokens = len(tried.trial.hits)
        return {"changes": changes, **self.of(tried).as_json(), "first_accepted": round(first, 4), "tokens": tokens}


class Measured:
    """The target's states over a text, with which any number of heads is measured."""

    def __init__(self, plan: Plan, text: Path | None = None, seed: int = 0, stream: bool | None = None):
        """Compute the target; with ``stream`` a layer at a time, by default where it does not fit into memory."""
        self.plan, self.seed = plan, seed
        self.streamed = cost(plan).streamed if stream is None else stream
        self.dtype = torch.float32
        small = sum(header.bytes for header in plan.target_headers.values()) < LARGE
        self.writes = small and not self.streamed  # a token that is written takes a pass over the checkpoint
        length = texts.PROMPT if self.writes else texts.GIVEN
        count = texts.STREAMED if self.streamed else texts.SEGMENTS
        more = count if self.writes and (text is None or text.suffix != ".jsonl") else 0
        given = texts.pieces(plan.checkpoint, plan.target_config.vocab_size, length, count + more, seed, text)
        self.more = [piece for piece in given[count:] if piece not in given[:count]] if more else []
        given = given[:count] if more else given
        given = [texts.joined(given)] if self.streamed else given
        length = max(len(piece.ids) for piece in given) + (texts.WRITTEN if self.writes else 0) + 1
        most = plan.target_config.max_position_embeddings
        if length > most:
            raise ValueError(f"the target knows {most} positions, too few for a text of {length} tokens")
        start = time.monotonic()
        self.load: Load = streamed if self.streamed else in_memory
        target = self.load(plan, length, self.dtype, WholeText)
        self.over = Computed(target, self._seen(target, given), self.writes)
        self.seconds = time.monotonic() - start

    def _seen(self, target: TapTarget, given: Sequence[texts.Piece]) -> list[Seen]:
        """Return the target's states of pieces of text, which a small target continues."""
        layers, count = self.plan.target_config.num_hidden_layers, texts.WRITTEN if self.writes else 0
        with few_threads(self.writes):
            return [look(target, layers, piece, count, self.plan.eos_ids) for piece in given]

    @cached_property
    def longer(self) -> Computed:
        """The target's states over the text and as many pieces again, for readings that the text does not decide
        between."""
        return replace(self.over, seen=[*self.over.seen, *self._seen(self.over.target, self.more)])

    def fit(self, plan: Plan) -> Fit:
        """Measure the head of ``plan``, which must have the same target."""
        start = time.monotonic()
        fields = KINDS[plan.draft.kind].load().FIELDS
        file = HeadReading(plan.draft, plan.taps, plan.target_config)
        with few_threads(self.writes):
            compared = min(plan.chain_len, COMPARED)
            trials = Trials(file, self.over, compared, self.dtype)
            wanted = torch.cat([each.greedy[each.begin :] for each in self.over.seen])
            longer = (lambda: Trials(file, self.longer, compared, self.dtype)) if self.more else None
            search = Search(trials, fields, chance(wanted), longer)
            verdict, best = search.run(file)
            trials = search.trials
            found = {place: expected(trials, each.trial) for place, each in enumerate(search.tried)}
            if plan.chain_len > compared:
                whole = trials.with_length(plan.chain_len)
                for each in dict.fromkeys((search.tried[0], best)):
                    found[search.tried.index(each)] = expected(whole, whole.run(each.reading))
        facts = {
            "text": trials.text(),
            "seed": self.seed,
            "chain_len": plan.chain_len,
            "readings_chain_len": min(plan.chain_len, COMPARED),
            "streamed": self.streamed,
            "chance": round(search.chance, 4),
            "target_seconds": round(self.seconds, 2),
            "seconds": round(self.seconds + time.monotonic() - start, 2),
        }
        fit = Fit(verdict, search.tried[0], best, tuple(search.tried), found, fields, open_fields(plan, fields), facts)
        length = best_chain_len(plan, fit.of(best).rates)
        facts["best_chain_len"] = length
        return fit

    def quantized(self, plan: Plan) -> Quantized | None:
        """Measure what the plan's recipes cost; see ``share_of_quantization``."""
        with few_threads(self.writes):
            return share_of_quantization(plan, self.over, self.load)

    def said_of_quantization(self, plan: Plan) -> tuple[str, dict[str, Any]] | None:
        """Return a line on what the plan's recipes cost, or why that was not measured, and the entry of
        ``export.json``; None if nothing is quantized."""
        if not recipes_of(plan):
            return None
        try:
            share = self.quantized(plan)
        # some recipes need a GPU, and nothing depends on this figure
        except Exception as error:  # noqa: BLE001
            return not_measured(plan, one_line(error))
        return (share.line(), share.as_json()) if share else None


@contextmanager
def few_threads(small: bool) -> Iterator[None]:
    """Compute small models on one thread: their products are not worth the wait for other threads on a busy machine."""
    threads = torch.get_num_threads()
    if small:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def open_fields(plan: Plan, fields: Sequence[Field]) -> frozenset[str]:
    """Return the fields that neither the head's files nor the flags give."""
    file = plan.draft.folder / "config.json"
    said = said_in(read_object(file)) if file.is_file() else set()
    found = {field.name for field in fields if not said & set(field.keys)}
    config = plan.config
    if config.aux_layers or plan.draft.aux_layers is not None:
        found -= {"aux_layers", "tap_order"}
    if config.aux_layers or config.aux_convention or plan.chosen_taps.doubt is None:
        found -= {"aux_convention"}
    found -= {"tap_order", "norm_before_residual"} if config.norm_before_residual is not None else {"tap_order"}
    return frozenset(found - {each.partition("=")[0] for each in config.read})


def best_chain_len(plan: Plan, rates: Sequence[float]) -> int:
    """Return the chain length that gives the most tokens in the time of a round, as estimated from the bytes that its
    steps read."""
    if not rates or rates[0] <= 0:
        return 1
    backend = BACKENDS[plan.config.backend]
    quantized = {"none": 1.0, "8da8w": 0.25, "8da4w": 0.14, "default": 0.28, "sensitive": 0.3, "checkpoint": 0.28}
    target = sum(header.elements for header in plan.target_headers.values()) * quantized.get(plan.qlinear, 1.0)
    head = {name: header for name, header in plan.draft.headers.items() if not name.startswith("embed_tokens")}
    draft = sum(header.elements for header in head.values()) * quantized.get(plan.draft_qlinear, 1.0)
    rounds = Rounds(rates, {TARGET_VERIFY: target, TWO_ROWS: target, DRAFT_STEP: draft}, plan.proposals)
    most = min(backend.fast_rows.get(plan.qlinear, backend.window_rows[0]) - 1, plan.draft.longest_chain or 15)
    return max(range(1, max(most, 1) + 1), key=rounds.gain)


def fit_lines(fit: Fit) -> list[str]:
    """Return the lines to print on a verdict."""
    best, text = fit.of(fit.best), fit.facts["text"]
    if fit.verdict == NO_PAIR:
        most = max(fit.tried, key=lambda each: float(each.trial.first.mean()))
        return [
            f"Warning: target and head are no pair, or the head was not trained: none of {len(fit.tried)} readings "
            f"is accepted as a trained head's is (the best in {float(most.trial.first.mean()):.1%} of the first "
            f"proposals, one fixed token in {fit.facts['chance']:.1%}; {text})"
        ]
    rates = ", ".join(
        f"{rate:.2f} ({low:.2f} to {high:.2f})" for rate, (low, high) in zip(best.rates, best.intervals, strict=True)
    )
    worth = (
        f"{best.text()} a round are expected, accepted by position {rates}; chain length {fit.facts['best_chain_len']} "
        f"pays most by the bytes that are read; {text}"
    )
    if fit.verdict == FITS:
        return [f"the head fits: {worth}"]
    own = fit.of(fit.file)
    return [
        f"the head is accepted more with {fit.typed(fit.best)} than as its files are read: {best.text()} a round in "
        f"place of {own.text()}",
        worth,
    ]


def fitted_plan(plan: Plan, fit: Fit) -> tuple[Plan, list[str]]:
    """Return the plan with the best reading of the head, and lines that say so.

    Raises ValueError if another reading than the files' is clearly better, and the files state its fields.
    """
    lines = fit_lines(fit)
    if fit.verdict != ANOTHER:
        return plan, lines
    if not fit.left_open:
        own, best = fit.of(fit.file), fit.of(fit.best)
        raise ValueError(
            f"{plan.draft.folder}: the head is read wrongly by what its files say: {own.text()} a round as they say, "
            f"{best.text()} with another reading ({fit.facts['text']}): type {fit.typed(fit.best)}, or "
            "--no-fit to export it as it is"
        )
    return read_plan(plan, fit.best.reading), [*lines, "the head's files do not state that: it is taken"]


def read_plan(plan: Plan, reading: HeadReading) -> Plan:
    """Return the plan with another reading of its head."""
    taps = plan.chosen_taps if reading.taps == plan.taps else Taps(reading.taps, "measured")
    return replace(plan, draft=reading.draft, chosen_taps=taps)
