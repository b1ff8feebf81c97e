"""Compares CUDA artifacts of small pairs, run on a GPU, with the modules that they were exported from elsewhere.

    python scripts/gpu/check_on_gpu.py expect ARTIFACT...    # with the checkpoints: writes ARTIFACT.expected.json
    python scripts/gpu/check_on_gpu.py compare ARTIFACT...    # on a GPU, with those files beside the artifacts

Both generate greedily from the same random prompts, those whose tokens the module chooses with the largest margins. The
module computes in bfloat16 with its packed weights on the CPU. The artifact runs fused rounds, replayed as CUDA graphs,
and the three methods. A line for each prompt says whether tokens, rounds, acceptance and proposals are equal. The
script exits with 1 if a token differs by more than a near-tie, if less than half of the proposals after equal tokens
are equal, or if an artifact does not run.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from check_interpreted import chosen, config_of, eagerly, equal_proposals
from gpu_greedy import NEAR_TIE, EagerGreedy, first_difference
from proposed import proposed

from eagle3.runner.artifact.opening import open_artifact
from eagle3.runner.hosts.opening import open_session
from eagle3.runner.hosts.session import Session
from eagle3.runner.loop.generation import complete

LEAST = 0.5
"""The least share of equal proposals. Proposals of a random head are often near-ties; those of two different heads
would be equal about once in V, the size of the vocabulary."""
ARTIFACTS = click.argument(
    "artifacts", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path)
)


@click.group(help=__doc__.replace("\n\n    ", "\n\n\b\n    "))
def main() -> None:
    pass


def expected_file(artifact: Path) -> Path:
    return artifact.with_name(f"{artifact.name}.expected.json")


@main.command()
@ARTIFACTS
@click.option("--prompts", default=3, show_default=True, help="Random prompts to compare.")
@click.option("--tokens", default=24, show_default=True, help="New tokens behind each.")
def expect(artifacts: tuple[Path, ...], prompts: int, tokens: int) -> None:
    """Write the tokens that the module of each artifact generates."""
    for artifact in artifacts:
        greedy = EagerGreedy("cpu", config_of(artifact))
        found = []
        for _, prompt in chosen(greedy, prompts, tokens):
            ids, margins = greedy(prompt, tokens, stops=False)
            generated = eagerly(greedy, prompt, tokens)
            if ids == generated["token_ids"]:
                found.append({"prompt": prompt, "margins": margins, **generated})
        if not found:
            raise click.ClickException(f"{artifact}: the module's steps and its verify windows choose other tokens")
        expected_file(artifact).write_text(json.dumps(found))
        click.echo(f"{artifact}: smallest margins {[round(min(each['margins']), 3) for each in found]}")


@main.command()
@ARTIFACTS
def compare(artifacts: tuple[Path, ...]) -> None:
    """Compare each artifact with the tokens of its module."""
    wrong = []
    for artifact in artifacts:
        try:
            session = open_session(open_artifact(artifact), "torch")
            try:
                lines = list(compared(session, json.loads(expected_file(artifact).read_text())))
            finally:
                session.close()
        except (OSError, ValueError, RuntimeError) as error:  # the other artifacts are still compared
            lines = [(f"does not run: {' '.join(str(error).split())}", True)]
        for line, is_wrong in lines:
            click.echo(f"{artifact}: {line}")
            wrong += [str(artifact)] * is_wrong
    if wrong:
        raise click.ClickException(f"wrong: {', '.join(dict.fromkeys(wrong))}")


def compared(session: Session, expected: list[dict[str, Any]]) -> Iterator[tuple[str, bool]]:
    """Yield a line about each prompt, and True if a token differs by more than a near-tie or too few proposals are
    equal."""
    fuses = session.has_speculate
    for each in expected:
        parted, rounds, short = [], [], False
        for fused in (True, False) if fuses else (False,):
            session.has_speculate = fused
            with proposed(session) as made:
                found = complete(session, each["prompt"], max_new_tokens=len(each["token_ids"]), stop_ids=[])
            short |= len(found.token_ids) != len(each["token_ids"])
            parted.append(first_difference(found.token_ids, each["token_ids"], each["margins"]))
            rounds.append(found.stats.counts() == each["stats"])
            same, every = equal_proposals(each["proposals"], made)
        session.has_speculate = fuses
        places = [place for place in parted if place]
        other = short or any(margin > NEAR_TIE for _, margin in places) or (not places and same < LEAST * every)
        said = "another number of tokens" if short else "tokens equal"
        said = f"parts at token {places[0][0]}, where the margin is {places[0][1]}" if places else said
        said += f", rounds {'equal' if all(rounds) else 'differ'}, {each['stats']['num_accepted_tokens']} accepted"
        yield f"{said}, {same} of {every} proposals equal", other


if __name__ == "__main__":
    main()
