"""``eagle3-export``. Nothing heavy is imported before an export is really wanted: ``--help`` answers at once."""

import json
from pathlib import Path
from typing import Any

import click

from eagle3.export.backends import BACKENDS
from eagle3.export.draft.dialects import DIALECTS
from eagle3.export.lowering.cuda.named_gpu.gpus import GPUS
from eagle3.export.planning.config import EMBEDDING_RECIPES, ExportConfig
from eagle3.runner.console.command import OneLineFailures, tell, version_option
from eagle3.targets import TARGETS

RECIPES = list(dict.fromkeys(recipe for backend in BACKENDS.values() for recipe in backend.recipes))

EPILOG = """
\b
Examples:
  eagle3-export --target-model gemma4-tiny --cuda-arch sm_90 --output-dir out
  eagle3-export --target-model gemma4-31B --checkpoint gemma-4-31B-int4 --draft gemma-4-31B-eagle3 --output-dir out
  eagle3-export --target-model gemma4-tiny --backend xnnpack --output-dir out
  eagle3-export --target-model llama3.1-8B --checkpoint Llama-3.1-8B-Instruct \\
      --draft Llama-3.1-8B-Instruct-speculator.eagle3 --backend xnnpack --output-dir out --dry-run
"""


def _list_targets(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted:
        for name, spec in TARGETS.items():
            click.echo(f"{name:<14} {spec.summary}")
        ctx.exit()


def _layer_ids(_ctx: click.Context, _param: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is no list of layer ids such as 2,30,57") from None


@click.command(cls=OneLineFailures, epilog=EPILOG)
@click.option("--target-model", required=True, type=click.Choice(list(TARGETS)), help="See --list-targets.")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="The target's Hugging Face folder, or a GGUF file.")
@click.option(
    "--config",
    "config_folder",
    type=click.Path(path_type=Path),
    help="The Hugging Face folder with the config.json and the tokenizer of a GGUF file. Default: the file's own.",
)
@click.option("--draft", type=click.Path(path_type=Path), help="The folder of the EAGLE-3 draft head.")
@click.option(
    "--output-dir", "--output_dir", required=True, type=click.Path(path_type=Path), help="The artifact: a new folder."
)
@click.option(
    "--backend",
    type=click.Choice(list(BACKENDS)),
    default="cuda",
    show_default=True,
    help="; ".join(f"{name} is {backend.summary}" for name, backend in BACKENDS.items()) + ".",
)
@click.option("--cuda-arch", type=click.Choice(list(GPUS)), help="Default: that of the GPU at hand.")
@click.option("--chain-len", type=click.IntRange(1, 15), help="Draft tokens a round. Default: what the draft suggests.")
@click.option("--max-seq-len", type=click.IntRange(16), help="Slots of the KV cache, in tokens.")
@click.option("--max-prefill", type=click.IntRange(1), help="Longest prefill chunk, in tokens.")
@click.option(
    "--qlinear",
    type=click.Choice(RECIPES),
    help="ExecuTorch's recipe for the target's weights: "
    + "; ".join(f"{', '.join(backend.recipes)} on {name}" for name, backend in BACKENDS.items())
    + ". Default: default on cuda (INT4 linears, INT8 embedding), none on xnnpack.",
)
@click.option(
    "--draft-qlinear",
    type=click.Choice(RECIPES),
    help="The same for the draft head. Default: "
    + ", ".join(f"{backend.draft_recipe} on {name}" for name, backend in BACKENDS.items())
    + ".",
)
@click.option(
    "--group-size",
    type=click.IntRange(1),
    help="Weights that share a scale in 8da4w on xnnpack, a multiple of 32. Default: 32.",
)
@click.option(
    "--qembedding",
    type=click.Choice(EMBEDDING_RECIPES),
    help="Of both models' embeddings on xnnpack: 8w is 8 bits and a scale a token. Default: 8w with a quantized "
    "target.",
)
@click.option("--aux-layers", callback=_layer_ids, metavar="2,30,57", help="Override the taps that the draft names.")
@click.option(
    "--aux-convention",
    type=click.Choice(["input", "output"]),
    help="Whether a layer id means that layer's input (vLLM, speculators) or its output (SGLang, TensorRT-LLM). "
    "Default: what the draft's dialect means.",
)
@click.option(
    "--draft-dialect",
    type=click.Choice(list(DIALECTS)),
    help="The system that the draft head was trained or written for. Default: what its files look like.",
)
@click.option("--norm-before-residual", type=bool, help="Override the variant that the draft's config.json names.")
@click.option(
    "--logits/--no-logits",
    default=True,
    show_default=True,
    help="Let the methods give logits as well: what sampling, logprobs and margins need.",
)
@click.option("--with-decode", is_flag=True, help="Add the method decode: generation without speculation, to compare.")
@click.option(
    "--with-forward", is_flag=True, help="Add the method forward, by which ExecuTorch's own runner takes the file too."
)
@click.option(
    "--speculate/--no-speculate",
    default=None,
    help="Add the method speculate, a whole greedy round in one call. Default: on cuda; on a CPU small models gain.",
)
@click.option(
    "--check/--no-check",
    default=True,
    show_default=True,
    help="Try the finished artifact on a few prompts, where the backend runs here: tokens against the eager module's.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be done; read configurations and headers alone.")
@click.option("--overwrite", is_flag=True, help="Replace the artifact that is in --output-dir.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@click.option("--list-targets", is_flag=True, is_eager=True, expose_value=False, callback=_list_targets)
@version_option
def main(dry_run: bool, as_json: bool, **flags: Any) -> None:
    """Export a target model and its EAGLE-3 draft head as one ExecuTorch file.

    The artifact is a folder with model.pte (prefill, target_verify, draft_decode, and speculate for a GPU), the
    tokenizer and export.json; eagle3-run runs it.
    """
    config = ExportConfig(**flags)

    from eagle3.export.output.folder import check_output
    from eagle3.export.output.lock import refuse_a_second

    check_output(config.output_dir, config.overwrite)
    if not dry_run:
        refuse_a_second(config.output_dir.resolve())

    from eagle3.export.checks.preflight import preflight
    from eagle3.export.output.progress import Progress
    from eagle3.export.output.report import plan_json, plan_text, result_text
    from eagle3.export.planning.plan import make_plan

    plan = make_plan(config)
    for warning in plan.warnings:
        click.echo(f"Warning: {warning}", err=True)
    progress = Progress()
    twin = preflight(plan, progress)
    if dry_run:
        click.echo(json.dumps(plan_json(plan) | {"twin": twin}) if as_json else plan_text(plan))
        return

    from eagle3.export.patches import used
    from eagle3.export.pipeline import run_export

    record = run_export(plan, twin, progress)
    if click.get_current_context().meta["verbose"]:
        for name, patch in used().items():
            tell(f"replaced for this export: {name}: {patch.why}")
    click.echo(json.dumps(record) if as_json else result_text(plan, record))


if __name__ == "__main__":
    main()
