"""Makes artifacts of small random pairs for CUDA without a GPU, each with the tokens that its module generates:

    python scripts/gpu/small_pairs.py small                          # every pair; minutes of two cores for each
    python scripts/gpu/small_pairs.py small --only mlp --only mamba2
    python scripts/gpu/check_on_gpu.py compare small/*/              # on a machine with a GPU, which needs small alone

A pair that is already there is not made again. The pairs have what no GPU has run so far: kinds of heads, and recurrent
layers.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))

import click
from check_on_gpu import expected_file
from family_exports import DRAFTS, OWN_LAYER, TARGET_OF, family_model, random_family, taps
from mtp_heads import GOLDEN as MTP
from random_checkpoints import random_model, save_random_draft, save_random_mlp

FLAGS = ("--qlinear", "none", "--max-seq-len", "192", "--chain-len", "2")
CHECK = Path(__file__).with_name("check_on_gpu.py")
CHECKPOINTS = "checkpoints"


class Pair(NamedTuple):
    """A random target and what writes a random head into a folder. ``target`` is the name for ``--target-model``. With
    ``own_layer`` the head is an MTP layer, which is written into the target's own checkpoint."""

    model: Callable[[], Any]
    draft: Callable[[Path, Any], Path | None]
    target: str = "auto"
    own_layer: bool = False


def of_exports(name: str) -> Pair:
    """Return the pair that ``family_exports`` exports to the CPU under that name."""
    return Pair(lambda: family_model(name), DRAFTS[name], TARGET_OF.get(name, name), name in OWN_LAYER)


def golden_mtp(folder: Path, _config: object) -> None:
    """Write the golden MTP head of speculators for a Qwen3 of four layers."""
    shutil.copytree(MTP / "qwen3", folder)


def of_family(name: str) -> Pair:
    """Return the family of that name with an EAGLE-3 head."""
    return Pair(lambda: random_family(name), lambda folder, config: save_random_draft(folder, config, taps(config)))


PAIRS = {
    "eagle1": of_exports("llama3.1-8B"),
    "mlp": Pair(lambda: random_model("llama3.1-8B"), save_random_mlp, "llama3.1-8B"),
    "dflash2": of_exports("dflash2"),
    "mtp": Pair(lambda: random_model("qwen3-4B", num_hidden_layers=4), golden_mtp, "qwen3-4B"),
    "delta-rule-mtp": of_exports("qwen3.5-9B"),
    "delta-rule-dflash": of_exports("dflash"),
    "mamba2": of_family("bamba"),
    "mamba2-attention": of_family("falcon_h1"),
    "mamba2-experts": of_family("nemotron_h"),
    "short-conv": of_family("lfm2"),
    "kimi": of_family("kimi_linear"),
}


def save(pair: Pair, folder: Path) -> list[str]:
    """Write the checkpoints of a pair and return the flags of its export. The target's end tokens are removed, so that
    a text ends where it is told to."""
    model, target, draft = pair.model(), folder / "target", folder / "draft"
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.bos_token_id = None
    model.save_pretrained(target)
    pair.draft(draft, model.config)
    head = "mtp" if pair.own_layer else str(draft)
    return ["--target-model", pair.target, "--checkpoint", str(target), "--draft", head]


def make(name: str, folder: Path, arch: str) -> None:
    """Export a pair into ``folder / name`` and write its expected tokens beside it.

    Raises ClickException if a command fails.
    """
    artifact, checkpoints = folder / name, folder / CHECKPOINTS / name
    shutil.rmtree(checkpoints, ignore_errors=True)
    checkpoints.mkdir(parents=True)
    flags = save(PAIRS[name], checkpoints)
    command = [sys.executable, "-m", "eagle3.export.cli", *flags, *FLAGS, "--cuda-arch", arch]
    for each in (
        [*command, "--overwrite", "--output-dir", str(artifact)],
        [sys.executable, str(CHECK), "expect", str(artifact)],
    ):
        if subprocess.run(each).returncode:
            raise click.ClickException(f"{name}: {' '.join(each)} failed: see above")


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "))
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--only", type=click.Choice(list(PAIRS)), multiple=True, help="Make this pair; may be repeated. [all]")
@click.option("--cuda-arch", "arch", default="sm_90", show_default=True, help="As for eagle3-export.")
def main(folder: Path, only: tuple[str, ...], arch: str) -> None:
    failed = []
    for name in only or PAIRS:
        if expected_file(folder / name).is_file():
            click.echo(f"{name}: is there")
            continue
        try:
            make(name, folder, arch)
            click.echo(f"{name}: made")
        except (click.ClickException, ValueError) as error:  # the other pairs are still made
            failed.append(name)
            click.echo(f"{name}: {error}", err=True)
    if failed:
        raise click.ClickException(f"not made: {', '.join(failed)}")


if __name__ == "__main__":
    main()
