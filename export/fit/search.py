"""Tries the readings of a head: the files' own, then those with one field changed, and, unless the files' is the best,
those with two."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from eagle3.export.draft.common.field import Field, HeadReading
from eagle3.export.fit.trials import Trial, Trials
from eagle3.export.fit.verdict import ANOTHER, FITS, NO_PAIR, beyond_chance, clearly_better, may_be_better

BEAM, PROMISING = 1, 2
"""``BEAM`` is the number of readings with one change to which a second one is added if none is better alone.
``PROMISING`` is the number of readings with two changes that are run whole: so many by acceptance, and as many by
likelihood."""


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
        """The reading with its chains in the first half of the text, which all readings have."""
        return replace(self, trial=self.trial.begun())


@dataclass
class Search:
    """Tries the readings of one head one after the other. ``chance`` is the rate at which one fixed token would be
    accepted."""

    trials: Trials
    fields: Sequence[Field]
    chance: float
    tried: list[Tried] = field(default_factory=list)

    def run(self, file: HeadReading) -> tuple[str, Tried]:
        """Return the verdict, and the best reading that clearly differs in acceptance from the files'."""
        own = Tried(file, {}, self.trials.run(file))
        self.tried.append(own)
        self._try(file, self._changed(file))
        best = self._best(own)
        if best is own and self._works(own):
            return FITS, own
        beam = [best] if best is not own else _foremost([each for each in self.tried if each.changes], BEAM)
        for each in beam:
            self._try(file, self._changed(each.reading), PROMISING)
        best = self._best(own)
        if not self._works(best):
            return NO_PAIR, own
        return (FITS, own) if best is own else (ANOTHER, self._without_needless(best, own))

    def _works(self, tried: Tried) -> bool:
        return beyond_chance(tried.trial, self.chance, len(self.tried))

    def _changed(self, reading: HeadReading) -> Iterator[HeadReading]:
        for each in self.fields:
            for value in each.others(reading) if each.value(reading) is not None else ():
                try:
                    yield each.applied(reading, value)
                except ValueError:  # the two fields exclude each other
                    continue

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
        return self.trials.of_head(self.trials.head(reading), reading, steps=1, goes_on=lambda _begun: False)

    def _best(self, own: Tried) -> Tried:
        """Return the best of the readings that are clearly better than the files'; the files' own if there is none."""
        count = len(self.tried)
        better = [each for each in self.tried if clearly_better(each.trial, own.trial, count)]
        better = [each for each in better if self._works(each)]
        if not better:
            return own
        top = max(better, key=lambda each: each.accepted)
        alike = [each for each in better if not clearly_better(top.trial, each.trial, 1)]
        return max(alike, key=lambda each: (round(each.likelihood, 3), each.accepted))

    def _without_needless(self, best: Tried, own: Tried) -> Tried:
        """Return the reading with the fewest changes whose chains are not clearly shorter than those of ``best``."""
        count = len(self.tried)
        alike = [
            each
            for each in self.tried
            if set(each.changes) < set(best.changes)
            and clearly_better(each.trial, own.trial, count)
            and best.accepted - each.accepted <= 0.02 * (1 + best.accepted)
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
