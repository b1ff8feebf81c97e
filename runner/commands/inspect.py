"""``eagle3-inspect``: shows the contents of an artifact, as tables and as JSON. ``program.py`` reads the ``.pte``."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eagle3.runner.artifact.opening import find_model, load_artifact
from eagle3.runner.artifact.record import Comparison, compare
from eagle3.runner.contract import EXPORT_RECORD
from eagle3.runner.system.command import OneLineFailures, tell, version_option
from eagle3.runner.system.tables import show_tables, table

if TYPE_CHECKING:
    from rich.table import Table

EPILOG = """
\b
Examples:
  eagle3-inspect out
  eagle3-inspect out --verify
  eagle3-inspect out --json | jq .methods.target_verify.operators
"""


@click.command(cls=OneLineFailures, epilog=EPILOG)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Read every file and compare its sha256 with export.json.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@version_option
def main(artifact: Path, verify: bool, as_json: bool) -> None:
    """Show the contents of an artifact of eagle3-export: its folder or its model.pte.

    It shows files and metadata; for each method its rows, inputs, outputs, delegates, the operators outside them, and
    memory; for CUDA delegates the architectures, kernels, weights, and the symbols that they need from their runtime;
    and where the bytes of the weights are. Shapes are upper bounds. Large files are read only with --verify.
    """
    model = find_model(artifact)
    comparison = compare(model, verify, say=tell)
    if comparison.program_fault:  # everything below is read from the program
        raise ValueError(comparison.program_fault)

    from eagle3.runner.commands.program import inspect_program

    opened = load_artifact(model, comparison.recorded)
    found = {
        "model": str(model),
        "files": files(model, comparison),
        **inspect_program(model, opened.metadata),
    }
    if (fit := measured_fit(model)) is not None:
        found["fit"] = fit
    if as_json:
        click.echo(json.dumps(found))
    else:
        show(found)
    if verify:
        comparison.refuse_faults()
        total = sum(state.bytes or 0 for state in comparison.files)
        tell(f"verified: {len(comparison.files)} files, {total:,} bytes, have the sha256 that {EXPORT_RECORD} records")
    for fault in comparison.faults:
        tell(f"Warning: {fault}")


def measured_fit(model: Path) -> dict[str, Any] | None:
    """Return the measured readings of the draft head from ``export.json``; None if they were not measured."""
    record = model.parent / EXPORT_RECORD
    try:
        found = json.loads(record.read_text()).get("fit") if record.is_file() else None
    except (OSError, ValueError, AttributeError):  # the comparison of files reports an invalid record
        return None
    return found if isinstance(found, dict) and isinstance(found.get("readings"), list) else None


def files(model: Path, comparison: Comparison) -> list[dict[str, Any]]:
    """List the artifact's files. ``matches_record`` is True if the sha256 is the one in ``export.json``, False if the
    size or the sha256 differs, None if nothing or only the size was compared."""
    found = {state.name: (state.bytes, state.matches) for state in comparison.files}
    beside = model.parent.iterdir() if comparison.recorded else [model]
    for path in beside:
        if path.is_file():
            found.setdefault(path.name, (path.stat().st_size, None))
    return [{"name": name, "bytes": size, "matches_record": matches} for name, (size, matches) in sorted(found.items())]


# Tables for people


def show(found: dict[str, Any]) -> None:
    """Print a table per section to stdout."""
    tables = (
        _files_table(found["files"]),
        _metadata_table(found["metadata"]),
        _methods_table(found["methods"]),
        _delegates_table(found["methods"]),
        *_cuda_tables(found["methods"]),
        *([_gpu_memory_table(found["gpu_memory"])] if "gpu_memory" in found else []),
        _memory_table(found["methods"]),
        _operators_table(found["methods"]),
        _buffers_table(found["mutable_buffers"]),
        _weights_table(found["weights"]),
        *([_fit_table(found["fit"])] if "fit" in found else []),
    )
    show_tables(_title(found), tables)


def _title(found: dict[str, Any]) -> str:
    manifest, chain_len = found["metadata"]["get_manifest"], found["metadata"]["get_chain_len"]
    backend = " ".join(filter(None, map(manifest.get, ("backend", "cuda_arch", "host_arch"))))
    draft = manifest.get("draft")
    pair = f"{manifest.get('target')} " + (f"with draft {draft}" if draft else "without a draft")
    return f"{found['model']}: {pair}, {backend}, chain length {chain_len}"


def _files_table(entries: list[dict[str, Any]]) -> "Table":
    words = {True: "same sha256", False: "DIFFERS", None: "not compared"}
    rows = (
        (entry["name"], "missing" if entry["bytes"] is None else entry["bytes"], words[entry["matches_record"]])
        for entry in entries
    )
    return table("Files", ("name", "bytes", EXPORT_RECORD), rows, numbers=("bytes",))


def _fit_table(fit: dict[str, Any]) -> "Table":
    """Return the table of the draft head's readings, which were measured before the export."""
    rows = (
        (
            ", ".join(f"{name}={value}" for name, value in each["changes"].items()) or "as its files say",
            f"{each['acceptance_length']:.2f}",
            " to ".join(f"{bound:.2f}" for bound in each["interval"]),
            " ".join(f"{rate:.2f}" for rate in each["by_position"]),
        )
        for each in fit["readings"]
    )
    columns = ("reading", "tokens a round", "95%", "by position")
    return table(f"Readings of the draft head: {fit.get('verdict')}", columns, rows, numbers=columns[1:])


def _metadata_table(metadata: dict[str, Any]) -> "Table":
    plain = {name: value for name, value in metadata.items() if name != "get_manifest"}
    nested = {f"manifest.{name}": value for name, value in metadata["get_manifest"].items()}
    rows = ((name, value if isinstance(value, str) else json.dumps(value)) for name, value in (plain | nested).items())
    return table("Metadata", ("constant method", "value"), rows)


def _methods_table(methods: dict[str, dict[str, Any]]) -> "Table":
    rows = (
        (name, _rows(method), "\n".join(map(_value, method["inputs"])), "\n".join(map(_value, method["outputs"])))
        for name, method in methods.items()
    )
    return table("Methods (shapes are upper bounds)", ("method", "rows", "inputs", "outputs"), rows)


def _delegates_table(methods: dict[str, dict[str, Any]]) -> "Table":
    """Return a table with a row for each method and backend. The extents of ``DELEGATE_DETAILS`` are columns, in
    bytes."""
    lines = [(name, *pair) for name, method in methods.items() for pair in method["delegates"].items()]
    extents = [{key: value["bytes"] for key, value in facts.items() if _is_extent(value)} for *_, facts in lines]
    details = list(dict.fromkeys(key for sizes in extents for key in sizes))
    rows = (
        (name, backend, facts["count"], facts["bytes"], *(sizes.get(key, "-") for key in details))
        for (name, backend, facts), sizes in zip(lines, extents, strict=True)
    )
    columns = ("method", "backend", "delegates", "bytes", *(key.replace("_", " ") for key in details))
    return table("Delegates", columns, rows, numbers=columns[2:])


def _is_extent(value: object) -> bool:
    return isinstance(value, dict) and "bytes" in value


def _cuda_tables(methods: dict[str, dict[str, Any]]) -> list[Any]:
    cuda = {
        name: method["delegates"]["CudaBackend"]
        for name, method in methods.items()
        if "CudaBackend" in method["delegates"]
    }
    linears = {name: method["linears"] for name, method in methods.items() if method["linears"]}
    tables = [_linears_table(linears)] if linears else []
    return tables + ([_kernels_table(cuda), _cuda_weights_table(cuda), _symbols_table(cuda)] if cuda else [])


def _linears_table(linears: dict[str, dict[str, int]]) -> "Table":
    kinds = list(next(iter(linears.values())))
    rows = ((name, *(counts[kind] for kind in kinds)) for name, counts in linears.items())
    columns = ("method", *(kind.replace("_", " ") for kind in kinds))
    return table("Quantized linears by kernel", columns, rows, numbers=columns[1:])


def _kernels_table(cuda: dict[str, dict[str, Any]]) -> "Table":
    kinds = list(next(iter(cuda.values()))["kernels"])
    rows = (
        (
            name,
            " ".join(arch.removeprefix("sm_") for arch in facts["serves"]),
            *(_counts(facts["architectures"][form]) for form in ("sass", "ptx")),
            *(facts["kernels"][kind]["count"] for kind in kinds),
        )
        for name, facts in cuda.items()
    )
    columns = ("method", "runs on sm_", "SASS (kernels)", "PTX (kernels)", *(kind.replace("_", " ") for kind in kinds))
    return table("CUDA kernels, each once", columns, rows, numbers=columns[4:])


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} ({count:,})" for name, count in counts.items()) or "-"


def _cuda_weights_table(cuda: dict[str, dict[str, Any]]) -> "Table":
    rows = (
        (name, what, extent["count"], extent["bytes"])
        for name, facts in cuda.items()
        for what, extent in (
            *facts["weights"]["by_dtype"].items(),
            *((f"shared with {other}", facts["shared_weights"][other]) for other in cuda if other != name),
        )
    )
    return table("CUDA weights and caches", ("method", "which", "count", "bytes"), rows, numbers=("count", "bytes"))


def _gpu_memory_table(parts: dict[str, int | None]) -> "Table":
    words = {"workspace": "workspace of the longest calls", "context": "CUDA and PyTorch, estimated"}
    rows = ((words.get(part, part), "not recorded" if size is None else size) for part, size in parts.items())
    return table("GPU memory of a run", ("part", "bytes"), rows, numbers=("bytes",))


def _symbols_table(cuda: dict[str, dict[str, Any]]) -> "Table":
    """Return a table with one row for the symbols of a family that the same methods need."""
    users: dict[tuple[str, str], list[str]] = {}
    for name, facts in cuda.items():
        for family, symbols in facts["symbols"].items():
            for symbol in symbols:
                users.setdefault((family, symbol), []).append(name)
    lines: dict[tuple[str, str], list[str]] = {}
    for (family, symbol), names in sorted(users.items()):
        lines.setdefault((family, ", ".join(names)), []).append(symbol)
    rows = ((*line, ", ".join(symbols)) for line, symbols in lines.items())
    return table("Symbols that CUDA libraries need from their runtime", ("family", "needed by", "symbols"), rows)


def _memory_table(methods: dict[str, dict[str, Any]]) -> "Table":
    rows = (
        (name, method["instructions"], " + ".join(map(_arena, method["planned_memory"])))
        for name, method in methods.items()
    )
    columns = ("method", "instructions", "planned memory, bytes")
    return table("Instructions and memory", columns, rows, numbers=columns[1:2])


def _rows(method: dict[str, Any]) -> str:
    if method["rows"] is None:
        return "dynamic" if method["dynamic_length"] else "static"
    least, most = method["rows"].values()
    return f"{least}" if least == most else f"{least} to {most}"


def _value(entry: dict[str, Any]) -> str:
    return f"{entry['dtype']} {entry['shape']}" if "dtype" in entry else entry["kind"]


def _arena(arena: dict[str, Any]) -> str:
    place = "" if arena["device"] == "cpu" else f" on {arena['device']}"
    return f"{arena['bytes']:,}{place}" + (" (mutable)" if arena["mutable"] else "")


def _operators_table(methods: dict[str, dict[str, Any]]) -> "Table":
    names = dict.fromkeys(name for method in methods.values() for name in method["operators"])
    rows = ((name, *(method["operators"].get(name, "-") for method in methods.values())) for name in names)
    return table("Operators outside delegates", ("operator", *methods), rows, numbers=methods)


def _buffers_table(buffers: list[dict[str, Any]]) -> "Table":
    groups: dict[str, list[int]] = {}
    for buffer in buffers:
        groups.setdefault(", ".join(buffer["methods"]) or "none", []).append(buffer["bytes"])
    rows = ((methods, len(sizes), sum(sizes)) for methods, sizes in groups.items())
    columns = ("used by", "buffers", "bytes")
    return table("Mutable buffers", columns, rows, numbers=columns[1:])


def _weights_table(weights: dict[str, Any]) -> "Table":
    constants = weights["constants"]
    parts = [
        ("program", "", weights["program_bytes"]),
        ("delegates' blobs", *weights["delegates"].values()),
        ("named data of delegates", *weights["named_data"].values()),
        ("constants", constants["count"], constants["bytes"]),
        *((f"  {dtype}", *extent.values()) for dtype, extent in constants["by_dtype"].items()),
        ("  used by no instruction", *constants["unused"].values()),
        ("initial state", *weights["initial_state"].values()),
        ("padding", "", weights["padding_bytes"]),
        ("file", "", weights["file_bytes"]),
    ]
    return table("Where the bytes of the .pte are", ("part", "count", "bytes"), parts, numbers=("count", "bytes"))
