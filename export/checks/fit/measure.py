"""Measures how a draft head is to be read and what it is worth, before anything is lowered.

    text ─ the target over it: states of all layers, greedy tokens ─ the head by each reading ─ verdict

A head's files do not state some of its fields, and sometimes contradict what the trainer did. A wrong reading loads and
runs, but fewer proposals are accepted. So the readings are compared by how many of their proposals the target would
accept.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from eagle3.export.checkpoints.json_fields import read_object
from eagle3.export.checks.fit.chains import Trials
from eagle3.export.checks.fit.readings import ANOTHER, FITS, NO_PAIR, Search, Tried
from eagle3.export.checks.fit.target import Measured, few_threads, why_not_measured
from eagle3.export.checks.gain import best_chain_len
from eagle3.export.draft.common.field import Field, HeadReading, said_in
from eagle3.export.draft.kinds import KINDS
from eagle3.export.output.progress import Progress
from eagle3.export.planning.plan import Plan
from eagle3.export.planning.taps import Taps
from eagle3.export.speculator.tensor_files import return_freed_memory
from eagle3.runner.system.command import one_line


@dataclass(frozen=True)
class Fit:
    """The result of the measurement of one head: the verdict, the files' reading, the best one and all of them."""

    verdict: str
    file: Tried
    best: Tried
    tried: Sequence[Tried]
    fields: Sequence[Field]
    open: frozenset[str]
    """The fields that the head's files do not state."""
    facts: dict[str, Any]

    @property
    def ordered(self) -> list[Tried]:
        """The readings, best first."""
        return sorted(self.tried, key=lambda each: (-each.expected.length, len(each.changes)))

    def typed(self, tried: Tried) -> str:
        """Return the flags that select a reading."""
        by_name = {field.name: field for field in self.fields}
        return " ".join(by_name[name].typed(value) for name, value in tried.changes.items())

    def as_json(self) -> dict[str, Any]:
        """Return the entry of ``export.json``, which ``eagle3-fit --json`` prints."""
        return {
            "verdict": self.verdict,
            "file": self.file.as_json(),
            "best": self.best.as_json(),
            "readings": [each.as_json() for each in self.ordered],
            "left_open": sorted(self.open),
            **self.facts,
        }

    def lines(self) -> list[str]:
        """Return the lines to print on the verdict."""
        best, text = self.best.expected, self.facts["text"]
        if self.verdict == NO_PAIR:
            most = max(float(each.trial.first.mean()) for each in self.tried)
            return [
                "Warning: target and head are no pair, or the head was not trained: none of "
                f"{len(self.tried)} readings is accepted as a trained head's is (the best in {most:.1%} of the first "
                f"proposals, one fixed token in {self.facts['chance']:.1%}; {text})"
            ]
        by_position = zip(best.rates, best.intervals, strict=True)
        rates = ", ".join(f"{rate:.2f} ({low:.2f} to {high:.2f})" for rate, (low, high) in by_position)
        worth = (
            f"{best.text()} a round are expected, accepted by position {rates}; chain length "
            f"{self.facts['best_chain_len']} pays most by the bytes that are read; {text}"
        )
        if self.verdict == FITS:
            return [f"the head fits: {worth}"]
        return [
            f"the head is accepted more with {self.typed(self.best)} than as its files are read: {best.text()} a round "
            f"in place of {self.file.expected.text()}",
            worth,
        ]


def measure_head(over: Measured, plan: Plan) -> Fit:
    """Measure the head of ``plan``, whose target was computed ``over`` texts."""
    start, fields = time.monotonic(), KINDS[plan.draft.kind].load().FIELDS
    file = HeadReading(plan.draft, plan.taps, plan.target_config)
    with few_threads(over.written):
        trials = Trials(file, over)
        search = Search(trials, fields, file, plan.chain_len)
        verdict, best = search.verdict()
    facts = {
        "text": trials.text(),
        "seed": over.seed,
        "chain_len": plan.chain_len,
        "streamed": over.streamed,
        "chance": round(search.chance, 4),
        "target_seconds": round(over.seconds, 2),
        "seconds": round(over.seconds + time.monotonic() - start, 2),
        "best_chain_len": best_chain_len(plan, best.expected.rates),
    }
    return Fit(verdict, search.tried[0], best, search.tried, fields, open_fields(plan, fields), facts)


def open_fields(plan: Plan, fields: Sequence[Field]) -> frozenset[str]:
    """Return the fields that neither the head's files nor the flags give."""
    file, config = plan.draft.folder / "config.json", plan.config
    said = said_in(read_object(file)) if file.is_file() else set()
    found = {field.name for field in fields if not said & set(field.keys)} - {"tap_order"}
    if config.aux_layers or plan.draft.aux_layers is not None:
        found -= {"aux_layers"}
    if config.aux_layers or config.aux_convention or plan.chosen_taps.doubt is None:
        found -= {"aux_convention"}
    if config.norm_before_residual is not None:
        found -= {"norm_before_residual"}
    return frozenset(found - {each.partition("=")[0] for each in config.read})


def read_plan(plan: Plan, reading: HeadReading) -> Plan:
    """Return the plan with another reading of its head."""
    taps = plan.chosen_taps if reading.taps == plan.taps else Taps(reading.taps, "measured")
    return replace(plan, draft=reading.draft, chosen_taps=taps)


def fitted_plan(plan: Plan, fit: Fit) -> tuple[Plan, list[str]]:
    """Return the plan with the best reading of the head, and lines that say so.

    Raises ValueError if another reading than the files' is clearly better, and the files state its fields.
    """
    if fit.verdict != ANOTHER:
        return plan, fit.lines()
    if not set(fit.best.changes) <= fit.open:
        own, best = fit.file.expected, fit.best.expected
        raise ValueError(
            f"{plan.draft.folder}: the head is read wrongly by what its files say: {own.text()} a round as they say, "
            f"{best.text()} with another reading ({fit.facts['text']}): type {fit.typed(fit.best)}, or "
            "--no-fit to export it as it is"
        )
    return read_plan(plan, fit.best.reading), [*fit.lines(), "the head's files do not state that: it is taken"]


def fitted(plan: Plan, progress: Progress) -> tuple[Plan, dict[str, Any] | None]:
    """Measure the plan's head during an export, unless ``--no-fit`` is given. Returns the plan with the head's best
    reading, and the entry of ``export.json``.

    Raises ValueError if the files specify one reading and more proposals are clearly accepted with another.
    """
    config = plan.config
    if config.fit is False or not plan.has_draft or config.random_weights:
        return plan, None
    if (reason := why_not_measured(plan, asked=bool(config.fit))) is None:
        try:
            with progress.stage("measure the draft head"):
                fit = measure_head(Measured(plan, config.text), plan)
        # some models cannot compute a whole text in one forward: they are exported without a measurement
        except Exception as error:
            if config.fit:
                raise
            reason = one_line(error)
    if reason is not None:
        progress.say(f"the head's readings were not measured: {reason}")
        return plan, None
    plan, lines = fitted_plan(plan, fit)
    for line in lines:
        progress.say(line)
    return_freed_memory()
    return plan, fit.as_json()
