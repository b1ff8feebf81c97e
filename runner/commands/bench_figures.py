"""Measures, and computes the figures of the report: ``--json`` prints them, tables show them.

A speed is computed for each pass and reported as median, minimum and maximum over the passes. A ratio is computed
within a pass. Counts are over all passes.
"""

import os
import platform
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from eagle3.runner.commands.batch import progress
from eagle3.runner.commands.bench_measure import (
    Completion,
    Configuration,
    Outcome,
    Workload,
    check_configurations,
    check_same_tokens,
    configurations_of,
    make_workload,
    measure,
    total,
    with_contexts,
)
from eagle3.runner.contract import DECODE, TARGET_VERIFY
from eagle3.runner.loop.cached_tokens import common_prefix
from eagle3.runner.loop.statistics import GenerationStats
from eagle3.runner.model import Model, Result
from eagle3.runner.options import Options
from eagle3.runner.system.machine import version_of

Spread = dict[str, float]
DECODED = f"{TARGET_VERIFY} / {DECODE}"


def spread(values: Iterable[float]) -> Spread:
    values = list(values)
    return {name: round(of(values), 4) for name, of in (("median", median), ("min", min), ("max", max))}


def tokens_per_second(stats: GenerationStats) -> float:
    """Return the new tokens divided by the whole time, including the time of the prompts."""
    return stats.generation_tokens / stats.seconds


def ratio(
    ours: Sequence[GenerationStats],
    theirs: Sequence[GenerationStats],
    rate: Callable[[GenerationStats], float] = tokens_per_second,
) -> Spread:
    """Return the ratio of tokens per second, computed pass by pass."""
    return spread(rate(one) / rate(other) for one, other in zip(ours, theirs, strict=True))


def measured(
    models: dict[str, Model],
    prompts: Path,
    options: dict[str, Any],
    chat: bool,
    lengths: Sequence[int | str] | None,
    repeats: int,
    ngram: bool = False,
    contexts: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Check all inputs, then measure. Returns the report.

    Raises ValueError for what a configuration cannot run, and for artifacts that are not comparable.
    """
    workload = make_workload(prompts, options, chat)
    if contexts:
        workload = with_contexts(workload, contexts, list(models.values()))
    configurations = sum((configurations_of(name, model, lengths, ngram) for name, model in models.items()), [])
    if len(models) > 1:
        check_same_tokens(configurations[0], configurations[-1])
    check_configurations(configurations, workload)
    with progress() as bar:
        task = bar.add_task("measuring", total=repeats * len(workload.prompts) * len(configurations))
        outcomes, step_ms = measure(configurations, workload, repeats, lambda: bar.advance(task))
    return make_report(outcomes, step_ms, workload) | {"contexts": list(contexts or [])}


def make_report(outcomes: Sequence[Outcome], step_ms: Sequence[dict[str, float]], workload: Workload) -> dict[str, Any]:
    """Return the report. ``outcomes``: those of one or two artifacts, for each artifact without speculation first.
    ``step_ms``: an entry per pass."""
    artifacts: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        artifacts.setdefault(outcome.configuration.artifact, []).append(outcome)
    first, *others = artifacts.values()
    has_decode = DECODE in step_ms[0]
    return {
        "prompts": len(workload.prompts),
        "repeats": len(step_ms),
        "options": {"max_new_tokens": Options.max_new_tokens} | workload.options,
        "decoding": workload.decoding,
        "artifacts": [artifact_facts(each[0].configuration) for each in artifacts.values()],
        "machine": machine(first[0].configuration.model.metadata.manifest.get("backend")),
        "versions": versions(),
        "ways": sum((artifact_figures(each, first) for each in others), artifact_figures(first)),
        "step_ms": {name: spread(ms[name] for ms in step_ms) for name in step_ms[0]},
        "step_ratios": {DECODED: spread(ms[TARGET_VERIFY] / ms[DECODE] for ms in step_ms)} if has_decode else {},
    }


def artifact_facts(configuration: Configuration) -> dict[str, Any]:
    metadata = configuration.model.metadata
    facts = {name: getattr(metadata, name) for name in ("chain_len", "max_seq_len", "has_logits", "manifest")}
    facts["window"] = metadata.usual_window
    return {"artifact": configuration.artifact, "has_decode": configuration.model.session.has_decode} | facts


def artifact_figures(outcomes: Sequence[Outcome], first: Sequence[Outcome] | None = None) -> list[dict[str, Any]]:
    """Return the figures of each configuration of an artifact, the one without speculation first. ``first``: the
    outcomes of the first artifact, which they are compared with one by one."""
    found = [configuration_figures(outcome, outcomes[0]) for outcome in outcomes]
    for figures, ours, theirs in zip(found, outcomes, first or (), strict=first is not None):
        figures |= against(ours, theirs, "first_artifact")
    return found


def configuration_figures(outcome: Outcome, alone: Outcome) -> dict[str, Any]:
    passes = outcome.stats()
    summed = total(passes)
    figures: dict[str, Any] = {
        "artifact": outcome.configuration.artifact,
        "chain_len": outcome.configuration.chain_len,
        "ngram": outcome.configuration.ngram,
        **speeds(passes),
    }
    figures |= {"round": round_figures(summed), "stats": summed.as_json()}
    figures["categories"] = {name: category_figures(outcome, alone, name) for name in categories(outcome)}
    return figures if outcome is alone else figures | against(outcome, alone, "no_speculation")


def against(ours: Outcome, theirs: Outcome, name: str) -> dict[str, Any]:
    """Return the ratio of speeds and the divergence of tokens between two configurations."""
    others = [completion.result.token_ids for completion in theirs.completions]
    model = ours.configuration.model
    explain = partial(replayed, model) if model is theirs.configuration.model else None
    return {
        f"ratio_to_{name}": ratio(ours.stats(), theirs.stats()),
        f"divergence_from_{name}": divergence(ours.completions, others, explain),
    }


def speeds(passes: Sequence[GenerationStats]) -> dict[str, Spread]:
    taken: dict[str, Callable[[GenerationStats], float]] = {
        "tokens_per_second": tokens_per_second,
        "prefill_tokens_per_second": lambda stats: stats.prefill_tokens_per_second,
        "decode_tokens_per_second": lambda stats: stats.decode_tokens_per_second,
        "time_to_first_token_ms": lambda stats: 1000 * stats.time_to_first_token,
        "time_per_output_token_ms": lambda stats: 1000 * stats.time_per_output_token,
    }
    return {name: spread(map(of, passes)) for name, of in taken.items()}


def round_figures(stats: GenerationStats) -> dict[str, Any]:
    """Return the time of a round, and the calls and milliseconds of each method per round. The time of the prompts is
    spread over all rounds."""
    rounds = max(1, stats.num_drafts + stats.num_undrafted)
    methods = {
        name: {
            "calls": round(stats.method_calls[name] / rounds, 4),
            "ms_a_call": round(1000 * seconds / stats.method_calls[name], 4),
            "ms": round(1000 * seconds / rounds, 4),
        }
        for name, seconds in stats.method_seconds.items()
    }
    return {"ms": round(1000 * stats.seconds / rounds, 4), "methods": methods, "loop_share": round(stats.loop_share, 4)}


def categories(outcome: Outcome) -> list[str]:
    """Return the categories in the order of the prompts."""
    return list(dict.fromkeys(a.prompt.category for a in outcome.passes[0] if a.prompt.category is not None))


def category_figures(outcome: Outcome, alone: Outcome, category: str) -> dict[str, Any]:
    passes = outcome.stats(category)
    summed = total(passes)
    figures: dict[str, Any] = {**speeds(passes), "stats": summed.counts()}
    if outcome is not alone:
        others = alone.stats(category)
        figures["ratio_to_no_speculation"] = ratio(passes, others)
        figures["decode_ratio_to_no_speculation"] = ratio(passes, others, lambda stats: stats.decode_tokens_per_second)
    return figures


def divergence(
    completions: Iterable[Completion],
    others: Iterable[Sequence[int]],
    explain: Callable[[Result, int], dict[str, Any]] | None = None,
) -> dict[str, Any] | None:
    """Return None if all tokens are identical, otherwise the first token that differs.

    The result has the prompt's line, the turn and the position (both from 0), both tokens (None if a completion had
    ended), and how many of all completions differ. ``explain`` adds facts about a result whose token at a position
    differs.
    """
    pairs = list(zip(completions, others, strict=True))
    differing = [(completion, list(other)) for completion, other in pairs if completion.result.token_ids != list(other)]
    if not differing:
        return None
    completion, other = differing[0]
    tokens = completion.result.token_ids
    position = common_prefix(tokens, other)
    said, other_said = (ids[position] if position < len(ids) else None for ids in (tokens, other))
    found: dict[str, Any] = {"line": completion.prompt.line, "turn": completion.turn, "position": position}
    found |= {"token": said, "other_token": other_said, "differing": len(differing), "answers": len(pairs)}
    return found | (explain(completion.result, position) if explain else {})


def replayed(model: Model, result: Result, _position: int) -> dict[str, Any]:
    """Return whether rounding explains the difference (``runner/loop/lossless.py``), {} if a replay does not
    differ."""
    found = model.replay(result).divergence
    return {"top2_margin": found.margin, "near_tie": found.near_tie} if found else {}


PACKAGES = "eagle3-export", "executorch", "torch"


def machine(backend: str | None) -> str:
    """Return a line with the GPU (for CUDA artifacts), the processor, the cores that this process may use, and the
    system."""
    parts = [f"{processor()}, {cores()} cores", f"{platform.system()} {platform.machine()}"]
    return ", ".join(([gpu()] if backend == "cuda" else []) + parts)


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def versions() -> dict[str, str]:
    return {"Python": platform.python_version()} | {name: version_of(name) for name in PACKAGES}
