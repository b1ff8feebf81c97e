"""Formats the figures for people: as text for a terminal, and as Markdown tables."""

import io
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from eagle3.runner.contract import SPECULATE, TARGET_VERIFY

Cells = list[dict[str, str]]
"""The rows of a table: each maps column names to cells, with the same columns."""

VERDICT = {True: ", a near-tie", False: ", not a near-tie: please report it as a bug", None: ""}
NOISE = 0.01
"""The largest relative difference between the median of the ratios and the ratio of the medians on a quiet machine."""


def as_text(report: dict[str, Any]) -> str:
    tables = configuration_cells(report), time_cells(report), category_cells(report)
    lines = [*step_lines(report), *noise_lines(report), *result_lines(report)]
    shown = [rendered(cells) for cells in tables if cells]
    return "\n\n".join([asked_line(report), *shown, "\n".join(lines)])


def as_markdown(report: dict[str, Any]) -> str:
    """Return Markdown tables of the figures, and lines about prompts, artifacts and machine."""
    firsts = map(first_token_cell, report["ways"])
    rows = [row | first for row, first in zip(configuration_cells(report), firsts, strict=True)]
    shown = [rendered(cells, box.MARKDOWN) for cells in (rows, category_cells(report)) if cells]
    lines = [asked_line(report), *map(artifact_line, report["artifacts"]), machine_line(report)]
    lines += [*noise_lines(report), *result_lines(report)]
    return "\n\n".join([*shown, "\n".join(f"- {line}" for line in lines)])


def rendered(cells: Cells, style: box.Box | None = None) -> str:
    """Return a table as text: plain columns, or in the given box style."""
    table = Table(*cells[0], box=style, pad_edge=style is not None, padding=(0, 1) if style else (0, 3, 0, 0))
    for row in cells:
        table.add_row(*row.values())
    out = io.StringIO()
    Console(file=out, width=1000, highlight=False, markup=False, emoji=False).print(table)  # no cell is folded
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines() if line.strip())


def configuration_cells(report: dict[str, Any]) -> Cells:
    """Return a row per configuration: speed and acceptance."""
    rows, first = [], report["artifacts"][0]["artifact"]
    for figures in report["ways"]:
        row = name_cells(report, figures) | speculation_cells(figures)
        if len(report["artifacts"]) > 1:
            ratio = figures.get("ratio_to_first_artifact")
            row[f"to {first}"] = spread_text(ratio, 2) if ratio else "1"
        rows.append(row)
    return rows


def time_cells(report: dict[str, Any]) -> Cells:
    """Return a row per configuration: time to first token, prefill and decode rates, time of a round, the loop's share
    of it, and the calls of each method per round."""
    methods, rows = dict.fromkeys(name for figures in report["ways"] for name in figures["round"]["methods"]), []
    for figures in report["ways"]:
        taken, row = figures["round"], name_cells(report, figures) | first_token_cell(figures)
        row |= {f"{part}, tokens/s": rate_text(figures[f"{part}_tokens_per_second"]) for part in ("prefill", "decode")}
        row |= {"a round": f"{taken['ms']:.3f} ms", "the loop itself": f"{taken['loop_share']:.1%}"}
        for name in methods:
            called = taken["methods"].get(name)
            row[name] = f"{called['calls']:.2f} x {called['ms_a_call']:.3f} ms" if called else "-"
        rows.append(row)
    return rows


def category_cells(report: dict[str, Any]) -> Cells:
    """Return a row per category and configuration; none if the prompts have no categories. For long contexts the speeds
    are of decoding only, and the time to the first token is a column of its own."""
    rows, contexts = [], report.get("contexts")
    for name in dict.fromkeys(name for figures in report["ways"] for name in figures["categories"]):
        for figures in report["ways"]:
            found = figures["categories"][name]
            if contexts:
                decoding = {key.removeprefix("decode_"): found[key] for key in found if key.startswith("decode_")}
                cells = speculation_cells(found | decoding) | first_token_cell(found)
                rows.append({"context": f"{int(name):,}"} | name_cells(report, figures) | cells)
            else:
                rows.append({"category": name} | name_cells(report, figures) | speculation_cells(found))
    return rows


def first_token_cell(figures: dict[str, Any]) -> dict[str, str]:
    return {"first token": f"{figures['time_to_first_token_ms']['median']:.1f} ms"}


def name_cells(report: dict[str, Any], figures: dict[str, Any]) -> dict[str, str]:
    """Return the cells that name a configuration. The artifact is named only if there are two, the lookup only if it
    was measured."""
    artifact = {"artifact": figures["artifact"]} if len(report["artifacts"]) > 1 else {}
    looked_up = any(each.get("ngram") for each in report["ways"])
    lookup = {"lookup": "yes" if figures["ngram"] else "no"} if looked_up else {}
    return artifact | {"chain length": str(figures["chain_len"])} | lookup


def speculation_cells(figures: dict[str, Any]) -> dict[str, str]:
    """Return speed and acceptance of a configuration, or of one category of it."""
    stats, ratio = figures["stats"], figures.get("ratio_to_no_speculation")
    drafted = stats["num_drafts"] > 0
    rates = " ".join(f"{rate:.3f}" for rate in stats["acceptance_rate_per_position"])
    return {
        "tokens/s": rate_text(figures["tokens_per_second"]),
        "ratio": spread_text(ratio, 2) if ratio else "1",
        "acceptance length": f"{stats['mean_acceptance_length']:.2f}" if drafted else "-",
        "by position": rates if drafted else "-",
    }


def spread_text(spread: dict[str, float], digits: int) -> str:
    """Format a median with minimum and maximum: 1.75 (1.71..1.78)."""
    median, least, most = (f"{spread[name]:.{digits}f}" for name in ("median", "min", "max"))
    return median if least == most else f"{median} ({least}..{most})"


def rate_text(spread: dict[str, float]) -> str:
    """Format tokens per second, with one decimal below 100."""
    return spread_text(spread, 0 if spread["median"] >= 100 else 1)


def asked_line(report: dict[str, Any]) -> str:
    given = [f"{name} {value}" for name, value in report["options"].items() if name != "max_new_tokens"]
    parts = [
        f"{report['prompts']} prompts",
        f"{report['options']['max_new_tokens']} new tokens each",
        report["decoding"],
        *given,
        "1 pass" if report["repeats"] == 1 else f"{report['repeats']} passes: median (min..max)",
    ]
    return ", ".join(parts)


def artifact_line(artifact: dict[str, Any]) -> str:
    manifest = artifact["manifest"]
    backend = " ".join(filter(None, (manifest.get("backend"), manifest.get("cuda_arch"))))
    return (
        f"{artifact['artifact']}: target {manifest.get('target')}, draft {manifest.get('draft')}, backend {backend}, "
        f"qlinear {manifest.get('qlinear')}, draft_qlinear {manifest.get('draft_qlinear')}"
    )


def machine_line(report: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return f"{report['machine']}; {versions}"


def step_lines(report: dict[str, Any]) -> list[str]:
    rows = dict.fromkeys((TARGET_VERIFY, SPECULATE), f" of {report['artifacts'][0]['window']} rows")
    times = [f"{name}{rows.get(name, '')}: {spread_text(ms, 3)} ms" for name, ms in report["step_ms"].items()]
    return times + [f"{name}: {spread_text(ratio, 2)}" for name, ratio in report["step_ratios"].items()]


def noise_lines(report: dict[str, Any]) -> list[str]:
    """Return a warning if a ratio, computed within each pass, differs from the ratio of the medians: the speed changed
    between passes."""
    furthest, ways = 0.0, report["ways"]
    each_has = len(ways) // len(report["artifacts"])
    for index, figures in enumerate(ways):
        others = {"no_speculation": ways[index - index % each_has], "first_artifact": ways[index % each_has]}
        for name, other in others.items():
            if (ratio := figures.get(f"ratio_to_{name}")) is not None:
                medians = figures["tokens_per_second"]["median"] / other["tokens_per_second"]["median"]
                furthest = max(furthest, abs(medians / ratio["median"] - 1))
    if furthest <= NOISE:
        return []
    return [
        f"the machine was noisy: the medians of the ratios and the ratios of the median speeds differ by up to "
        f"{furthest:.1%}; give a larger --repeats"
    ]


def result_lines(report: dict[str, Any]) -> list[str]:
    """Return lines about which tokens are identical: between artifacts, and last with decoding without
    speculation."""
    decoding, first = report["decoding"], report["artifacts"][0]["artifact"]
    lines = []
    for figures in report["ways"]:
        if "divergence_from_first_artifact" in figures and figures["chain_len"] == 0 and not figures.get("ngram"):
            lines.append(f"{figures['artifact']}: {identity_text(figures['divergence_from_first_artifact'], first)}")
    alone, parting = f"{decoding} without speculation", []
    for figures in report["ways"]:
        if divergence := figures.get("divergence_from_no_speculation"):
            name = ", ".join(f"{column} {cell}" for column, cell in name_cells(report, figures).items())
            parting.append(f"{name}: {identity_text(divergence, alone)}")
    return lines + (parting or [identity_text(None, alone)])


def identity_text(divergence: dict[str, Any] | None, other: str) -> str:
    if divergence is None:
        return f"identical to {other}"
    where = ", ".join(f"{name} {divergence[name]}" for name in ("line", "turn", "position"))
    margin = divergence.get("top2_margin")
    why = (
        "" if margin is None else f", the two best logits there {margin:.2g} apart{VERDICT[divergence.get('near_tie')]}"
    )
    return (
        f"differs from {other} ({where}: token {divergence['token']}, there {divergence['other_token']}{why}); "
        f"{divergence['differing']} of {divergence['answers']} completions differ"
    )
