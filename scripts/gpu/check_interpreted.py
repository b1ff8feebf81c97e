"""Compares a CUDA artifact, run by Triton's interpreter without a GPU, with the module that it was exported from.

ARTIFACT is made by tests/gpu_stand_in/cuda_artifact.py from a target and a head as small as those of the tests, since
the interpreter takes minutes for a few rounds. Artifact and module generate greedily from random prompts, those whose
tokens the module chooses with the largest margins. The module computes in bfloat16 with its packed weights. The script
prints whether tokens, rounds, acceptance and the draft head's proposals are equal. It exits with 1 if tokens or rounds
differ, too few proposals are equal, a launch has a race, or the stand-in for CUDA's driver refused a call.

    python tests/gpu_stand_in/cuda_artifact.py /tmp/artifact --checkpoint TARGET --draft HEAD --cuda-arch sm_90
    python scripts/gpu/check_interpreted.py /tmp/artifact
"""

import json
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "gpu_stand_in"))

import click
import torch
from gpu_greedy import EagerGreedy
from proposed import proposed

from eagle3.export.configuration.config import ExportConfig
from eagle3.export.lowering.cuda.graph.dispatch import small_m_dispatch
from eagle3.export.pipeline import make_metadata
from eagle3.runner.contract import EXPORT_RECORD
from eagle3.runner.hosts.session import EagerSession
from eagle3.runner.loop.generation import complete

STAND_IN = Path(__file__).resolve().parents[2] / "tests" / "gpu_stand_in"
CANDIDATES, LONGEST = 40, 20
"""The number of random prompts to choose from, and the length of the longest in tokens."""
LEAST = 0.9
"""The least share of equal proposals. Some proposals of a random head are near-ties, which bfloat16 decides."""
PATHS = ("checkpoint", "draft")


def config_of(artifact: Path) -> ExportConfig:
    """Return the flags of an export, from its record."""
    flags = json.loads((artifact / EXPORT_RECORD).read_text())["flags"]
    flags |= {name: Path(flags[name]) for name in PATHS if flags[name]} | {"output_dir": None, "config_folder": None}
    return ExportConfig(**flags)


def chosen(greedy: EagerGreedy, prompts: int, tokens: int) -> list[tuple[float, list[int]]]:
    """Return the random prompts whose next ``tokens`` tokens have the largest margins, each with its smallest
    margin."""
    generator, found = torch.Generator().manual_seed(1), []
    for number in range(CANDIDATES):
        size = 3 + number % (LONGEST - 2)
        prompt = torch.randint(greedy.plan.target_config.vocab_size, (size,), generator=generator).tolist()
        found.append((min(greedy(prompt, tokens, stops=False)[1]), prompt))
    return sorted(found, reverse=True)[:prompts]


def eagerly(greedy: EagerGreedy, prompt: list[int], tokens: int) -> dict[str, Any]:
    """Generate with the module's three methods, as ``interpreted_artifact.generations`` does."""
    speculator = greedy.speculator
    session = EagerSession(speculator, make_metadata(greedy.plan, {}, speculator.draft.ids_in_target()))
    session.has_speculate = False
    with small_m_dispatch(greedy.plan.few_rows), proposed(session) as proposals:
        result = complete(session, prompt, max_new_tokens=tokens, stop_ids=[])
    return {"token_ids": result.token_ids, "stats": result.stats.counts(), "proposals": proposals}


def interpreted(artifact: Path, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    asked = [{"prompt": prompt, "max_new_tokens": tokens} for prompt in prompts]
    command = [sys.executable, STAND_IN / "interpreted_artifact.py", artifact]
    done = subprocess.run(command, input=json.dumps(asked), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise click.ClickException("the artifact did not run: see above")
    return json.loads(done.stdout)


def equal_proposals(expected: list[list[int]], found: list[list[int]]) -> tuple[int, int]:
    """Return the number of equal proposals and the number of all. A proposal that one side lacks is not equal."""
    calls = zip_longest(expected, found, fillvalue=[])
    pairs = [pair for ours, theirs in calls for pair in zip_longest(ours, theirs)]
    return sum(one == other for one, other in pairs), len(pairs)


def compare(expected: dict[str, Any], found: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the counts of equal results for one prompt, and the faults."""
    wrong = []
    for way in ("fused_rounds", "three_methods"):
        wrong += [f"{way}: {name}" for name in ("token_ids", "stats") if found[way][name] != expected[name]]
    same, every = equal_proposals(expected["proposals"], found["proposals"])
    if same < LEAST * every:
        wrong.append("proposals")
    length = expected["stats"]["mean_acceptance_length"]
    return {"tokens": len(expected["token_ids"]), "acceptance": length, "proposals": f"{same} of {every}"}, wrong


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "))
@click.argument("artifact", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--prompts", default=2, show_default=True, help="Random prompts to compare.")
@click.option("--tokens", default=8, show_default=True, help="New tokens behind each.")
def main(artifact: Path, prompts: int, tokens: int) -> None:
    greedy, wrong = EagerGreedy("cpu", config_of(artifact)), []
    best = chosen(greedy, prompts, tokens)
    found = interpreted(artifact, [prompt for _, prompt in best], tokens)
    for (margin, prompt), generation in zip(best, found["generations"], strict=True):
        facts, parted = compare(eagerly(greedy, prompt, tokens), generation)
        said = ", ".join(f"{name} {value}" for name, value in facts.items())
        click.echo(f"prompt of {len(prompt)}, smallest margin {margin:.3f}: {said}; {', '.join(parted) or 'equal'}")
        wrong += parted
    if any(found["left"].values()):
        wrong.append(f"not released: {found['left']}")
    for name in ("races", "journal"):
        if found[name]:
            wrong.append(f"{name}: {found[name]}")
    if wrong:
        raise click.ClickException("; ".join(map(str, wrong)))
    click.echo("equal to the module")


if __name__ == "__main__":
    main()
