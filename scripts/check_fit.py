"""Puts each fault by hand into gemma4-tiny's heads, one at a time and in pairs, and prints what the measurement finds.

    python scripts/check_fit.py [--seed N] [--head draft] [--random N]

A fault is the opposite of a reading: the head's files are made to say something else, so that the reading that undoes
it is right. ``--random N`` measures heads of random weights, none of which may be repaired.
"""

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from eagle3.export.draft.kinds import KINDS
from eagle3.export.draft.kinds.field import HeadReading
from eagle3.export.fit.fitting import Fit, Measured, read_plan
from eagle3.export.fit.verdict import ANOTHER, FITS, NO_PAIR
from eagle3.export.planning.config import ExportConfig
from eagle3.export.planning.plan import Plan, make_plan
from eagle3.runner.console.tables import show_tables, table
from eagle3.targets import TARGETS

HEADS = {path.name: path for path in TARGETS["gemma4-tiny"].drafts}
PAIRS = 10


@dataclass(frozen=True)
class Fault:
    """A head that is read wrongly: ``changes`` maps fields to the wrong values."""

    changes: dict[str, Any]
    plan: Plan

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.changes.items()) or "none"


def plan_of(head: str) -> Plan:
    return make_plan(ExportConfig("gemma4-tiny", backend="xnnpack", draft=HEADS[head]))


def faults(plan: Plan) -> Iterator[Fault]:
    """Yield the head as it is, every single fault, and ``PAIRS`` pairs of two fields' faults."""
    fields = KINDS[plan.draft.kind].load().FIELDS
    right = HeadReading(plan.draft, plan.taps, plan.target_config)
    yield Fault({}, plan)
    single = [(field, value) for field in fields if field.value(right) is not None for value in field.others(right)]
    undoable = [each for each in single if each[0].name not in ("last_norm", "fc_norm", "norm_before_fc")]
    for field, value in undoable:
        yield Fault({field.name: value}, read_plan(plan, field.applied(right, value)))
    both = [pair for pair in itertools.combinations(undoable, 2) if not _same_taps(pair)]
    step = max(1, len(both) // PAIRS)
    for (first, value), (second, other) in both[::step][:PAIRS]:
        reading = second.applied(first.applied(right, value), other)
        yield Fault({first.name: value, second.name: other}, read_plan(plan, reading))


def _same_taps(pair: tuple[Any, Any]) -> bool:
    names = {field.name for field, _ in pair}
    return len(names) == 1 or names == {"aux_layers", "aux_convention"}


def judged(fit: Fit, fault: Fault, right: HeadReading) -> str:
    """Return "found", "no pair", "in the noise" (the head as it is read is accepted as often as the right reading), or
    "WRONG"."""
    best = fit.best.reading
    if not fault.changes:
        return "left alone" if fit.verdict == FITS else "WRONG"
    if fit.verdict == ANOTHER:
        fields = fit.fields
        same = all(field.value(best) == field.value(right) for field in fields)
        return "found" if same else "another, as good" if _as_good(fit, right) else "WRONG"
    if fit.verdict == NO_PAIR:
        return "no pair"
    return "in the noise" if _as_good(fit, right) else "WRONG"


def _as_good(fit: Fit, right: HeadReading) -> bool:
    """Return whether the reading that was chosen is accepted as the right one is, within the interval."""
    found = [each for each in fit.tried if all(f.value(each.reading) == f.value(right) for f in fit.fields)]
    return bool(found) and fit.of(found[0]).length <= fit.of(fit.best).interval[1]


def randomized(plan: Plan, seed: int) -> Plan:
    """Return the plan with a head of random weights of the same shapes and magnitudes."""
    generator = torch.Generator().manual_seed(seed)

    class Random(type(plan.draft.source)):  # type: ignore[misc]
        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in super().tensors():
                if tensor.is_floating_point() and tensor.ndim > 1:
                    noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
                    yield name, noise.to(tensor.dtype)
                else:
                    yield name, tensor

    return replace(plan, draft=replace(plan.draft, source=Random(plan.draft.source.path)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--head", choices=list(HEADS), action="append")
    parser.add_argument("--random", type=int, default=0, metavar="N")
    given = parser.parse_args()
    heads, rows, measured = given.head or list(HEADS), [], None
    for head in heads:
        plan = plan_of(head)
        measured = measured or Measured(plan, seed=given.seed)
        right = HeadReading(plan.draft, plan.taps, plan.target_config)
        for number in range(given.random):
            fit = measured.fit(randomized(plan, number))
            rows.append((head, f"random {number}", fit.verdict, fit.typed(fit.best), "", "", ""))
        for fault in () if given.random else faults(plan):
            fit = measured.fit(fault.plan)
            lengths = (f"{fit.of(each).length:.2f}" for each in (fit.file, fit.best))
            rows.append((head, str(fault), fit.verdict, fit.typed(fit.best), *lengths, judged(fit, fault, right)))
            print(*rows[-1], sep=" | ", flush=True)
    columns = ("head", "fault", "verdict", "to type", "as read", "best", "judged")
    show_tables(f"gemma4-tiny, seed {given.seed}", [table("Faults", columns, rows)])


if __name__ == "__main__":
    main()
