"""The tables of what was measured."""

from typing import Any

import click

from eagle3.export.fit.fitting import Fit, fit_lines
from eagle3.runner.system.tables import show_tables, table


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
    """Return the table of a head's readings, best first. A reading that was given up has fewer tokens than others."""
    ordered = sorted(fit.tried, key=lambda each: (-fit.of(each).length, len(each.changes)))
    rows = (
        (
            fit.typed(each) or "as its files say",
            "*" if each is fit.best else "",
            *_figures(fit, each),
            str(len(each.trial.hits)),
        )
        for each in ordered
    )
    columns = ("reading", "best", *_FIGURES, "tokens")
    return table(f"Readings ({fit.facts['text']})", columns, rows, numbers=columns[2:])


def _figures(fit: Fit, tried: Any) -> tuple[str, str, str]:  # noqa: ANN401 - a ``Tried``: one reading and its trial
    expected = fit.of(tried)
    low, high = expected.interval
    return f"{expected.length:.2f}", f"{low:.2f} to {high:.2f}", " ".join(f"{rate:.2f}" for rate in expected.rates)
