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
    tables = configuration_cells(report), time_cells(report), round_cells(report), category_cells(report)
    lines = [*step_lines(report), *noise_lines(report), *result_lines(report)]
    shown = [rendered(cells) for cells in tables if cells]
    return "\n\n".join([asked_line(report), *shown, "\n".join(lines)])


def as_markdown(report: dict[str, Any]) -> str:
    """Return Markdown tables of the figures, and lines about prompts, artifacts and machine."""
    rows = [row | first for row, first in zip(configuration_cells(report), first_token_cells(report), strict=True)]
    shown = [rendered(cells, box.MARKDOWN) for cells in (rows, category_cells(report)) if cells]
    lines = [asked_line(report), *map(artifact_line, report["artifacts"]), machine_line(report)]
    lines += [*noise_lines(report), *result_lines(report)]
    return "\n\n".join([*shown, "\n".join(f"- {line}" for line in lines)])


def profile_text(profile: dict[str, Any]) -> str:
    """Return the result of ``profile.py``: a table per method, with the parts that take at least 1 % of it."""
    lines = [f"{profile['machine']}; at position {profile['position']}"]
    return "\n\n".join(lines + [method_text(name, method) for name, method in profile["methods"].items()])


def method_text(name: str, method: dict[str, Any]) -> str:
    rows, ms, read, size = (method[key] for key in ("rows", "ms", "read_ms", "weight_bytes"))
    shown = [part for part in method["parts"] if part["ms"] >= method["traced_ms"] / 100]
    rest = method["traced_ms"] - sum(part["ms"] for part in shown)
    cells = [
        {
            name: part["name"],
            "times": str(part["count"] or ""),
            "ms": f"{part['ms']:.3f}",
            "share": f"{part['ms'] / method['traced_ms']:.0%}",
        }
        for part in [*shown, {"name": "the others", "count": 0, "ms": rest}]
    ]
    lines = [
        f"{name}, {rows} {'row' if rows == 1 else 'rows'}: {ms:.3f} ms, traced {method['traced_ms']:.3f}; "
        f"{method['delegates']} delegates of {sum(method['nodes'].values())} nodes",
        f"summing its {size / 1e6:.1f} MB of weights on all cores takes {read:.3f} ms ({size / read / 1e6:.0f} GB/s), "
        f"the method {ms / read:.2f} times as long; as one matrix product its {method['multiply_adds'] / 1e6:.1f} "
        f"million multiply-adds take {method['multiply_ms']:.3f} ms",
    ]
    return "\n".join([*lines, rendered(cells)])


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
        for key, other in (("ratio_to_first_artifact", first), ("ratio_to_transformers", "transformers")):
            if any(key in each for each in report["ways"]):
                row[f"to {other}"] = spread_text(figures[key], 2) if key in figures else "1"
        rows.append(row)
    return rows


def first_token_cells(report: dict[str, Any]) -> Cells:
    return [{"first token": f"{figures['time_to_first_token_ms']['median']:.1f} ms"} for figures in report["ways"]]


def time_cells(report: dict[str, Any]) -> Cells:
    """Return a row per configuration: time to first token, prefill and decode rates, time of a round, the loop's share
    of it."""
    rows = []
    for figures, first in zip(report["ways"], first_token_cells(report), strict=True):
        row = name_cells(report, figures) | first
        row |= {f"{part}, tokens/s": rate_text(figures[f"{part}_tokens_per_second"]) for part in ("prefill", "decode")}
        row["a round"] = f"{figures['round']['ms']:.3f} ms"
        rows.append(row | {"the loop itself": f"{figures['round']['loop_share']:.1%}"})
    return rows


def round_cells(report: dict[str, Any]) -> Cells:
    """Return a row per configuration: calls per round and milliseconds per call of each method."""
    methods = dict.fromkeys(name for figures in report["ways"] for name in figures["round"]["methods"])
    rows = []
    for figures in report["ways"]:
        row = name_cells(report, figures)
        for name in methods:
            called = figures["round"]["methods"].get(name)
            row[name] = f"{called['calls']:.2f} x {called['ms_a_call']:.3f} ms" if called else "-"
        rows.append(row)
    return rows


def category_cells(report: dict[str, Any]) -> Cells:
    """Return a row per category and configuration; none if the prompts have no categories. For long contexts the speeds
    are of decoding only, and the time to the first token is a column of its own."""
    if report.get("contexts"):
        return context_cells(report)
    names = dict.fromkeys(name for figures in report["ways"] for name in figures["categories"])
    return [
        {"category": name} | name_cells(report, figures) | speculation_cells(figures["categories"][name])
        for name in names
        for figures in report["ways"]
    ]


def context_cells(report: dict[str, Any]) -> Cells:
    """Return a row per context and configuration: decoding after the context, and the time to the first token."""
    rows = []
    for context in report["contexts"]:
        for figures in report["ways"]:
            found = figures["categories"][str(context)]
            decoding = found | {"tokens_per_second": found["decode_tokens_per_second"]}
            if "decode_ratio_to_no_speculation" in found:
                decoding["ratio_to_no_speculation"] = found["decode_ratio_to_no_speculation"]
            cells = {"context": f"{context:,}"} | name_cells(report, figures) | speculation_cells(decoding)
            rows.append(cells | {"first token": f"{found['time_to_first_token_ms']['median']:.1f} ms"})
    return rows


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
    """Return a warning if a ratio, computed within each pass, differs from the ratio of the medians. The speed then
    changed between passes."""
    by_artifact = [
        [figures for figures in report["ways"] if figures["artifact"] == each["artifact"]]
        for each in report["artifacts"]
    ]
    furthest = 0.0
    for configurations in by_artifact:
        for figures, first in zip(configurations, by_artifact[0], strict=True):
            for name, other in (("ratio_to_no_speculation", configurations[0]), ("ratio_to_first_artifact", first)):
                if name in figures:
                    medians = figures["tokens_per_second"]["median"] / other["tokens_per_second"]["median"]
                    furthest = max(furthest, abs(medians / figures[name]["median"] - 1))
    if furthest <= NOISE:
        return []
    return [
        f"the machine was noisy: the medians of the ratios and the ratios of the median speeds differ by up to "
        f"{furthest:.1%}; give a larger --repeats"
    ]


def result_lines(report: dict[str, Any]) -> list[str]:
    """Return lines about which tokens are identical: between artifacts, with transformers, and last with decoding
    without speculation."""
    decoding, first = report["decoding"], report["artifacts"][0]["artifact"]
    lines = []
    for figures in report["ways"]:
        if "divergence_from_first_artifact" in figures and figures["chain_len"] == 0 and not figures.get("ngram"):
            lines.append(f"{figures['artifact']}: {identity_text(figures['divergence_from_first_artifact'], first)}")
    if "transformers" in report:
        lines.append(f"transformers: {report['transformers']['tokens_per_second']:.0f} tokens/s")
        lines.append(identity_text(report["transformers"]["divergence"], f"{decoding} by transformers"))
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
