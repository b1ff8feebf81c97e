"""The command ``eagle3-export``. Heavy packages are imported only when an export begins, so that ``--help`` answers at
once."""

import json
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import click

from eagle3.export.configuration.backends import BACKENDS, MEANT
from eagle3.export.configuration.config import (
    EMBEDDING_RECIPES,
    HOSTS,
    INT4_LAYOUTS,
    KV_CACHES,
    LONGEST_CHAIN,
    WEIGHT_TABLES,
    ExportConfig,
)
from eagle3.export.draft.kinds import DIALECTS, EAGLE3, KINDS
from eagle3.export.draft.kinds.eagle.rope_reading import FILE
from eagle3.runner.contract import EXPORT_RECORD
from eagle3.runner.system.command import NameChoice, NameList, OneLineFailures, tell, version_option
from eagle3.runner.system.gpus import ALL, BY_ARCH, archs_of
from eagle3.targets import TARGETS

RECIPES = list(dict.fromkeys(recipe for backend in BACKENDS.values() for recipe in backend.recipes))

EPILOG = """
\b
Examples:
  eagle3-export --target-model gemma4-tiny --backend xnnpack
  eagle3-export --target-model gemma4-31B --dry-run
  eagle3-export --target-model gemma4-31B --cuda-arch sm_90 --download
  eagle3-export --target-model gemma4-31B --cuda-arch sm_90 --int4-layout records
  eagle3-export --target-model gemma4-31B --cuda-arch sm_80,sm_90,sm_120
  eagle3-export --target-model qwen3-4B --cuda-arch sm_87 --host-arch aarch64 --download
  eagle3-export --checkpoint Qwen/Qwen3-8B --draft AngelSlim/Qwen3-8B_eagle3 --backend xnnpack --qlinear 8da4w
  eagle3-export --target-model gemma4-31B --random-weights --layers 6 --cuda-arch sm_90
  eagle3-export --target-model llama3.1-8B --checkpoint my-llama --draft 2 --output-dir out
"""


def _list_targets(as_json: bool) -> None:
    """Print each target with its repository on the hub and its draft heads, with the numbers that ``--draft`` takes."""
    if as_json:
        entries = {
            name: {"summary": spec.summary, "repository": spec.repository, "heads": list(spec.heads)}
            | {"shipped_heads": [path.name for path in spec.drafts]}
            for name, spec in TARGETS.items()
        }
        click.echo(json.dumps(entries))
        return
    for name, spec in TARGETS.items():
        click.echo(f"{name:<16} {spec.summary}" + (f": {spec.repository}" if spec.repository else ""))
        for number, head in enumerate([*(f"{path.name} (shipped)" for path in spec.drafts), *spec.heads], 1):
            click.echo(f"{'':<16} --draft {number}  {head}")


def _list_drafts(as_json: bool) -> None:
    """Print each kind of draft head with its inputs and the published heads of that kind. A head that a target's entry
    names is EAGLE-3's, unless another kind lists it."""
    listed = {head for kind in KINDS.values() for head in kind.published}
    named = (head for spec in TARGETS.values() for head in spec.heads if head not in listed)
    heads = {name: list(kind.published) for name, kind in KINDS.items()}
    heads[EAGLE3] += named
    if as_json:
        click.echo(json.dumps({name: {"takes": kind.takes, "heads": heads[name]} for name, kind in KINDS.items()}))
        return
    for name, kind in KINDS.items():
        click.echo(f"{name:<18} {kind.takes}")
        for head in heads[name]:
            click.echo(f"{'':<18} {head}")


def _layer_ids(_ctx: click.Context, _param: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is no list of layer ids such as 2,30,57") from None


class NumberOrFile(click.FloatRange):
    """Accepts a number, or ``file`` for the value in the draft's config.json."""

    name = "number or file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401 - click's
        if value == FILE:
            return value
        number = super().convert(value, param, ctx)
        return number if isfinite(number) else self.fail(f"{value} is no finite number", param, ctx)


HEADINGS = {
    "target_model": "Models",
    "output_dir": "Output and backend",
    "chain_len": "Lengths",
    "qlinear": "Quantization",
    "aux_layers": "Overrides of the draft head's files",
    "logits": "Methods",
    "check": "Checks and dry runs",
    "list_drafts": "Lists",
}


@click.command(cls=OneLineFailures, epilog=EPILOG, headings=HEADINGS)
@click.option(
    "--target-model", type=NameChoice(list(TARGETS)), help="See --list-targets. Default with --checkpoint: auto."
)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="The target: a Hugging Face folder, a GGUF file, or on the Hugging Face hub ORG/NAME[@REVISION][:FILE.gguf]. "
    "Default: the target's own repository, where it is in the cache.",
)
@click.option(
    "--config",
    "config_folder",
    type=click.Path(path_type=Path),
    help="The Hugging Face folder, or ORG/NAME, with the config.json and the tokenizer of a GGUF file. Default: the "
    "file's own.",
)
@click.option(
    "--draft",
    type=click.Path(path_type=Path),
    help="The draft head: a folder, ORG/NAME[@REVISION], or a number or a name of --list-targets. mtp takes the "
    "MTP layer of the target's own checkpoint. none exports the target alone, for eagle3-run's lookup in the text. "
    "Default: 1; mtp for a checkpoint's folder with such a layer, where no head is listed.",
)
@click.option(
    "--download",
    is_flag=True,
    help="Fetch the target's own repositories where the cache lacks them. Names that you type are fetched anyway.",
)
@click.option(
    "--output-dir",
    "--output_dir",
    type=click.Path(path_type=Path),
    help="The artifact: a new folder. Default: TARGET-BACKEND-ARCHITECTURE in the working folder.",
)
@click.option("--overwrite", is_flag=True, help="Replace the artifact that is in --output-dir.")
@click.option(
    "--backend",
    type=NameChoice(BACKENDS, MEANT),
    default="cuda",
    show_default=True,
    help="; ".join(f"{name} is {backend.summary}" for name, backend in BACKENDS.items()) + ".",
)
@click.option(
    "--cuda-arch",
    type=NameList([*BY_ARCH, ALL], lambda named: archs_of(ALL if ALL in named else ",".join(named))),
    help="The GPUs to compile for, with commas between them. Default: this machine's, or all without one.",
)
@click.option(
    "--host-arch",
    type=NameList(HOSTS, dict.fromkeys),
    help="The processors of the machines with these GPUs, with commas between them: aarch64 is for Jetson, GH200 and "
    "GB10, and its libraries are made by a cross compiler. The first is that of model.pte, the others are in "
    "model.PROCESSOR.pte. Default: this machine's.",
)
@click.option(
    "--chain-len", type=click.IntRange(1, LONGEST_CHAIN), help="Draft tokens a round. Default: the head's own number."
)
@click.option(
    "--verify-rows",
    type=click.IntRange(2, 16),
    help="Rows of the verify window, one more than the tokens that it checks. Rows beyond the chain are for the "
    "proposals of eagle3-run --ngram. Default: the chain length and one more.",
)
@click.option(
    "--max-seq-len",
    type=click.IntRange(16),
    help="The longest context in tokens: the slots of the KV caches. "
    "Default: 4096, or the target's own limit if that is less.",
)
@click.option("--max-prefill", type=click.IntRange(1), help="Longest prefill chunk, in tokens.")
@click.option(
    "--draft-window",
    type=click.IntRange(2),
    help="Let an EAGLE head attend to this many of the last tokens only, if it was trained on texts shorter than the "
    "context.",
)
@click.option(
    "--qlinear",
    type=click.Choice(RECIPES),
    help="ExecuTorch's recipe for the target's weights: "
    + "; ".join(f"{', '.join(backend.recipes)} on {name}" for name, backend in BACKENDS.items())
    + ". Default: default on cuda (INT4 linears, INT8 embedding), none on xnnpack and mlx.",
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
    help="Weights that share a scale in 8da4w on xnnpack, a multiple of 32, and on mlx, one of 32, 64 and 128. "
    "Default: 32.",
)
@click.option(
    "--qembedding",
    type=click.Choice(EMBEDDING_RECIPES),
    help="Recipe for both models' embeddings on xnnpack and mlx: 8w is 8 bits with a scale per token (mlx: per group). "
    "Default: 8w with a quantized target.",
)
@click.option(
    "--kv-cache",
    type=click.Choice(KV_CACHES),
    help="How the target's layers of full attention keep keys and values on cuda: int8 halves their memory. Default: "
    "bfloat16.",
)
@click.option(
    "--allow-fallback",
    is_flag=True,
    default=None,
    help="Leave operations that MLX does not compute to ExecuTorch's own kernels, between delegates. Only a Mac can "
    "check such an artifact.",
)
@click.option(
    "--int4-layout",
    type=click.Choice(INT4_LAYOUTS),
    help="How INT4 weights are stored on cuda, and so which kernels read them: records take fewer instructions a "
    "weight; from sm_90 on kernels also begin early and bring weights into L2. Never timed. Default: tiles.",
)
@click.option(
    "--weight-table",
    type=click.Choice(WEIGHT_TABLES),
    help="The table in which ExecuTorch's own CUDA runtime finds a method's library and weights: fqn3 is that of 1.5, "
    "fqn0, by GPU, that of its main branch since August 2026. PyTorch as the host takes both. Default: fqn3.",
)
@click.option(
    "--aux-layers",
    callback=_layer_ids,
    metavar="2,30,57",
    help="Override the hidden states that the draft's files name.",
)
@click.option(
    "--aux-convention",
    type=click.Choice(["input", "output"]),
    help="The meaning of a layer id: that layer's input (vLLM, speculators) or its output (SGLang, TensorRT-LLM). "
    "Default: the meaning in the draft's dialect.",
)
@click.option(
    "--draft-dialect",
    type=click.Choice(list(DIALECTS)),
    help="The system that wrote the draft head's files. Default: the first dialect that recognizes them.",
)
@click.option("--norm-before-residual", type=bool, help="Override norm_before_residual of the draft's config.json.")
@click.option(
    "--draft-rope-theta",
    type=NumberOrFile(0, min_open=True),
    metavar="BASE|file",
    help="The base of an EAGLE head's RoPE; file takes rope_theta of its config.json. Default: the value in its "
    "trainer's code.",
)
@click.option(
    "--draft-partial-rotary",
    type=NumberOrFile(0, 1, min_open=True),
    metavar="PART|file",
    help="The part of an EAGLE head's attention dimensions that RoPE rotates, up to 1; file takes "
    "partial_rotary_factor of its config.json. Default: the value in its trainer's code.",
)
@click.option(
    "--read",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Override how a field of the draft head is read; eagle3-fit lists fields and values.",
)
@click.option(
    "--logits/--no-logits",
    default=True,
    show_default=True,
    help="Let the methods return logits too, which sampling, logprobs and margins need.",
)
@click.option(
    "--sessions/--no-sessions",
    default=None,
    help="Add the methods read_state and write_state, so that a runner can keep a conversation in a file or beside "
    "others. Default: on cuda and xnnpack; mlx has none.",
)
@click.option("--with-decode", is_flag=True, help="Add the method decode: generation without speculation, to compare.")
@click.option(
    "--with-forward",
    is_flag=True,
    help="Add the method forward, so that ExecuTorch's own TextLLMRunner can run the file.",
)
@click.option(
    "--speculate/--no-speculate",
    default=None,
    help="Add the method speculate, a whole greedy round in one call. Default: on cuda, and for small models on a CPU.",
)
@click.option(
    "--check/--no-check",
    default=True,
    show_default=True,
    help="Run a few prompts through the finished artifact, if this machine can run it, and compare the tokens with the "
    "eager module's.",
)
@click.option(
    "--fit/--no-fit",
    default=None,
    help="Measure with which reading of its files the draft head's tokens are accepted most. Default: if that takes "
    "under a minute.",
)
@click.option("--fit-only", is_flag=True, help="Measure, print what eagle3-fit prints, and export nothing.")
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    help="The text to measure on, or a .jsonl of prompts. Default: texts that come with the package.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the plan and make no artifact. Only configurations and tensor headers are read, from the hub too.",
)
@click.option(
    "--random-weights",
    is_flag=True,
    help="Take only shapes from both checkpoints and make random values, to try an export without any weights.",
)
@click.option(
    "--layers",
    type=click.IntRange(1),
    help="With --random-weights: export a target of this many layers, with every kind of layer kept.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@click.option(
    "--list-drafts", is_flag=True, help="Print the supported kinds of draft heads, with --json as one object."
)
@click.option(
    "--list-targets",
    is_flag=True,
    help="Print the targets, their repositories and draft heads, with --json as one object.",
)
@version_option
def main(as_json: bool, list_targets: bool, list_drafts: bool, download: bool, **flags: Any) -> None:
    """Export a target model and its EAGLE-3 draft head as one ExecuTorch file.

    The artifact is a folder with model.pte (prefill, target_verify, draft_decode and, with --speculate, speculate),
    the tokenizer and export.json; eagle3-run runs it.
    """
    if list_targets:
        _list_targets(as_json)
        return
    if list_drafts:
        _list_drafts(as_json)
        return
    if flags["target_model"] is None and flags["checkpoint"] is None:
        raise click.UsageError("type --target-model with a name of --list-targets, or --checkpoint FOLDER or ORG/NAME")
    config = ExportConfig(**flags | {"target_model": flags["target_model"] or "auto"})

    from eagle3.export.exporting import export, prepare, settled

    config = settled(replace(config, dry_run=config.dry_run or config.fit_only))

    from eagle3.export.lowering.gc_tuning import collected_rarely, not_collected_at_exit

    not_collected_at_exit()
    click.get_current_context().with_resource(collected_rarely())

    if config.fit_only:
        from eagle3.export.fit_heads import fit_heads

        fit_heads([replace(config, dry_run=False)], as_json, download=download)
        return
    if config.dry_run:
        known = prepare(config, download=download)

        from eagle3.export.report import plan_json, plan_text

        facts = plan_json(known.plan) | {"twin": known.twin, "repositories": known.sources.as_json()}
        click.echo(json.dumps(facts) if as_json else plan_text(known.plan, list(known.sources.lines())))
        return
    exported = export(config, download=download)

    from eagle3.export.report import result_text

    if click.get_current_context().meta["verbose"]:
        from eagle3.export.patching.patches import used

        for name, patch in used().items():
            tell(f"replaced for this export: {name}: {patch.why}")
    try:
        click.echo(json.dumps(exported.record) if as_json else result_text(exported.plan, exported.record))
    except BrokenPipeError:
        raise
    except OSError:
        tell(f"{exported.folder} is complete; its {EXPORT_RECORD} holds what could not be printed.")
        raise


if __name__ == "__main__":
    main()
