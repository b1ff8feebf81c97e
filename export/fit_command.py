"""The command ``eagle3-fit``: measures the acceptance of draft heads on a text, with each reading of their files."""

from dataclasses import replace
from pathlib import Path

import click

from eagle3.export.configuration.backends import BACKENDS, MEANT
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.configuration.hub_names import hub_name, of_address
from eagle3.runner.system.command import NameChoice, OneLineFailures, closest, version_option
from eagle3.targets import TARGETS

EPILOG = """
\b
Examples:
  eagle3-fit gemma4-tiny 1
  eagle3-fit gemma4-tiny 1 2 3 4
  eagle3-fit Qwen/Qwen3-4B AngelSlim/Qwen3-4B_eagle3 --text questions.txt
  eagle3-fit my-llama my-head --read norm_before_residual=true --json | jq .verdict
"""


@click.command(cls=OneLineFailures, epilog=EPILOG)
@click.argument("target")
@click.argument("heads", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    help="The text to measure on, or a .jsonl of prompts. Default: texts that come with the package.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Chooses the passages of the text.")
@click.option("--chain-len", type=click.IntRange(1, 15), help="Draft tokens a round. Default: the head's own number.")
@click.option(
    "--read",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Begin with this reading of the heads in place of that in their files.",
)
@click.option("--target-model", type=NameChoice(list(TARGETS)), default="auto", help="The target's family.")
@click.option(
    "--backend",
    type=NameChoice(BACKENDS, MEANT),
    default="xnnpack",
    show_default=True,
    help="The backend for which the best chain length is computed.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@version_option
def main(
    target: str,
    heads: tuple[Path, ...],
    text: Path | None,
    seed: int,
    chain_len: int | None,
    read: tuple[str, ...],
    target_model: str,
    backend: str,
    as_json: bool,
) -> None:
    """Measure how HEADS of TARGET are to be read, and how many tokens a round they give.

    TARGET is a name of eagle3-export --list-targets, a folder, or ORG/NAME; a head is a folder, ORG/NAME, a number of
    that list, or mtp. The target is computed over a few hundred tokens, and each head with every reading that its kind
    has. The output is the expected tokens of a round with each reading, and the verdict: fits, another reading, or no
    pair.
    """
    named = target in TARGETS and target != "auto"
    if not (named or Path(target).exists() or hub_name(target) or of_address(target)):
        raise click.UsageError(
            f"TARGET {target} is no name of eagle3-export --list-targets, no folder and no ORG/NAME of the hub."
            f"{closest(target, TARGETS)}"
        )
    config = ExportConfig(
        target if named else target_model,
        checkpoint=None if named else Path(target),
        backend=backend,
        chain_len=chain_len,
        read=read,
        text=text,
        fit=True,
        fit_only=True,
    )
    from eagle3.export.hub.sources import check_typed

    configs = [replace(config, draft=head) for head in heads]
    for each in configs:  # before the first is measured, which takes minutes for a large target
        check_typed(each)

    from eagle3.export.fit_heads import fit_heads

    fit_heads(configs, as_json, seed)


if __name__ == "__main__":
    main()
