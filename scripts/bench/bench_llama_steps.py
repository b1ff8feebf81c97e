"""Compares steps of a CPU artifact with llama.cpp's llama-bench, at published widths with random weights.

    python scripts/bench/bench_llama_steps.py llama.cpp --folder steps --bits 8 --prompt 64,1000,4000
    python scripts/bench/bench_llama_steps.py llama.cpp --folder steps --bits 4 --target llama3.1-8B --layers 4

``bench_llama_cpp.py --help`` says how to build llama.cpp; llama-bench is one more CMake target. A decode computes one
token. A verify window has the rows of three draft tokens. llama-bench computes ids only for the last row of a window,
while an artifact computes them for all rows.
"""

import json
import os
import statistics
import subprocess
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import click
import torch
from bench_export import exported_for_cpu, run_on_cpu, save_for_cpu
from bench_llama_cpp import PART, Build, epilog, make
from cpu_models import CPU_MODELS
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from transformers import PreTrainedConfig, Qwen3_5TextConfig

from eagle3.export.checkpoints.safetensors_folder import SafetensorsFolder
from eagle3.runner.commands.bench_figures import cores, machine, versions
from eagle3.runner.commands.bench_report import rendered
from eagle3.runner.system.command import OneLineFailures

RECIPES = {"8": (("8da8w",), ("q8_0",)), "4": (("8da4w", "8da4w --group-size 256"), ("q4_0", "q4_k_m"))}
"""Our recipes (the value of --qlinear and further flags) and llama.cpp's types, by bits per weight."""
ARCHITECTURES = {"qwen3": MODEL_ARCH.QWEN3, "llama": MODEL_ARCH.LLAMA, "qwen3_5_text": MODEL_ARCH.QWEN35}
WINDOW, PREFILL, STEPS = 4, 64, 32
NAMES = {"decode": "a decode", "window": f"a verify window of {WINDOW}", "prefill": f"a prefill of {PREFILL}"}
Steps = dict[str, float]
"""Milliseconds by a key of NAMES."""


def write_gguf(checkpoint: Path, config: PreTrainedConfig, file: Path) -> None:
    """Write the checkpoint as a GGUF file in bfloat16, without a tokenizer. llama.cpp stores the rows of Llama's
    queries and keys and the value heads of the delta rule in another order, which does not matter for random
    weights."""
    architecture = ARCHITECTURES[config.model_type]
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    writer = GGUFWriter(file, MODEL_ARCH_NAMES[architecture])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(2048)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    if isinstance(config, Qwen3_5TextConfig):
        add_delta_rule(writer, config)
    for name, value in SafetensorsFolder(checkpoint).tensors():
        found = names.get_name(name.replace("dt_bias", "dt_proj.bias"), try_suffixes=(".weight", ".bias"))
        if name.endswith("A_log"):
            value = -value.float().exp()
        value = value.squeeze()
        if value.ndim == 1 or "conv1d" in name:
            writer.add_tensor(found, value.float().numpy())
        else:
            writer.add_tensor(found, value.view(torch.uint8).numpy(), raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_delta_rule(writer: GGUFWriter, config: Qwen3_5TextConfig) -> None:
    """Write the sizes of the recurrent layers, and of rotary embeddings that have three parts for images."""
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    rotated = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
    writer.add_rope_dimension_count(rotated)
    writer.add_rope_dimension_sections([11, 11, 10, 0])


def of_llama(build: Build, file: Path, prompt: int) -> Steps:
    command = [build.tool("llama-bench"), "-m", str(file), "-t", str(cores()), "-fa", "1", "-r", "5", "-o", "json"]
    behind = {prompt: ["-p", str(WINDOW), "-n", str(STEPS)], prompt - PREFILL: ["-p", str(PREFILL), "-n", "0"]}
    ms = {}
    for depth, tests in behind.items():
        asked = [*command, *tests, "-d", str(depth)]
        done = subprocess.run(asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
        ms |= {(test["n_prompt"], test["n_gen"]): test["avg_ns"] / 1e6 for test in json.loads(done.stdout)}
    return {"decode": ms[0, STEPS] / STEPS, "window": ms[WINDOW, 0], "prefill": ms[PREFILL, 0]}


def of_artifact(artifact: Path, prompt: int) -> Steps:
    found = run_on_cpu(artifact, "--prompt", str(prompt))
    return {"decode": found["decode_ms"], "window": found["verify_ms"], "prefill": found["prefill_ms"]}


def text(report: dict) -> str:
    cells = [
        {"": name, "context": f"{prompt} tokens"}
        | {NAMES[step]: f"{steps[step]:.1f} ms" for step in NAMES}
        | {"verify to decode": f"{steps['window'] / steps['decode']:.2f}"}
        for prompt, names in report["ms"].items()
        for name, steps in names.items()
    ]
    where = f"{report['target']}, {report['layers']} layers, {cores()} threads"
    return f"{report['machine']}; {where}\n{rendered(cells)}"


def prompts(_context: click.Context, _option: click.Parameter, value: str) -> list[int]:
    try:
        lengths = [int(each) for each in value.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < PREFILL:
        raise click.BadParameter(f"numbers of tokens, {PREFILL} or more each, such as 64,1000,4000")
    return lengths


@click.command(cls=OneLineFailures, help=__doc__.partition("\n")[0], epilog=epilog(__doc__))
@click.argument("llama_cpp", type=click.Path(file_okay=False, path_type=Path))
@click.option("--target", type=click.Choice(list(CPU_MODELS)), default="qwen3-4B", show_default=True)
@click.option("--layers", type=click.IntRange(4), default=9, show_default=True)
@click.option("--bits", type=click.Choice(list(RECIPES)), default="8", show_default=True, help="Bits per weight.")
@click.option("--prompt", "lengths", callback=prompts, default=str(PREFILL), show_default=True, help="Cached tokens.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Passes over all recipes.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    required=True,
    help="The folder for checkpoint, artifacts and GGUF files.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    llama_cpp: Path, target: str, layers: int, bits: str, lengths: list[int], repeats: int, folder: Path, as_json: bool
) -> None:
    build, (recipes, types) = Build.found(llama_cpp), RECIPES[bits]
    if not Path(build.tool("llama-bench")).is_file():
        raise FileNotFoundError(f"{llama_cpp} has no llama-bench: type cmake --build {llama_cpp} --target llama-bench")
    folder = folder / f"{target}-{layers}"
    config, whole, part = CPU_MODELS[target](layers), folder / "bf16.gguf", folder / "bf16.part"
    save_for_cpu(folder, target, config)
    if not whole.is_file():
        write_gguf(folder / "target", config, part)
        part.rename(whole)
    slots = max(2048, max(lengths) + 256)
    artifacts = {recipe: folder / f"{recipe.replace(' ', '')}-{slots}" for recipe in recipes}
    for recipe, artifact in artifacts.items():
        if not artifact.is_dir():
            qlinear, *more = recipe.split()
            exported_for_cpu(folder, target, layers, qlinear, slots, *more)
            (folder / "artifact").rename(artifact)
    files = {f"llama.cpp, {kind}": folder / f"{kind}.gguf" for kind in types}
    for kind, file in zip(types, files.values(), strict=True):
        make(file, [build.tool("llama-quantize"), str(whole), PART, kind])
    passes: list[dict[int, dict[str, Steps]]] = []
    for _ in range(repeats):
        passes.append({})
        for prompt in lengths:
            found = {recipe: of_artifact(artifact, prompt) for recipe, artifact in artifacts.items()}
            passes[-1][prompt] = found | {name: of_llama(build, file, prompt) for name, file in files.items()}
    ms = {
        prompt: {
            name: {step: statistics.median(each[prompt][name][step] for each in passes) for step in NAMES}
            for name in (*artifacts, *files)
        }
        for prompt in lengths
    }
    report = {"machine": machine(None), "versions": versions(), "target": target, "layers": layers, "ms": ms}
    click.echo(json.dumps(report | {"passes": passes}) if as_json else text(report))


if __name__ == "__main__":
    main()
