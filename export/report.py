"""Formats what ``eagle3-export`` prints on stdout: the plan of a dry run, or the result of an export."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from eagle3.export.checkpoints.source import TensorHeader
from eagle3.export.checks.preflight import memory_of_export
from eagle3.export.lowering.backend import load_backend
from eagle3.export.planning.memory import GpuMemory, longest_context
from eagle3.export.planning.plan import Plan
from eagle3.runner.system.gpus import GPUS, Gpu, gpus_of
from eagle3.runner.system.machine import size_text, slowness

RUNNER_BYTES = 260_000_000
"""The memory that ``eagle3-run`` takes on a CPU besides weights and caches: most of it is PyTorch."""


def plan_json(plan: Plan) -> dict[str, Any]:
    draft, target, backend = plan.draft, plan.target_headers, load_backend(plan.config.backend)
    memory, artifact, seconds = backend.footprint(plan), backend.artifact_bytes(plan), backend.export_seconds(plan)
    return {
        "target": plan.config.target_model,
        "backend": plan.config.backend,
        "methods": [{"name": m.name, "min_len": m.min_len, "max_len": m.max_len} for m in plan.methods],
        "taps": list(plan.taps),
        "taps_are": str(plan.chosen_taps),
        "chain_len": plan.chain_len,
        "verify_rows": plan.verify_rows,
        "max_seq_len": plan.max_seq_len,
        "target_parameters": sum(header.elements for header in target.values()),
        "target_bytes": sum(header.bytes for header in target.values()),
        "draft_kind": draft.kind,
        "draft_dialect": draft.dialect,
        "draft_parameters": sum(header.elements for header in draft.headers.values()),
        "draft_bytes": sum(header.bytes for header in draft.headers.values()),
        "draft_vocab_size": draft.draft_vocab_size,
        "shares_embedding": not draft.has_embedding,
        "artifact_bytes": artifact,
        "run_bytes": memory.total if memory else artifact and artifact + plan.cache_bytes + RUNNER_BYTES,
        "export_bytes": memory_of_export(plan, backend).takes,
        "export_seconds": seconds and round(seconds * slowness()),
        "fits": memory and {gpu.name: memory.total <= gpu.memory for gpu in _gpus(plan)},
        "longest_context": memory and {gpu.name: _longest_context(plan, gpu, memory) for gpu in _gpus(plan)},
        "gpu_memory": memory and asdict(memory) | {"total": memory.total},
    }


def plan_text(plan: Plan, sources: Iterable[str] = ()) -> str:
    """Return the plan as a dry run prints it. ``sources`` are lines on where the checkpoints come from."""
    facts = plan_json(plan)
    of_head = [
        f"draft    {draft_text(plan)}: {_millions(facts['draft_parameters'])}, "
        f"{size_text(facts['draft_bytes'])} on disk, a vocabulary of {facts['draft_vocab_size']:,}"
        + _shared_text(plan)
        + (f", trained for {plan.draft.verifier}" if plan.draft.verifier else ""),
        f"taps     {plan.chosen_taps}",
    ]
    lines = [
        f"target   {facts['target']}: {_millions(facts['target_parameters'])}, "
        f"{size_text(facts['target_bytes'])} on disk",
        *(of_head if plan.has_draft else [f"draft    {draft_text(plan)}"]),
        f"backend  {facts['backend']}, chain length {plan.chain_len}, verify window {plan.verify_rows} rows, "
        f"max_seq_len {plan.max_seq_len}",
    ]
    if facts["gpu_memory"]:
        lines.append(f"memory   a run takes {GpuMemory.of(facts['gpu_memory'])}")
        lines.append(f"gpus     {_gpus_text(facts['fits'])}")
        lines.append(f"tokens   {_contexts_text(plan, facts['longest_context'])}")
    if facts["artifact_bytes"]:
        parts = (facts["artifact_bytes"], "weights"), (plan.cache_bytes, "KV caches"), (RUNNER_BYTES, "eagle3-run")
        shown = ", ".join(f"{size_text(size)} for {part}" for size, part in parts)
        lines.append(f"memory   a run takes about {size_text(facts['run_bytes'])}: {shown}")
        lines.append(f"size     model.pte takes about {size_text(facts['artifact_bytes'])}")
    if takes := facts["export_bytes"]:
        lines.append(f"memory   the export takes about {size_text(takes)}")
    if seconds := facts["export_seconds"]:
        lines.append(f"seconds  the export takes about {seconds:,} on this machine: a guess, within a factor of two")
    if plan.quantized_headers:
        lines.insert(1, quantized_text(plan))
    for method in plan.methods:
        span = f"{method.min_len}" if method.min_len == method.max_len else f"{method.min_len} to {method.max_len}"
        lines.append(f"method   {method.name:<14} {span} rows")
    lines.extend(sources)
    return "\n".join([*lines, "nothing was written (--dry-run)"])


def _gpus(plan: Plan) -> list[Gpu]:
    """Return the known GPUs of the architecture in ``--cuda-arch``, or all known GPUs without the flag."""
    arch = plan.config.cuda_arch
    return gpus_of(arch) if arch else list(GPUS.values())


def _longest_context(plan: Plan, gpu: Gpu, memory: GpuMemory) -> int:
    """Return the longest ``--max-seq-len`` with which a run fits on a GPU; 0 if none fits."""
    most = plan.target_config.max_position_embeddings
    return longest_context(plan.caches, plan.max_seq_len, gpu.memory - memory.total, most)


def _contexts_text(plan: Plan, longest: Mapping[str, int]) -> str:
    """Return the longest context that each GPU holds."""
    by_tokens: dict[int, list[str]] = {}
    for name, tokens in longest.items():
        by_tokens.setdefault(tokens, []).append(name)
    held = (f"{', '.join(names)} {tokens:,} tokens" for tokens, names in by_tokens.items() if tokens)
    kept = "8 bits" if plan.config.int8_caches else "bfloat16"
    return f"the longest context, with caches in {kept}: {'; '.join(held) or 'none'}"


def _gpus_text(fits: Mapping[str, bool]) -> str:
    by_verdict: dict[str, list[str]] = {}
    for name, holds in fits.items():
        by_verdict.setdefault("fits" if holds else "does not fit", []).append(f"{name} ({GPUS[name].memory >> 30} GiB)")
    return "; ".join(f"{verdict} {', '.join(names)}" for verdict, names in by_verdict.items())


def draft_text(plan: Plan) -> str:
    """Return the kind and dialect of the head."""
    if not plan.has_draft:
        return "no draft head: prompt lookup proposes tokens from the text"
    copies = " and ".join(plan.draft.copies)
    return f"{plan.draft.kind} head of {plan.draft.dialect}" + (
        f" (its {copies}: copies of the target's)" if copies else ""
    )


def quantized_text(plan: Plan) -> str:
    """Return a line on a quantized checkpoint: how many weights are quantized, and how the export converts them."""
    kept = plan.kept_headers
    others = [header for name, header in plan.quantized_headers.items() if name not in kept]
    line = f"weights  {len(kept)} are quantized already ({_kinds(kept.values())}) and keep their codes"
    if not others:
        return line
    dense = sum(4 * header.elements for header in others)
    first = f"{line}, {len(others)} " if kept else f"weights  {len(others)} "
    line = f"{first}are quantized ({_kinds(others)}) and dequantized to float32 as they load"
    if plan.qlinear != "checkpoint":
        return f"{line}, then quantized again: {plan.qlinear}"
    again = "; then the embedding is quantized to 8 bits" if plan.config.qembedding == "8w" else ""
    return f"{line}, {size_text(dense)}{again}"


def _kinds(headers: Iterable[TensorHeader]) -> str:
    return " and ".join(sorted({header.dtype for header in headers}))


def result_text(plan: Plan, record: dict[str, Any]) -> str:
    output = plan.config.folder
    seconds = sum(stage["seconds"] for stage in record["stages"])
    total = sum((output / name).stat().st_size for name in record["files"])
    prompt = "--prompt TEXT" if "tokenizer.json" in record["files"] else "--prompt-tokens 1,2,3"
    return f"{output}: {size_text(total)} in {seconds:.0f} s. Next: eagle3-run {output} {prompt}"


def _shared_text(plan: Plan) -> str:
    copy = 2 * plan.target_config.vocab_size * plan.target_config.hidden_size  # bytes, in bfloat16
    embedding = "" if plan.draft.has_embedding else f", the target's embedding (a copy would take {size_text(copy)})"
    return embedding + (", the target's lm_head" if plan.draft.shares_lm_head else "")


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M parameters"
