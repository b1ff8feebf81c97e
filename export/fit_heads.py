"""Measures the heads of a target, and prints tables or JSON."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from eagle3.export.configuration.config import ExportConfig
from eagle3.export.exporting import weights_at_hand
from eagle3.export.fit.cost import why_not_measured
from eagle3.export.fit.fitting import Fit, Measured
from eagle3.export.fit.report import show
from eagle3.export.output.progress import Progress


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
    of_quantization: dict[str, tuple[str, dict[str, Any]]] = {}
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
            if (said := measured.said_of_quantization(plan)) is not None:
                of_quantization[name] = said
    if plot is not None:
        from eagle3.export.fit.plot import draw

        draw(found, plot)
    if as_json:
        entries = {name: fit.as_json() for name, fit in found.items()}
        for name, (_, entry) in of_quantization.items():
            entries[name]["quantization"] = entry
        click.echo(json.dumps(next(iter(entries.values())) if len(entries) == 1 else {"heads": entries}))
        return
    show(found)
    for name, (line, _) in of_quantization.items():
        click.echo(f"{name}: {line}")
