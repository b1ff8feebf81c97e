"""Runs ``eagle3-fit`` over the heads of a target, and prints tables or JSON."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from eagle3.export.exporting import weights_at_hand
from eagle3.export.fit.cost import why_not_measured
from eagle3.export.fit.fitting import Fit, Measured, fit_lines
from eagle3.export.fit.quantized import Quantized
from eagle3.export.output.progress import Progress
from eagle3.export.planning.config import ExportConfig
from eagle3.runner.console.tables import show_tables, table


def fit_heads(
    configs: Sequence[ExportConfig],
    as_json: bool,
    seed: int = 0,
    download: bool = False,
    plot: Path | None = None,
) -> None:
    """Measure each configuration's head on the same text of their target, and print the results.

    Raises ValueError if a head cannot be measured.
    """
    progress, measured = Progress(), None
    found: dict[str, Fit] = {}
    shares: dict[str, Quantized] = {}
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
                name = str(config.draft or plan.draft.folder.name)
                found[name] = measured.fit(plan)
            if (share := measured.quantized(plan)) is not None:
                shares[name] = share
    if plot is not None:
        from eagle3.export.fit.plot import draw

        draw(found, plot)
    if as_json:
        entries = {name: fit.as_json() for name, fit in found.items()}
        for name, share in shares.items():
            entries[name]["quantization"] = share.as_json()
        click.echo(json.dumps(next(iter(entries.values())) if len(entries) == 1 else {"heads": entries}))
        return
    show(found)
    for name, share in shares.items():
        click.echo(f"{name}, {share.line()}")


def show(found: dict[str, Fit]) -> None:
    """Print a table of each head's readings and its lines. Several heads are first listed in one table."""
    if len(found) > 1:
        ordered = sorted(found.items(), key=lambda each: -each[1].of(each[1].best).length)
        rows = (
            (name, fit.verdict, fit.typed(fit.best) or "as its files say", *_figures(fit, fit.best))
            for name, fit in ordered
        )
        columns = ("head", "verdict", "reading", *_FIGURES)
        show_tables("heads of one target", [table("Heads", columns, rows, numbers=columns[3:])])
    for name, fit in found.items():
        show_tables(name, [readings_table(fit)])
        for line in fit_lines(fit):
            click.echo(line)


_FIGURES = ("tokens a round", "95%", "by position")


def readings_table(fit: Fit) -> Any:  # noqa: ANN401 - rich's table
    """Return the table of a head's readings, best first."""
    ordered = sorted(fit.tried, key=lambda each: (-fit.of(each).length, len(each.changes)))
    rows = (
        (
            fit.typed(each) or "as its files say",
            "*" if each is fit.best else "",
            *_figures(fit, each),
        )
        for each in ordered
    )
    columns = ("reading", "best", *_FIGURES)
    return table(f"Readings ({fit.facts['text']})", columns, rows, numbers=columns[2:])


def _figures(fit: Fit, tried: Any) -> tuple[str, str, str]:  # noqa: ANN401 - a reading that was tried
    expected = fit.of(tried)
    low, high = expected.interval
    return f"{expected.length:.2f}", f"{low:.2f} to {high:.2f}", " ".join(f"{rate:.2f}" for rate in expected.rates)
