"""Compares with llama.cpp: an artifact of gemma4-tiny with its own EAGLE-3 at its fastest setting (same checkpoints,
prompts, threads), and the steps of CPU artifacts of published widths and random weights with its llama-bench.

llama.cpp comes with the sources of llama-cpp-python; those of 0.3.36 have EAGLE-3. With a C++ compiler and CMake (pip
install cmake), in any folder:

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
    tar xzf llama_cpp_python-0.3.36.tar.gz
    cmake -S llama_cpp_python-0.3.36/vendor/llama.cpp -B llama.cpp -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \\
        -DLLAMA_CURL=OFF -DLLAMA_USE_PREBUILT_UI=OFF
    cmake --build llama.cpp --parallel --target llama-server llama-quantize llama-bench

    python scripts/bench/bench_llama_cpp.py speculation out llama.cpp
    python scripts/bench/bench_llama_cpp.py steps llama.cpp --folder steps --bits 8 --prompt 64,1000,4000
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import click
import httpx
import torch
from bench_export import ARTIFACT, exported_small, run_on_cpu
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from published import CPU_MODELS, EAGLE3, TARGET, save_pair
from transformers import PreTrainedConfig, Qwen3_5TextConfig

from eagle3.export.checkpoints.safetensors_folder import SafetensorsFolder
from eagle3.runner import load
from eagle3.runner.commands.bench_figures import cores, divergence, machine, spread
from eagle3.runner.commands.bench_measure import Outcome, Workload, configurations_of, make_workload, measure, total
from eagle3.runner.commands.bench_report import identity_text, rate_text, rendered, spread_text
from eagle3.runner.loop.statistics import GenerationStats
from eagle3.runner.model import Model, Result
from eagle3.runner.options import Options
from eagle3.runner.system.command import OneLineFailures
from eagle3.runner.text.prompts import Prompt
from eagle3.targets import TARGETS

PROMPTS = Path(__file__).parents[1] / "prompts.jsonl"
TINY, CONVERTER = "gemma4-tiny", "convert_hf_to_gguf.py"
DRAFT_TYPES, CHAIN_LENGTHS, SEARCH_TOKENS, TURNS = ("f32", "q8_0"), range(1, 8), 64, 2
FINALISTS, START_SECONDS, ANSWER_SECONDS = 4, 60, 600
DRAFTED = re.compile(r"statistics +draft-eagle3: .*#acc rate/pos = \(([^)]+)\)")
PEERS = {"none": ("f32",), "8da8w": ("q8_0",), "8da4w": ("q4_0", "q4_k_m")}
"""Maps a recipe of ours (``--qlinear``) to llama.cpp's types of weight of the same width."""
RECIPES = {"8": ("8da8w",), "4": ("8da4w", "8da4w --group-size 256")}
ARCHITECTURES = {"qwen3": MODEL_ARCH.QWEN3, "llama": MODEL_ARCH.LLAMA, "qwen3_5_text": MODEL_ARCH.QWEN35}
WINDOW, PREFILL, STEPS = 4, 64, 32
NAMES = {"decode": "a decode", "verify": f"a verify window of {WINDOW}", "prefill": f"a prefill of {PREFILL}"}


def tool(build: Path, name: str) -> str:
    """Return the path of a program in a folder that CMake built. Raises FileNotFoundError if it is missing."""
    path = build.absolute() / "bin" / name
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: build llama.cpp as --help says")
    return str(path)


def make(file: Path, command: Sequence[str]) -> Path:
    """Run a command that writes a file, whose path takes the place of None; keep an existing file."""
    if not file.is_file():
        part = file.with_suffix(".part")
        done = subprocess.run([word or part for word in command], capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"{Path(command[0]).name} {command[1]} failed: {last_line(done.stdout + done.stderr)}")
        part.rename(file)
    return file


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it says nothing")


def convert(build: Path, folder: Path, types: Sequence[str]) -> None:
    """Write gemma4-tiny as ``target-TYPE.gguf`` and ``draft-TYPE.gguf`` into ``folder``: f32, and quantized from it.

    llama.cpp's converter accepts no tokenizer of gemma4-tiny's kind for a Gemma 4, so it gets a changed copy. Prompts
    and answers are token ids here, so their text does not matter."""
    cache = (build / "CMakeCache.txt").read_text()
    source = Path(re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.*)$", cache, re.MULTILINE)[1])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as target:
        shutil.copytree(TARGETS[TINY].checkpoint, target, dirs_exist_ok=True)
        tokenizer = json.loads(Path(target, "tokenizer.json").read_text())
        tokenizer["model"]["byte_fallback"] = True
        tokenizer["decoder"] = {"type": "Sequence", "decoders": []}
        Path(target, "tokenizer.json").write_text(json.dumps(tokenizer))
        for part, checkpoint, kinds in (("target", target, types), ("draft", TARGETS[TINY].draft, DRAFT_TYPES)):
            command = [sys.executable, str(source / CONVERTER), str(checkpoint), "--outtype", "f32"]
            whole = make(folder / f"{part}-f32.gguf", [*command, "--target-model-dir", target, "--outfile", None])
            for kind in kinds:
                make(folder / f"{part}-{kind}.gguf", [tool(build, "llama-quantize"), str(whole), None, kind])


@dataclass(frozen=True)
class Setting:
    """The settings of a llama.cpp server: types of the target's and the draft head's weights, most draft tokens of a
    round (0: no speculation), whether draft tokens are chosen within llama.cpp's graph, as it does by default."""

    weights: str
    chain_len: int = 0
    draft: str | None = None
    backend_sampling: bool = True

    def __str__(self) -> str:
        sampling = "backend sampling" if self.backend_sampling else "no backend sampling"
        drafting = f"draft {self.draft}, {sampling}, chain length {self.chain_len}"
        return f"{self.weights}, {drafting if self.chain_len else 'no speculation'}"


@dataclass(frozen=True)
class LlamaCppConfiguration:
    """llama-server, measured like a ``Configuration`` of ``eagle3.runner.commands.bench_measure``. ``model``: the
    artifact, whose tokenizer and context length are used."""

    setting: Setting
    artifact: str
    chain_len: int
    model: Model
    url: str
    log: Path

    def complete(self, workload: Workload, prompt: Prompt) -> list[Result]:
        """Run a prompt. Raises ValueError if the server gives no answer."""
        ids, options = self.model.encode(prompt.first_turn), Options.of(**workload.options)
        asked = {"prompt": ids, "n_predict": options.max_new_tokens, "temperature": 0, "cache_prompt": False}
        try:
            reply = httpx.post(f"{self.url}/completion", json=asked | {"return_tokens": True}, timeout=ANSWER_SECONDS)
            return [result(ids, reply.raise_for_status().json(), options)]
        except httpx.HTTPError as error:
            raise self.failed(f"no answer to line {prompt.line} ({' '.join(str(error).split())})") from error

    def failed(self, what: str) -> ValueError:
        return ValueError(f"{self.artifact}: {what}: {last_line(self.log.read_text(errors='replace'))}")


@contextmanager
def started(setting: Setting, build: Path, files: Path, model: Model) -> Iterator[LlamaCppConfiguration]:
    """Run a server within this context, with a log in ``files``. Raises ValueError if it does not start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    name, url = f"llama.cpp {setting}", f"http://127.0.0.1:{port}"
    way = LlamaCppConfiguration(setting, name, setting.chain_len, model, url, files / f"{port}.log")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "LLAMA_ARG_"))}
    command = [*server_command(setting, build, files, model), "--port", str(port)]
    with way.log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        end, up = time.monotonic() + START_SECONDS, False
        while not up:
            if process.poll() is not None or time.monotonic() > end:
                raise way.failed("llama-server does not start")
            time.sleep(0.05)
            with suppress(httpx.HTTPError):
                up = httpx.get(f"{way.url}/health").is_success
        yield way
    finally:
        process.kill()
        process.wait()


def server_command(setting: Setting, build: Path, files: Path, model: Model) -> list[str]:
    """Return the command: one slot, no cache of earlier prompts. ``-lv 4`` logs the acceptance by position."""
    given = {"-m": files / f"target-{setting.weights}.gguf", "-c": model.metadata.max_seq_len, "-np": 1, "-t": cores()}
    given |= {"-ctk": "f32", "-ctv": "f32", "--cache-ram": 0, "--ctx-checkpoints": 0, "-lv": 4}
    sampling = []
    if setting.chain_len:
        given |= {"-md": files / f"draft-{setting.draft}.gguf", "-ctkd": "f32", "-ctvd": "f32"}
        given |= {"--spec-type": "draft-eagle3", "--spec-draft-n-max": setting.chain_len}
        sampling = [f"--{'' if setting.backend_sampling else 'no-'}spec-draft-backend-sampling"]
    return [tool(build, "llama-server"), *(str(part) for pair in given.items() for part in pair), *sampling]


def result(prompt: list[int], reply: dict[str, Any], options: Options) -> Result:
    """Return llama-server's reply as a ``Result``. Its ``predicted_ms`` begins at the first token, as our
    ``decode_seconds`` does."""
    taken = [reply["timings"][name] / 1000 for name in ("prompt_ms", "predicted_ms")]
    stats = GenerationStats(1, len(prompt), 0, len(reply["tokens"]), prefill_seconds=taken[0], decode_seconds=taken[1])
    finish = "length" if reply["stop_type"] == "limit" else "stop"
    return Result(prompt, reply["tokens"], None, finish, None, options, stats)


def acceptance(log: str) -> list[float]:
    """Read the acceptance by position from the last statistics in a server's log, which are over all of its prompts."""
    said = DRAFTED.findall(log)
    if not said:
        raise ValueError("llama-server wrote no statistics of its drafts: is this the llama.cpp of 0.3.36?")
    return [float(rate) for rate in said[-1].split(",")]


def finalists(weights: str, start: Callable[..., Any], workload: Workload) -> list[Setting]:
    """Run the prompts ``TURNS`` times in each setting of a type of weight, far apart so that a stall of the machine
    decides nothing. Return the setting without speculation and the fastest with it. A server that fails is left
    out by name. Raises ValueError if none is left that runs without speculation, or with it."""
    drafting = product(CHAIN_LENGTHS, DRAFT_TYPES, (True, False))
    settings = [Setting(weights), *(Setting(weights, *each) for each in drafting)]
    tried = dict.fromkeys(settings, 0.0)
    for setting in [*settings] * TURNS:
        if setting not in tried:
            continue
        try:
            with start(setting) as way:
                way.complete(workload, workload.prompts[0])  # the warm-up
                completions = sum((way.complete(workload, prompt) for prompt in workload.prompts), [])
        except ValueError as error:
            del tried[setting]
            click.echo(f"left out: {error}", err=True)
        else:
            rate = total(completion.stats for completion in completions).decode_tokens_per_second
            tried[setting] = max(tried[setting], rate)
    ranked = sorted(tried, key=lambda setting: (bool(setting.chain_len), -tried[setting]))
    if len(ranked) < 2 or ranked[0].chain_len:
        raise ValueError(f"llama.cpp in {weights} does not run with speculation and without: see above")
    return ranked[: 1 + FINALISTS]


def rates(outcome: Outcome) -> list[float]:
    """Return the tokens per second of each pass, without the time of the prompts."""
    return [stats.decode_tokens_per_second for stats in outcome.stats()]


def ratio(one: Outcome, other: Outcome) -> dict[str, float]:
    return spread(first / second for first, second in zip(rates(one), rates(other), strict=True))


def compared(outcomes: Sequence[Outcome]) -> tuple[list[dict[str, str]], list[str]]:
    """Return the rows of a table, one for each outcome, and lines of ratios. ``outcomes``: ours without speculation and
    with it, then llama.cpp's; for each type of weight, the outcome without speculation is first."""
    ours, drafted, *theirs = outcomes
    rows, lines, alone = [], [], ours
    first = [completion.result.token_ids for completion in ours.completions]
    for outcome in outcomes:
        way = outcome.configuration
        alone = alone if way.chain_len else outcome
        accepted = total(outcome.stats()).acceptance_rate_per_position if way.chain_len else []
        if way.chain_len and isinstance(way, LlamaCppConfiguration):
            accepted = acceptance(way.log.read_text(errors="replace"))
        row = {"": way.artifact, "chain length": str(way.chain_len)}
        row |= {"decode, tokens/s": rate_text(spread(rates(outcome)))}
        row |= {"to no speculation": spread_text(ratio(outcome, alone), 2)}
        rows.append(row | {"acceptance by position": " ".join(f"{rate:.3f}" for rate in accepted)})
        same = identity_text(divergence(outcome.completions, first), ours.configuration.artifact)
        lines.append(f"{way.artifact}, chain length {way.chain_len}: {same}")
    for weights in dict.fromkeys(outcome.configuration.setting.weights for outcome in theirs):
        own = [outcome for outcome in theirs if outcome.configuration.setting.weights == weights]
        fastest = max(own[1:], key=lambda outcome: median(rates(outcome)))
        best = max((fastest, own[0]), key=lambda outcome: median(rates(outcome)))
        lines.append(f"llama.cpp at its best: {best.configuration.setting}")
        plain = f"without speculation {spread_text(ratio(ours, own[0]), 2)}"
        ratios = (spread_text(ratio(drafted, each), 2) for each in (fastest, best))
        lines.append(f"ours to llama.cpp {weights}: {plain}, with speculation {', to its best '.join(ratios)}")
    return rows, lines


@click.group(help=__doc__.split("\n\n")[0], epilog="\n\n".join(f"\b\n{part}" for part in __doc__.split("\n\n")[1:]))
def main() -> None:
    pass


@main.command(cls=OneLineFailures)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.argument("llama_cpp", type=click.Path(path_type=Path))
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Passes over all prompts.")
@click.option("--folder", type=click.Path(path_type=Path), help="Keep the GGUF files here.")
def speculation(artifact: Path, llama_cpp: Path, repeats: int, folder: Path | None) -> None:
    """Measure an ARTIFACT of gemma4-tiny beside LLAMA_CPP, a folder with a build of it, at its fastest settings.

    First, llama-server answers the prompts of scripts/prompts.jsonl, up to 64 tokens each, in every setting: draft in
    f32 or q8_0, chain length 1 to 7, backend sampling of the draft on or off. Settings whose server fails are named and
    left out. Then these take turns with each prompt, greedily and up to 128 tokens: the artifact without and with
    speculation and, for each type of weight as wide as the artifact's, llama-server without speculation and in its four
    fastest settings. Decoding is timed from the first token to the last by either side's own clock, without HTTP.
    Figures are medians over the passes (min..max), ratios are within a pass.
    """
    workload, briefly = (make_workload(PROMPTS, given, False) for given in ({}, {"max_new_tokens": SEARCH_TOKENS}))
    with ExitStack() as stack:
        model = stack.enter_context(load(artifact, defer=True))
        target, recipe = (model.metadata.manifest.get(name) for name in ("target", "qlinear"))
        if target != TINY or recipe not in PEERS:
            raise ValueError(f"{artifact} has {target} in {recipe}: export {TINY} in one of {', '.join(PEERS)}")
        files = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        convert(llama_cpp, files, PEERS[recipe])
        start = partial(started, build=llama_cpp, files=files, model=model)
        found = sum((finalists(weights, start, briefly) for weights in PEERS[recipe]), [])
        ways = [*configurations_of(str(artifact), model, None), *(stack.enter_context(start(each)) for each in found)]
        rows, lines = compared(measure(ways, workload, repeats, lambda: None)[0])
    click.echo("\n\n".join([f"{machine(None)}, {cores()} threads", rendered(rows), "\n".join(lines)]))


def write_gguf(checkpoint: Path, config: PreTrainedConfig, file: Path) -> None:
    """Write the checkpoint as a GGUF file in bfloat16, without a tokenizer. Some rows have another order in llama.cpp's
    own files, which does not matter for random weights."""
    architecture = ARCHITECTURES[config.model_type]
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    writer = GGUFWriter(file, MODEL_ARCH_NAMES[architecture])
    fields = {"block_count": config.num_hidden_layers, "context_length": 2048, "embedding_length": config.hidden_size}
    fields |= {"feed_forward_length": config.intermediate_size, "head_count": config.num_attention_heads}
    fields |= {"head_count_kv": config.num_key_value_heads, "key_length": config.head_dim}
    fields |= {"value_length": config.head_dim, "layer_norm_rms_eps": config.rms_norm_eps}
    fields |= {"rope_freq_base": config.rope_parameters["rope_theta"], "vocab_size": config.vocab_size}
    writer.add_tokenizer_model("no_vocab")
    if isinstance(config, Qwen3_5TextConfig):  # recurrent layers, and rotary embeddings in three parts for images
        inner = config.linear_value_head_dim * config.linear_num_value_heads
        rotated = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
        fields |= {"ssm_conv_kernel": config.linear_conv_kernel_dim, "ssm_state_size": config.linear_key_head_dim}
        fields |= {"ssm_group_count": config.linear_num_key_heads, "ssm_time_step_rank": config.linear_num_value_heads}
        fields |= {"ssm_inner_size": inner, "rope_dimension_count": rotated}
        fields |= {"rope_dimension_sections": [11, 11, 10, 0]}
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    for name, value in SafetensorsFolder(checkpoint).tensors():
        found = names.get_name(name.replace("dt_bias", "dt_proj.bias"), try_suffixes=(".weight", ".bias"))
        value = (-value.float().exp() if name.endswith("A_log") else value).squeeze()
        if value.ndim == 1 or "conv1d" in name:
            writer.add_tensor(found, value.float().numpy())
        else:
            writer.add_tensor(found, value.view(torch.uint8).numpy(), raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def of_llama(build: Path, file: Path, prompt: str) -> dict[str, float]:
    """Return llama-bench's milliseconds of each step after ``prompt`` tokens."""
    command = [tool(build, "llama-bench"), "-m", file, "-t", str(cores()), "-fa", "1", "-r", "5", "-o", "json"]
    behind = {int(prompt): ["-p", str(WINDOW), "-n", str(STEPS)]}
    behind |= {int(prompt) - PREFILL: ["-p", str(PREFILL), "-n", "0"]}
    ms = {}
    for depth, tests in behind.items():
        asked = [*command, *tests, "-d", str(depth)]
        done = subprocess.run(asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
        ms |= {(test["n_prompt"], test["n_gen"]): test["avg_ns"] / 1e6 for test in json.loads(done.stdout)}
    return {"decode_ms": ms[0, STEPS] / STEPS, "verify_ms": ms[WINDOW, 0], "prefill_ms": ms[PREFILL, 0]}


@main.command(cls=OneLineFailures)
@click.argument("llama_cpp", type=click.Path(file_okay=False, path_type=Path))
@click.option("--target", type=click.Choice(list(CPU_MODELS)), default="qwen3-4B", show_default=True)
@click.option("--layers", type=click.IntRange(4), default=9, show_default=True)
@click.option("--bits", type=click.Choice(list(RECIPES)), default="8", show_default=True, help="Bits per weight.")
@click.option("--prompt", default=str(PREFILL), show_default=True, help=f"Cached tokens: numbers of {PREFILL} or more.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Passes over all recipes.")
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="For checkpoint, artifacts and GGUFs.")
def steps(llama_cpp: Path, target: str, layers: int, bits: str, prompt: str, repeats: int, folder: Path) -> None:
    """Compare a decode, a verify window of four rows and a prefill with those of llama-bench. llama-bench computes ids
    only for the last row of a window, an artifact for all rows."""
    folder, recipes = folder / f"{target}-{layers}", RECIPES[bits]
    config, whole, part = CPU_MODELS[target](layers), folder / "bf16.gguf", folder / "bf16.part"
    save_pair(folder, target, config, EAGLE3)
    if not whole.is_file():
        write_gguf(folder / TARGET, config, part)
        part.rename(whole)
    lengths = prompt.split(",")
    slots = max(2048, max(map(int, lengths)) + 256)
    sides: dict[str, Callable[[str], dict[str, float]]] = {}
    for recipe in recipes:
        artifact = folder / f"{recipe.replace(' ', '')}-{slots}"
        if not artifact.is_dir():
            exported_small(folder, target, layers, "xnnpack", recipe.split()[0], slots, *recipe.split()[1:])
            (folder / ARTIFACT).rename(artifact)
        sides[recipe] = partial(run_on_cpu, artifact, "--prompt")
    for kind in PEERS[recipes[0]]:
        file = make(folder / f"{kind}.gguf", [tool(llama_cpp, "llama-quantize"), str(whole), None, kind])
        sides[f"llama.cpp, {kind}"] = partial(of_llama, llama_cpp, file)
    measured: dict[tuple[str, str], list[dict[str, float]]] = {each: [] for each in product(lengths, sides)}
    for _ in range(repeats):
        for (length, name), passes in measured.items():
            passes.append(sides[name](length))
    rows = []
    for (length, name), passes in measured.items():
        ms = {step: median(each[f"{step}_ms"] for each in passes) for step in NAMES}
        row = {"": name, "context": f"{length} tokens"} | {NAMES[step]: f"{taken:.1f} ms" for step, taken in ms.items()}
        rows.append(row | {"verify to decode": f"{ms['verify'] / ms['decode']:.2f}"})
    click.echo(f"{machine(None)}; {target}, {layers} layers, {cores()} threads\n{rendered(rows)}")


if __name__ == "__main__":
    main()
