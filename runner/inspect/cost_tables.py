"""Formats the result of ``cost/bound.py`` as the tables of ``eagle3-inspect --cost``."""

import math
import re
from typing import TYPE_CHECKING, Any

from eagle3.runner.artifact.cuda_library import KERNEL_KINDS
from eagle3.runner.console.tables import table
from eagle3.runner.inspect.cost.estimate import MEASURED_ON

if TYPE_CHECKING:
    from rich.table import Table

SHOWN_NAME = 26  # characters of a kernel's name, including the number at its end
SHORT = 0.002  # kernels below this share of a method's bound are summed up in one line


def cost_tables(cost: dict[str, Any]) -> list[Any]:
    """Return the table of launches, a table of kernels for each method, and the table of bounds."""
    kernels = [_kernels_table(name, method) for name, method in cost["methods"].items()]
    return [_launches_table(cost), *kernels, _bounds_table(cost)]


def _launches_table(cost: dict[str, Any]) -> "Table":
    rows = [
        (name, method["rows"], *(method["launches"][kind] for kind in (*KERNEL_KINDS, "all")))
        for name, method in cost["methods"].items()
    ]
    spread = [*("" for _ in KERNEL_KINDS)]
    rows.append((_round_name(cost), "", *spread, cost["round"]["launches"]))
    columns = ("method", "rows", *(kind.replace("_", " ") for kind in KERNEL_KINDS), "all")
    return table("Launches of one call, by kind of kernel", columns, rows, numbers=columns[1:])


def _round_name(cost: dict[str, Any]) -> str:
    return "round: " + " + ".join(f"{count} {name}" for name, count in cost["round"]["calls"].items())


def _kernels_table(name: str, method: dict[str, Any]) -> "Table":
    """Return the kernels of a method, the slowest on the first GPU first, with the limit that makes it slow. Short
    kernels without spills share one row."""
    gpu = next(iter(method["bounds"]))

    def least(entry: dict[str, Any]) -> float:
        return entry["count"] * max(entry["seconds"][gpu].values())

    floor = SHORT * method["bounds"][gpu]["bound"]
    shown = [entry for entry in method["kernels"] if least(entry) >= floor or entry["spill_bytes"]]
    others = [entry for entry in method["kernels"] if entry not in shown]
    rows = [
        (
            _short(entry["kernel"]),
            entry["count"],
            math.prod(entry["grid"]),
            *(entry[key] for key in ("threads", "registers", "spill_bytes", "shared_bytes")),
            "-" if entry["instructions_per_weight"] is None else f"{entry['instructions_per_weight']:.2f}",
            _lines(entry["lines"]),
            *(entry["bytes_in_flight"], entry["weight_bytes"] + entry["cache_bytes"]),
            f"{least(entry) * 1e6:,.1f}",
            max(entry["seconds"][gpu], key=entry["seconds"][gpu].get),
        )
        for entry in sorted(shown, key=least, reverse=True)
    ]
    rest = f"{len(others)} others, without spills"
    rows.append((rest, sum(entry["count"] for entry in others), *[""] * 9, f"{sum(map(least, others)) * 1e6:,.1f}", ""))
    sizes = "threads", "registers", "spilled", "shared", "instr/weight", "lines", "in flight", "bytes read"
    columns = ("kernel", "calls", "blocks", *sizes, f"us, {gpu}", "due to")
    title = (
        f"Kernels of {name} (rows: {method['rows']:,}; spilled: bytes a thread; shared, in flight: bytes a block; "
        "bytes read: of weights and caches; lines: L1 lines of a warp's load, and the fewest possible)"
    )
    return table(title, columns, rows, numbers={*columns} - {"kernel", "due to"})


def _lines(found: dict[str, Any] | None) -> str:
    return "-" if found is None else f"{found['lines']:.1f}, {found['fewest']:.1f}"


def _short(kernel: str) -> str:
    ending = re.search(r"(?:_\d+)?$", kernel)
    number = ending[0] if ending else ""
    name, room = kernel.removesuffix(number), SHOWN_NAME - len(number)
    return kernel if len(name) <= room else f"{name[: room - 2]}..{number}"


def _bounds_table(cost: dict[str, Any]) -> "Table":
    parts = cost["methods"] | {_round_name(cost): cost["round"]}
    rows = (
        (
            name,
            gpu,
            *(f"{bound[key] * 1e3:,.3f}" for key in ("limit", "bound", "bound_with_launches")),
            *(f"{bound[key]:.2f}" for key in ("share_of_limit", "share_with_launches")),
            f"{part['estimates'][gpu]['seconds'] * 1e3:,.3f}{' scaled' * part['estimates'][gpu]['scaled']}",
        )
        for name, part in parts.items()
        for gpu, bound in part["bounds"].items()
    )
    gap = cost["assumed"]["launch_seconds"] * 1e6
    shares = f"with {gap:.0f} us a launch", "share", "share with launches"
    columns = ("call", "GPU", "memory limit", "bound", *shares, f"estimate, from an {MEASURED_ON}")
    caches = f" and the caches of {cost['context']:,} tokens" if cost["context"] else ""
    title = (
        f"Lower bounds and estimates in ms (memory limit: every weight{caches} read once; share: the limit's share of "
        "the bound; estimate: from measured times of kernels, by a CUDA graph)"
    )
    return table(title, columns, rows, numbers=columns[2:])
