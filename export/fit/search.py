"""Tries the readings of a head: the files' own, then those with one field changed. Unless the files' is the best, the
search goes on from the best reading, by one field at a time, until none is better.

A reading that may be better, but not beyond the noise of all comparisons, is compared on a second text of the same
length. There are two looks then, and each allows for the comparisons of both.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from eagle3.export.draft.common.field import Field, HeadReading
from eagle3.export.fit.trials import Trial, Trials
from eagle3.export.fit.verdict import ANOTHER, FITS, NO_PAIR, clearly_better, likelier, may_be_better, works

BEAM, PROMISING = 1, 2
"""``BEAM`` is the number of readings with one change to which a second one is added if none is better alone.
``PROMISING`` is the number of readings with two changes that are run whole: so many by acceptance, and as many by
likelihood."""
STEPS = 3
"""The most fields by which the search goes on from the best reading with one change."""
FINALISTS = 3
"""The most readings that are compared with the files' on a second text."""


@dataclass(frozen=True, eq=False)
class Tried:
    """A reading that has been run. ``changes`` maps each field that differs from the files' reading to its value."""

    reading: HeadReading
    changes: dict[str, Any]
    trial: Trial

    @property
    def accepted(self) -> float:
        return float(self.trial.accepted.mean())

    @property
    def likelihood(self) -> float:
        return float(self.trial.likelihood.mean())

    @property
    def begun(self) -> "Tried":
        """The reading with its chains in the first half of the text."""
        return replace(self, trial=self.trial.first_chains(self.trial.half))


@dataclass
class Search:
    """Tries the readings of one head one after the other. ``chance`` is the rate at which one fixed token would be
    accepted; ``longer`` returns the trials over a text twice as long, None if there is none."""

    trials: Trials
    fields: Sequence[Field]
    chance: float
    longer: Callable[[], Trials] | None = None
    tried: list[Tried] = field(default_factory=list)

    @property
    def comparisons(self) -> int:
        """The number of comparisons whose noise a better reading must exceed."""
        return len(self.tried) * (1 if self.longer is None else 2)

    def run(self, file: HeadReading) -> tuple[str, Tried]:
        """Return the verdict, and the best reading that clearly differs in acceptance from the files'."""
        self.tried.append(Tried(file, {}, self.trials.run(file)))
        self._try(file, self._changed(file, file))
        best = self._best()
        if best is self.tried[0] and self._works(best):
            best = self._on_longer_text()
        if best is self.tried[0] and self._works(best):
            return FITS, best
        for _ in range(STEPS):
            before = best
            changed = [each for each in self.tried if each.changes]
            for each in _foremost(changed, BEAM) if best is self.tried[0] else [best]:
                self._try(file, self._changed(each.reading, file), PROMISING)
            best = self._best()
            if best is before:
                break
        own = self.tried[0]
        if not self._works(best):
            return NO_PAIR, own
        return (FITS, own) if best is own else (ANOTHER, self._without_needless(best, own))

    def _works(self, tried: Tried) -> bool:
        return works(tried.trial, self.chance, len(self.tried))

    def _changed(self, reading: HeadReading, file: HeadReading) -> Iterator[HeadReading]:
        """Return the readings with one field changed, to the values that are worth trying beside the reading's own
        value or the files'."""
        for each in self.fields:
            known = [base for base in (reading, file) if each.value(base) is not None]
            for value in (value for base in known for value in each.others(base)):
                try:
                    yield each.applied(reading, value)
                except ValueError:  # the two fields exclude each other
                    continue

    def _on_longer_text(self) -> Tried:
        """Compare the files' reading on a longer text with those that may be better, and return the best."""
        own = self.tried[0]
        unclear = [each for each in self.tried if each.changes and clearly_better(each.trial, own.trial, 1)]
        if self.longer is None or not unclear:
            return own
        self.trials = self.longer()
        finalists = sorted(unclear, key=lambda each: -each.likelihood)[:FINALISTS]
        for each in [own, *finalists]:
            self.tried[self.tried.index(each)] = replace(each, trial=self.trials.run(each.reading))
        return self._best()

    def _try(self, file: HeadReading, readings: Iterator[HeadReading], most: int | None = None) -> None:
        """Run the readings that have not been run yet, each as long as it may be better than the files' own. With
        ``most``, run only their first proposals on the first half of the text, and then the most promising ones."""
        known, found = [each.changes for each in self.tried], []
        for reading in readings:
            changes = changed_fields(self.fields, file, reading)
            if changes in known:
                continue
            known.append(changes)
            try:
                found.append(Tried(reading, changes, self._run(reading) if most is None else self._begin(reading)))
            # the head's tensors do not have the shapes of this reading
            except (RuntimeError, ValueError, AssertionError, IndexError):
                continue
        if most is not None:
            found = [replace(each, trial=self._run(each.reading)) for each in _foremost(found, most)]
        self.tried += found

    def _run(self, reading: HeadReading) -> Trial:
        own = self.tried[0].trial
        return self.trials.run(reading, lambda begun: may_be_better(begun, own))

    def _begin(self, reading: HeadReading) -> Trial:
        return self.trials.of_head(
            self.trials.head(reading), reading, steps=1, goes_on=lambda each: len(each.hits) < each.half
        )

    def _best(self) -> Tried:
        """Return the best of the readings that are clearly better than the files'; the files' own if there is none."""
        own, count = self.tried[0], self.comparisons
        better = [each for each in self.tried if clearly_better(each.trial, own.trial, count)]
        better = [each for each in better if self._works(each)]
        if not better:
            return own
        top = max(better, key=lambda each: each.accepted)
        alike = [each for each in better if not clearly_better(top.trial, each.trial, 1)]
        return max(alike, key=lambda each: (round(each.likelihood, 3), each.accepted))

    def _without_needless(self, best: Tried, own: Tried) -> Tried:
        """Return the reading with the fewest changes whose chains are not clearly shorter than those of ``best``, and
        by which the target's tokens are as likely."""
        count = self.comparisons
        alike = [
            each
            for each in self.tried
            if set(each.changes) < set(best.changes)
            and clearly_better(each.trial, own.trial, count)
            and best.accepted - each.accepted <= 0.02 * (1 + best.accepted)
            and not likelier(best.trial, each.trial, count)
        ]
        return min(alike, key=lambda each: (len(each.changes), -each.accepted), default=best)


def _foremost(tried: Sequence[Tried], count: int) -> list[Tried]:
    """Return the ``count`` best readings by acceptance in the first half of the text, and the ``count`` best of the
    rest by likelihood."""
    chosen = sorted(tried, key=lambda each: (each.begun.accepted, each.begun.likelihood))[-count:]
    rest = [each for each in tried if each not in chosen]
    return chosen + sorted(rest, key=lambda each: each.begun.likelihood)[-count:]


def changed_fields(fields: Sequence[Field], file: HeadReading, reading: HeadReading) -> dict[str, Any]:
    """Return the fields in which a reading differs from the files', with their values."""
    changes = {each.name: each.value(reading) for each in fields if each.value(reading) != each.value(file)}
    if "aux_convention" in changes:
        del changes["aux_convention" if changes["aux_convention"] is None else "aux_layers"]
    return changes
