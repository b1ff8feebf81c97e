"""Measures the heads of a target for ``eagle3-fit`` and ``eagle3-export --fit-only``, and prints tables or JSON."""

import json
from collections.abc import Sequence

import click

from eagle3.export.checks.fit.measure import Fit, measure_head
from eagle3.export.checks.fit.readings import Tried
from eagle3.export.checks.fit.target import Measured, why_not_measured
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.exporting import weights_at_hand
from eagle3.export.output.progress import Progress
from eagle3.runner.system.tables import show_tables, table

FIGURES = ("tokens a round", "95%", "by position")


def fit_heads(configs: Sequence[ExportConfig], as_json: bool, seed: int = 0, download: bool = False) -> None:
    """Measure each configuration's head on the same text of their target, and print the results.

    Raises ValueError if a head cannot be measured.
    """
    progress, measured = Progress(), None
    found: dict[str, Fit] = {}
    for config in configs:
        with weights_at_hand(config, download) as plan:
            if not plan.has_draft:
                raise ValueError("there is no draft head to measure: type --draft with one")
            if (reason := why_not_measured(plan, asked=True)) is not None:
                raise ValueError(f"{plan.draft.folder} was not measured: {reason}")
            if measured is None:
                with progress.stage("target over the text"):
                    measured = Measured(plan, config.text, seed)
            with progress.stage(f"readings of {plan.draft.folder.name}"):
                found[str(config.draft or plan.draft.folder.name)] = measure_head(measured, plan)
    if not as_json:
        _show(found)
        return
    entries = {name: fit.as_json() for name, fit in found.items()}
    click.echo(json.dumps(next(iter(entries.values())) if len(entries) == 1 else {"heads": entries}))


def _show(found: dict[str, Fit]) -> None:
    """Print a table of each head's readings and its lines. Several heads are first listed in one table."""
    if len(found) > 1:
        ordered = sorted(found.items(), key=lambda each: -each[1].best.expected.length)
        heads = ((name, fit.verdict, *_reading(fit, fit.best)) for name, fit in ordered)
        columns = ("head", "verdict", "reading", *FIGURES)
        show_tables("heads of one target", [table("Heads", columns, heads, numbers=FIGURES)])
    for name, fit in found.items():
        rows = ((*_reading(fit, each), "*" if each is fit.best else "") for each in fit.ordered)
        title = f"Readings ({fit.facts['text']})"
        show_tables(name, [table(title, ("reading", *FIGURES, "best"), rows, numbers=FIGURES)])
        for line in fit.lines():
            click.echo(line)


def _reading(fit: Fit, tried: Tried) -> tuple[str, ...]:
    found = tried.expected
    low, high = found.interval
    rates = " ".join(f"{rate:.2f}" for rate in found.rates)
    return fit.typed(tried) or "as its files say", f"{found.length:.2f}", f"{low:.2f} to {high:.2f}", rates
