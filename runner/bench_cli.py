"""``eagle3-bench``: acceptance, speed and where the time goes, over a file of prompts."""

import json
from pathlib import Path
from typing import Any

import click

from eagle3.runner.contract.console import OneLineFailures
from eagle3.runner.threads import leave_threads_to_xnnpack

EPILOG = """
\b
FILE has a JSON object per line: {"prompt": "text"} or {"prompt_tokens": [1, 2, 3]}.

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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.version_option(package_name="eagle3-export")
def main(artifact: Path, prompts: Path, max_new_tokens: int, checkpoint: Path | None, as_json: bool) -> None:
    """Measure an artifact of eagle3-export.

    Reports acceptance under vLLM's names and tokens per second; against decoding without speculation where the artifact
    has decode (eagle3-export --with-decode), against transformers in float32 with --checkpoint.
    """
    leave_threads_to_xnnpack()

    from eagle3.runner.artifact import open_artifact, open_session

    opened = open_artifact(artifact)
    ids = read_prompts(prompts, opened.folder)
    report = measure(open_session(opened), ids, max_new_tokens, checkpoint)
    click.echo(json.dumps(report) if as_json else as_text(report))


def read_prompts(file: Path, folder: Path) -> list[list[int]]:
    """Token ids per line of a jsonl file. Raises ValueError naming the line."""
    from eagle3.runner.text import Text

    text, prompts = None, []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if "prompt_tokens" in entry:
                prompts.append([int(token) for token in entry["prompt_tokens"]])
                continue
            text = text or Text(folder)
            prompts.append(text.encode(entry["prompt"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f'{file} line {number}: expected {{"prompt": "text"}} ({error})') from error
    if not prompts:
        raise ValueError(f"{file} has no prompts")
    return prompts


def measure(session, prompts: list[list[int]], max_new_tokens: int, checkpoint: Path | None) -> dict[str, Any]:
    """Warm up, then run every way that the artifact and the flags allow, and compare."""
    from eagle3.runner.bench import TransformersReference, first_divergence, run_prompts, step_milliseconds

    run_prompts(session, prompts[:1], max_new_tokens, speculate=True)
    speculative = run_prompts(session, prompts, max_new_tokens, speculate=True)
    report = {
        "prompts": len(prompts),
        "max_new_tokens": max_new_tokens,
        "stats": speculative.stats.as_json(),
        "speculation": speculative.as_json(),
    }
    ratios = {}
    position = min(128, session.metadata.max_seq_len // 2)
    steps = step_milliseconds(session, position)
    plain = None
    if session.has_decode:
        plain = run_prompts(session, prompts, max_new_tokens, speculate=False)
        report["no_speculation"] = plain.as_json()
        ratios["speculation / no_speculation, tokens per second"] = (
            speculative.tokens_per_second / plain.tokens_per_second
        )
        ratios["target_verify / decode, time"] = steps["target_verify"] / steps["decode"]
        report["divergence_from_decode"] = _divergence(first_divergence(speculative.token_ids, plain.token_ids))
    if checkpoint:
        reference = TransformersReference(checkpoint)
        reference.generate(prompts[:1], max_new_tokens, session.metadata.max_seq_len)
        token_ids, seconds = reference.generate(prompts, max_new_tokens, session.metadata.max_seq_len)
        rate = sum(map(len, token_ids)) / seconds
        report["transformers"] = {"tokens_per_second": round(rate, 1)}
        steps["transformers, same rows"] = reference.rows_ms(session.metadata.chain_len + 1, position)
        ratios["speculation / transformers, tokens per second"] = speculative.tokens_per_second / rate
        if plain:
            ratios["no_speculation / transformers, tokens per second"] = plain.tokens_per_second / rate
        ratios["target_verify / transformers, time"] = steps["target_verify"] / steps["transformers, same rows"]
        where = first_divergence(speculative.token_ids, token_ids)
        margin = reference.margin(prompts[where[0]], token_ids[where[0]], where[1]) if where else None
        report["divergence_from_transformers"] = _divergence(where, margin)
    report["step_ms"] = {name: round(ms, 4) for name, ms in steps.items()}
    report["ratios"] = {name: round(ratio, 3) for name, ratio in ratios.items()}
    return report


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
