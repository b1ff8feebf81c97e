"""``eagle3-bench``: acceptance, speed and where the time goes, over a file of prompts."""

import json
from pathlib import Path
from typing import Any

import click

from eagle3.runner.contract.console import OneLineFailures, runtime_option, tell
from eagle3.runner.threads import leave_threads_to_xnnpack

EPILOG = """
\b
FILE has a JSON object per line: {"prompt": "text"}, {"prompt_tokens": [1, 2]}
or {"messages": [...]}; or it is that of MT-Bench, SpecBench, GSM8K or HumanEval.
First turns are run, by the options of this command alone.

\b
Examples:
  eagle3-bench out --prompts scripts/prompts.jsonl
  eagle3-bench out --prompts scripts/prompts.jsonl --checkpoint targets/gemma4_tiny/target --json
"""


@click.command(cls=OneLineFailures, epilog=EPILOG)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--prompts", required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE")
@click.option("--max-new-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option(
    "--checkpoint", type=click.Path(path_type=Path), help="The target's folder: compare with transformers too."
)
@runtime_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.version_option(package_name="eagle3-export")
def main(
    artifact: Path, prompts: Path, max_new_tokens: int, checkpoint: Path | None, runtime: str, as_json: bool
) -> None:
    """Measure an artifact of eagle3-export.

    Reports acceptance under vLLM's names and tokens per second; against decoding without speculation where the artifact
    has decode (eagle3-export --with-decode), against transformers in float32 with --checkpoint.
    """
    leave_threads_to_xnnpack()

    from eagle3.runner.artifact import open_artifact, open_session
    from eagle3.runner.prompts import read_prompts
    from eagle3.runner.text import Text

    opened = open_artifact(artifact, say=tell)
    given = read_prompts(prompts)
    text = None if all(prompt.tokens for prompt in given) else Text(opened.folder)
    ids = [prompt.encode(text) for prompt in given]
    report = measure(open_session(opened, runtime), ids, max_new_tokens, checkpoint)
    click.echo(json.dumps(report) if as_json else as_text(report))


def measure(session, prompts: list[list[int]], max_new_tokens: int, checkpoint: Path | None) -> dict[str, Any]:
    """Run the artifact every way it allows, prompt by prompt in turns, then transformers, and compare."""
    from eagle3.runner.bench.measure import Run, first_divergence, session_steps, step_milliseconds

    ways = {"speculation": True} | ({"no_speculation": False} if session.has_decode else {})
    runs = {name: Run() for name in ways}
    position = min(128, session.metadata.max_seq_len // 2)
    steps = session_steps(session, position)
    step_milliseconds(steps, repeats=10)  # warm
    counts = [min(max_new_tokens, session.metadata.max_seq_len - len(prompt)) for prompt in prompts]
    for prompt, count in zip(prompts, counts, strict=True):
        for name, speculate in ways.items():
            runs[name].add(session, prompt, count, speculate)
    step_ms = step_milliseconds(steps)
    ours = runs["speculation"]
    report = {"prompts": len(prompts), "max_new_tokens": max_new_tokens, "stats": ours.stats.as_json()}
    report |= {name: run.as_json() for name, run in runs.items()}
    rates = {name: run.tokens_per_second for name, run in runs.items()}
    ratios = {}
    if "no_speculation" in runs:
        ratios["speculation / no_speculation, tokens per second"] = rates["speculation"] / rates["no_speculation"]
        ratios["target_verify / decode, time"] = step_ms["target_verify"] / step_ms["decode"]
        where = first_divergence(ours.token_ids, runs["no_speculation"].token_ids)
        report["divergence_from_decode"] = _divergence(where)
    if checkpoint:
        theirs, rate, ms, margin = _transformers(checkpoint, prompts, counts, session.metadata.chain_len + 1, position)
        report["transformers"] = {"tokens_per_second": round(rate, 1)}
        step_ms["transformers, same rows"] = ms
        ratios |= {f"{name} / transformers, tokens per second": own / rate for name, own in rates.items()}
        ratios["target_verify / transformers, time"] = step_ms["target_verify"] / ms
        where = first_divergence(ours.token_ids, theirs)
        report["divergence_from_transformers"] = _divergence(where, margin(*where) if where else None)
    report["step_ms"] = {name: round(taken, 4) for name, taken in step_ms.items()}
    report["ratios"] = {name: round(ratio, 3) for name, ratio in ratios.items()}
    return report


def _transformers(checkpoint: Path, prompts: list[list[int]], counts: list[int], rows: int, position: int):
    """Greedy continuations, tokens per second, milliseconds of a forward of ``rows``, and a function for margins.

    After the artifact's own runs: transformers takes a thread a core, and those keep spinning for a while.
    """
    from eagle3.runner.bench.measure import TransformersReference, step_milliseconds

    reference = TransformersReference(checkpoint)
    step = {"step": reference.step(rows, position)}
    step_milliseconds(step, repeats=10)  # warm
    reference.generate(prompts[0], min(8, counts[0]))
    done = [reference.generate(prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
    theirs = [token_ids for token_ids, _ in done]
    rate = sum(map(len, theirs)) / sum(seconds for _, seconds in done)
    ms = step_milliseconds(step)["step"]
    return theirs, rate, ms, lambda prompt, at: reference.margin(prompts[prompt], theirs[prompt], at)


def _divergence(where: tuple[int, int] | None, margin: float | None = None) -> dict[str, Any] | None:
    """None: identical. Otherwise the first differing token, and by how much the two best logits differed there."""
    if where is None:
        return None
    return {"prompt": where[0], "position": where[1], "top2_margin": margin}


def as_text(report: dict[str, Any]) -> str:
    stats = report["stats"]
    rates = " ".join(f"{rate:.3f}" for rate in stats["acceptance_rate_per_position"])
    lines = [
        f"{report['prompts']} prompts, {report['max_new_tokens']} new tokens each",
        f"mean acceptance length {stats['mean_acceptance_length']:.2f} (by position: {rates})",
    ]
    for way in ("speculation", "no_speculation"):
        if way in report:
            run = report[way]
            lines.append(f"{way}: {run['tokens_per_second']:.0f} tokens/s, loop's own share {run['loop_share']:.1%}")
            lines += [f"  {name:<14} {m['calls']:>6} x {m['mean_ms']:.3f} ms" for name, m in run["methods"].items()]
    if "transformers" in report:
        lines.append(f"transformers: {report['transformers']['tokens_per_second']:.0f} tokens/s")
    lines += [f"step {name}: {ms:.3f} ms" for name, ms in report["step_ms"].items()]
    lines += [f"{name}: {ratio:.2f}" for name, ratio in report["ratios"].items()]
    for key, other in (
        ("divergence_from_decode", "greedy decoding without speculation"),
        ("divergence_from_transformers", "greedy decoding by transformers"),
    ):
        if key in report:
            lines.append(f"identical to {other}" if report[key] is None else f"parts from {other}: {report[key]}")
    return "\n".join(lines)
