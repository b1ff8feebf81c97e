"""Puts wrong readings into gemma4-tiny's heads, one at a time and in pairs, and prints which the measurement finds.

    python scripts/survey/check_fit.py [--seed N] [--head draft] [--random N | --played [--recurrent]]

A fault is the opposite of a reading: the head's files are changed to say something else, so that the reading that
undoes the change is right. ``--random N`` measures heads of random weights, none of which may be repaired.
``--played`` compares the expected tokens of a round with those of the runner's own loop on the same prompts, in
float32, 8da8w and 8da4w; with ``--recurrent`` in float32, of heads that are trained for random targets of every kind of
layer with a state (``--head NAME`` for one of them).
"""

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eagle3.export.checks.fit.chains import Trials
from eagle3.export.checks.fit.measure import Fit, measure_head, read_plan
from eagle3.export.checks.fit.readings import ANOTHER, CERTAIN, FITS, LEAST_GAIN, NO_PAIR, mean_and_error
from eagle3.export.checks.fit.target import Measured, few_threads
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.draft.common.field import HeadReading
from eagle3.export.draft.kinds import KINDS
from eagle3.export.lowering.backend import load_backend
from eagle3.export.pipeline import load_speculator, make_metadata
from eagle3.export.planning.plan import Plan, make_plan
from eagle3.runner.hosts.session import EagerSession
from eagle3.runner.loop.generation import complete
from eagle3.runner.loop.statistics import GenerationStats
from eagle3.targets import TARGETS
from eagle3.targets.attention import EagerAttention

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))
HEADS = {path.name: path for path in TARGETS["gemma4-tiny"].drafts}
PAIRS = 10


@dataclass(frozen=True)
class Fault:
    """A head that is read wrongly: ``changes`` maps fields to the wrong values."""

    changes: dict[str, Any]
    plan: Plan

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.changes.items()) or "none"


def plan_of(head: str, **flags: Any) -> Plan:
    return make_plan(ExportConfig("gemma4-tiny", backend="xnnpack", draft=HEADS[head], **flags))


def faults(plan: Plan) -> Iterator[Fault]:
    """Yield the unchanged head, every single fault, and ``PAIRS`` pairs of faults in two fields."""
    fields = KINDS[plan.draft.kind].load().FIELDS
    right = HeadReading(plan.draft, plan.taps, plan.target_config)
    yield Fault({}, plan)
    single = [(field, value) for field in fields if field.value(right) is not None for value in field.others(right)]
    undoable = [each for each in single if each[0].name not in ("last_norm", "fc_norm", "norm_before_fc")]
    for field, value in undoable:
        yield Fault({field.name: value}, read_plan(plan, field.applied(right, value)))
    both = [pair for pair in itertools.combinations(undoable, 2) if _independent(pair)]
    step = max(1, len(both) // PAIRS)
    for (first, value), (second, other) in both[::step][:PAIRS]:
        reading = second.applied(first.applied(right, value), other)
        yield Fault({first.name: value, second.name: other}, read_plan(plan, reading))


def _independent(pair: tuple[Any, Any]) -> bool:
    return len({"taps" if field.name.startswith("aux_") else field.name for field, _ in pair}) > 1


def judged(fit: Fit, fault: Fault, right: HeadReading, measured: Measured) -> str:
    """Return "found"; "no pair"; what the chosen reading loses beside the right one, "less than 3%" or "in the noise";
    or "WRONG". Both are compared by their chains behind the same tokens, with a 95% interval."""
    if not fault.changes:
        return "left alone" if fit.verdict == FITS else "WRONG"
    if fit.verdict == NO_PAIR:
        return "no pair"
    if fit.verdict == ANOTHER and all(field.value(fit.best.reading) == field.value(right) for field in fit.fields):
        return "found"
    chains = fit.best.trial.accepted
    lost, error = mean_and_error(Trials(right, measured).run(right, fit.facts["chain_len"]).accepted - chains)
    if lost <= LEAST_GAIN * (1 + float(chains.mean())):
        return "less than 3%"
    return "in the noise" if lost <= CERTAIN * error else "WRONG"


def randomized(plan: Plan, seed: int) -> Plan:
    """Return the plan with a head of random weights of the same shapes and magnitudes."""
    generator = torch.Generator().manual_seed(seed)

    class Random(type(plan.draft.source)):  # type: ignore[misc]
        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in super().tensors():
                if tensor.is_floating_point() and tensor.ndim > 1:
                    noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
                    tensor = noise.to(tensor.dtype)
                yield name, tensor

    return replace(plan, draft=replace(plan.draft, source=Random(plan.draft.source.path)))


def played(plan: Plan, measured: Measured) -> float:
    """Return the acceptance length of the runner's loop over the eager module that an export lowers, on what was
    measured."""
    backend = load_backend(plan.config.backend)
    speculator = load_speculator(plan, EagerAttention, torch.float32, backend.conversion(plan))
    backend.prepare(speculator, plan)
    session = EagerSession(speculator, make_metadata(plan, {}, speculator.draft.ids_in_target()))
    stats = GenerationStats()
    with few_threads(True):
        for seen in measured.seen:
            prompt = seen.tokens[: seen.begin].tolist()
            stats.add(complete(session, prompt, max_new_tokens=len(seen.tokens) - seen.begin).stats)
    return stats.counts()["mean_acceptance_length"]


def played_rows(heads: list[str], seed: int) -> Iterator[tuple]:
    """Yield the expected acceptance length of each head and recipe, and that of the runner's loop."""
    measured = None
    for head in heads:
        fit = None
        for recipe in ("none", "8da8w", "8da4w"):
            flags = {"qlinear": recipe, "draft_qlinear": recipe if recipe == "none" else "8da8w"}
            plan = plan_of(head, **flags)
            measured = measured or Measured(plan, seed=seed)
            fit = fit or measure_head(measured, plan)
            yield head, recipe, *compared(fit, played(plan, measured))


def recurrent_rows(names: list[str], seed: int) -> Iterator[tuple]:
    """Yield the expected acceptance length of a trained head of each recurrent target, and that of the loop."""
    from recurrent_pairs import CONFIGS, recurrent_plan, trained

    for name in names or CONFIGS:
        with tempfile.TemporaryDirectory() as folder:
            plan, _ = recurrent_plan(name, Path(folder))
            measured = Measured(plan, seed=seed)
            with few_threads(True):
                plan = trained(plan, measured)
            fit = measure_head(measured, plan)
            yield name, fit.verdict, *compared(fit, played(plan, measured))


def compared(fit: Fit, length: float) -> tuple[str, str, str]:
    """Return the expected length with its interval, the played one, and whether that is in the interval."""
    own = fit.file.expected
    low, high = own.interval
    place = "within" if low <= length <= high else "OUTSIDE"
    return f"{own.length:.2f} ({low:.2f} to {high:.2f})", f"{length:.2f}", place


def fault_rows(heads: list[str], measured: Measured) -> Iterator[tuple]:
    """Yield what is found of every fault, and of the head without a fault."""
    for head in heads:
        plan = plan_of(head)
        right = HeadReading(plan.draft, plan.taps, plan.target_config)
        for fault in faults(plan):
            fit = measure_head(measured, fault.plan)
            lengths = (f"{each.expected.length:.2f}" for each in (fit.file, fit.best))
            found = judged(fit, fault, right, measured)
            yield head, str(fault), fit.verdict, fit.typed(fit.best), *lengths, found


def random_rows(heads: list[str], count: int, measured: Measured) -> Iterator[tuple]:
    """Yield what is found of random heads by their numbers, of the shapes of each head in turn."""
    for number in range(count):
        head = heads[number % len(heads)]
        fit = measure_head(measured, randomized(plan_of(head), number))
        changed = "left alone" if not fit.best.changes else "CHANGED"
        yield head, f"random {number}", fit.verdict, fit.typed(fit.best), changed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--head", action="append")
    parser.add_argument("--random", type=int, default=0, metavar="N")
    for flag in ("--played", "--recurrent"):
        parser.add_argument(flag, action="store_true")
    given = parser.parse_args()
    heads = given.head or list(HEADS)
    if given.played and given.recurrent:
        columns, rows = ("target", "verdict", "expected", "played", ""), recurrent_rows(given.head or [], given.seed)
    elif given.played:
        columns, rows = ("head", "recipe", "expected", "played", ""), played_rows(heads, given.seed)
    elif given.random:
        columns = ("head", "weights", "verdict", "to type", "")
        rows = random_rows(heads, given.random, Measured(plan_of(heads[0]), seed=given.seed))
    else:
        columns = ("head", "fault", "verdict", "to type", "as read", "best", "judged")
        rows = fault_rows(heads, Measured(plan_of(heads[0]), seed=given.seed))
    for row in itertools.chain([columns], rows):
        print(*row, sep=" | ", flush=True)


if __name__ == "__main__":
    main()
