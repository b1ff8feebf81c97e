"""Plots the figures: acceptance by position and speed over chain length, or both over the context."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.runner.bench.report import name_cells, noise_lines
from eagle3.runner.options import AUTO

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ABOVE: dict[str, Any] = {"textcoords": "offset points", "xytext": (0, 5), "ha": "center", "fontsize": "small"}
BESIDE: dict[str, Any] = {
    "textcoords": "offset points",
    "xytext": (4, 0),
    "fontsize": "small",
    "annotation_clip": False,
}
LEVELS = {AUTO: ("--", "bottom", f"chain length {AUTO}"), 0: (":", "top", "no speculation")}
"""Configurations without a place on the axis of chain lengths: line style, vertical alignment of the label, name."""


def check_plot(file: Path) -> None:
    """Raise ValueError if ``draw`` could not write ``file``, or if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: type pip install 'eagle3-export[plot]'")
    from matplotlib.figure import Figure

    known = Figure().canvas.get_supported_filetypes()
    if file.suffix[1:].lower() not in known:
        raise ValueError(
            f"{file}: pictures cannot be written as {file.suffix or 'a file without a suffix'}: type .png or .svg"
        )
    folder = file.parent
    if not folder.is_dir() or not os.access(file if file.exists() else folder, os.W_OK) or file.is_dir():
        raise ValueError(f"{file} cannot be written: give a file in an existing folder that you may write to")


def draw(report: dict[str, Any], file: Path) -> None:
    """Write the plot in the format that the suffix of ``file`` names. Configurations with the lookup are not
    plotted."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    acceptance, speed = figure.subplots(1, 2)
    several = len(report["artifacts"]) > 1  # the label names the artifact
    for index, artifact in enumerate(report["artifacts"]):
        of_artifact = [figures for figures in report["ways"] if figures["artifact"] == artifact["artifact"]]
        configurations = [figures for figures in of_artifact if not figures.get("ngram")]
        label = f"{artifact['artifact']}, " if several else ""
        draw_acceptance(acceptance, configurations, label, f"C{index}")
        draw_speed(speed, configurations, label, f"C{index}")
    acceptance.set(xlabel="position in the chain", ylabel="drafts accepted so far", ylim=(0, 1.05))
    speed.set(xlabel="chain length", ylabel="tokens/s", ylim=(0, 1.1 * speed.get_ylim()[1]))
    for axes in (acceptance, speed):
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.margins(x=0.1)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="lower right", fontsize="small")
    finish(figure, report, file)


def draw_contexts(report: dict[str, Any], file: Path) -> None:
    """Write the plot of a run with ``--context``: acceptance length and decoding speed after each context."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    acceptance, speed = figure.subplots(1, 2)
    lengths = report["contexts"]
    for index, figures in enumerate(report["ways"]):
        found = [figures["categories"][str(length)] for length in lengths]
        label = ", ".join(f"{column} {cell}" for column, cell in name_cells(report, figures).items())
        rates = [each["decode_tokens_per_second"] for each in found]
        errors = [[abs(rate[end] - rate["median"]) for rate in rates] for end in ("min", "max")]
        medians = [rate["median"] for rate in rates]
        speed.errorbar(lengths, medians, yerr=errors, marker="o", capsize=3, color=f"C{index}", label=label)
        if any(each["stats"]["num_drafts"] for each in found):
            accepted = [each["stats"]["mean_acceptance_length"] for each in found]
            acceptance.plot(lengths, accepted, marker="o", color=f"C{index}", label=label)
    acceptance.set(ylabel="acceptance length")
    speed.set(ylabel="decode, tokens/s", ylim=(0, 1.1 * speed.get_ylim()[1]))
    for axes in (acceptance, speed):
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.set_xlabel("context, tokens")
        axes.grid(alpha=0.3)
    speed.legend(loc="upper right", fontsize="small")  # one legend for both plots
    finish(figure, report, file)


def finish(figure: "Figure", report: dict[str, Any], file: Path) -> None:
    """Add the title and the warning of a noisy machine, and write the file."""
    manifest = report["artifacts"][0]["manifest"]
    figure.suptitle(f"{manifest.get('target')} on {report['machine']}", fontsize="medium")
    figure.supxlabel("\n".join(noise_lines(report)), fontsize="small")
    figure.savefig(file, dpi=150)


def draw_acceptance(axes: "Axes", configurations: list[dict[str, Any]], label: str, color: str) -> None:
    """Plot the acceptance of the longest fixed chain length, or of the adaptive one if there is no other."""
    adaptive = [figures for figures in configurations if figures["chain_len"] == AUTO]
    for figures in fixed_lengths(configurations)[-1:] or adaptive:
        rates = figures["stats"]["acceptance_rate_per_position"]
        places = range(1, len(rates) + 1)
        axes.plot(places, rates, marker="o", color=color, label=f"{label}chain length {figures['chain_len']}")
        for place, rate in () if label else zip(places, rates, strict=True):
            axes.annotate(f"{rate:.2f}", (place, rate), **ABOVE)


def draw_speed(axes: "Axes", configurations: list[dict[str, Any]], label: str, color: str) -> None:
    """Plot median, spread and the ratio to no speculation. A fixed chain length is a point; the adaptive one and no
    speculation are a line over a band."""
    fixed = fixed_lengths(configurations)
    lengths, rates = [figures["chain_len"] for figures in fixed], [figures["tokens_per_second"] for figures in fixed]
    medians = [rate["median"] for rate in rates]
    errors = [[abs(rate[end] - rate["median"]) for rate in rates] for end in ("min", "max")]
    if fixed:
        axes.errorbar(lengths, medians, yerr=errors, marker="o", capsize=3, color=color, label=f"{label}speculation")
    for figures in () if label else fixed:
        place = figures["chain_len"], figures["tokens_per_second"]["max"]
        axes.annotate(ratio_text(figures), place, **ABOVE)
    for length, (style, edge, name) in LEVELS.items():
        for figures in configurations:
            if figures["chain_len"] == length:
                rate = figures["tokens_per_second"]
                axes.axhspan(rate["min"], rate["max"], color=color, alpha=0.15, linewidth=0)
                axes.axhline(rate["median"], linestyle=style, color=color, label=f"{label}{name}")
                if not label:
                    place, beside = (1, rate["median"]), axes.get_yaxis_transform()
                    axes.annotate(ratio_text(figures), place, xycoords=beside, va=edge, **BESIDE)


def ratio_text(figures: dict[str, Any]) -> str:
    """Return the ratio of the speed to that without speculation, as text."""
    return f"x {figures.get('ratio_to_no_speculation', {'median': 1})['median']:.2f}"


def fixed_lengths(configurations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the configurations with a fixed chain length above 0, in ascending order."""
    fixed = [figures for figures in configurations if figures["chain_len"] not in (0, AUTO)]
    return sorted(fixed, key=lambda figures: figures["chain_len"])
