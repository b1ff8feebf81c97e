"""Plots acceptance by position, a line for each head and its best readings."""

from importlib.util import find_spec
from pathlib import Path

from eagle3.export.fit.fitting import Fit

MOST_LINES = 8
"""The number of a head's readings that are drawn: the best ones and the files' own."""


def check_plot(file: Path) -> None:
    """Raise ValueError if ``draw`` could not write ``file``, or if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: type pip install 'eagle3-export[plot]'")
    from matplotlib.figure import Figure

    if file.suffix[1:].lower() not in Figure().canvas.get_supported_filetypes():
        raise ValueError(
            f"{file}: pictures cannot be written as {file.suffix or 'a file without a suffix'}: type .png or .svg"
        )
    if not file.parent.is_dir():
        raise ValueError(f"{file} cannot be written: {file.parent} is no folder")


def draw(found: dict[str, Fit], file: Path) -> None:
    """Write the plot in the format that the suffix of ``file`` names."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(found), 4), layout="constrained")
    for axes, (name, fit) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        ordered = sorted(fit.tried, key=lambda each: -fit.of(each).length)
        shown = [*ordered[: MOST_LINES - 1], *([] if fit.file in ordered[: MOST_LINES - 1] else [fit.file])]
        for each in shown:
            expected = fit.of(each)
            places = range(1, len(expected.rates) + 1)
            label = fit.typed(each) or "as its files say"
            axes.plot(places, expected.rates, marker="o", label=f"{expected.length:.2f}  {label}")
            if each is fit.best:
                low, high = zip(*expected.intervals, strict=True)
                axes.fill_between(places, low, high, alpha=0.2)
        axes.set(
            title=f"{name}: {fit.verdict}", xlabel="position in the chain", ylabel="accepted so far", ylim=(0, 1.05)
        )
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend(loc="lower left", fontsize="x-small")
    figure.savefig(file, dpi=150)
