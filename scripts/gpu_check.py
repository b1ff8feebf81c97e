"""Checks on an NVIDIA GPU what cannot be seen without one, and measures it: one command, under 8 minutes.

    python scripts/gpu_check.py --json gpu_check.json

1. The small-M kernels against their reference, and their time on one linear (scripts/bench_small_m.py has them all).
2. gemma4-tiny exported with this GPU, and once more without using it (or ``--elsewhere FOLDER``, exported on a machine
   that has none): each runs through PyTorch and is held against eager greedy decoding by the same weights, token for
   token, with the first divergence and the margin of the two best logits there.
3. A few full-width layers of Gemma 4 31B with synthetic INT4 weights: time of each method, tokens per second, the share
   of the machine's copy bandwidth at which the weights are read, memory on the GPU.

A step that fails or finds no time left is reported as such and the others go on; the exit code is 1 if any failed.
Without a GPU it says so, runs nothing and exits with 0. Owed: its table from a real GPU; it has run on none so far.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import bench_export
import bench_small_m
import click
import torch
import triton
from torch import Tensor, nn
from torchao.utils import TorchAOBaseTensor

from eagle3.export.config import ExportConfig
from eagle3.export.lowering.cuda import backend as cuda
from eagle3.export.lowering.cuda.dispatch import small_m_dispatch
from eagle3.export.pipeline import load_speculator
from eagle3.export.plan import Plan, make_plan
from eagle3.runner.artifact import open_artifact, open_session
from eagle3.runner.bench.measure import step_milliseconds
from eagle3.runner.contract import DRAFT_DECODE, METHODS, MODEL_FILE, PREFILL, TARGET_VERIFY
from eagle3.runner.hosts.torch_host import TorchSession, read_methods
from eagle3.runner.inspect.program import read_pte
from eagle3.runner.loop import complete
from eagle3.runner.text import Text
from eagle3.targets.attention import EagerAttention

BUDGET = 8 * 60  # seconds
NEW_TOKENS = 64
PROMPTS = Path(__file__).with_name("prompts.jsonl")
NEAR_TIE = 0.25
"""A margin of two steps of bfloat16 at the size of the largest logits (16 to 30): kernels that round differently may
choose either token."""


class NotRun(Exception):
    """Why a step was not run."""


@dataclass
class Step:
    name: str
    status: str = "ok"
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


class Report:
    """The steps so far, and the seconds that are left for more."""

    def __init__(self):
        self.start, self.steps = time.monotonic(), []

    @property
    def left(self) -> float:
        return BUDGET - (time.monotonic() - self.start)

    def step(self, name: str, run: Callable[[dict[str, Any]], None]) -> None:
        """Run a step, which fills in its facts, and print what came of it."""
        step, start = Step(name), time.monotonic()
        try:
            if self.left < 20:
                raise NotRun("no time left")
            run(step.facts)
        except NotRun as reason:
            step.status = f"not run: {reason}"
        except Exception as error:
            step.status = f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        step.seconds = round(time.monotonic() - start, 1)
        self.steps.append(step)
        facts = "  ".join(f"{key} {value}" for key, value in step.facts.items())
        click.echo(f"{name:<34} {step.seconds:>6.1f} s  {step.status}  {facts}")

    @property
    def failed(self) -> bool:
        return any(step.status.startswith("FAILED") for step in self.steps)


def export(report: Report, output: Path, *args: str, visible: bool = True) -> dict[str, Any]:
    """Run eagle3-export in a process of its own; what ``export.json`` says. Raises with the command's last line."""
    command = [sys.executable, "-m", "eagle3.export.cli", "--output-dir", str(output), *args]
    environment = os.environ if visible else os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=max(report.left - 30, 1))
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1])
    return json.loads((output / "export.json").read_text())


def placed(module: nn.Module, device: str) -> nn.Module:
    """Move a module, the parts of its quantized weights one by one."""

    def moved(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, TorchAOBaseTensor):
            return tensor.to(device)
        names, context = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name).to(device) for name in names}
        return type(tensor).__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())

    for part in module.modules():
        for name, value in part._parameters.items():
            part._parameters[name] = None if value is None else nn.Parameter(moved(value.data), requires_grad=False)
        for name, value in part._buffers.items():
            part._buffers[name] = None if value is None else moved(value)
    return module


class EagerGreedy:
    """Greedy decoding of gemma4-tiny by its packed weights in eager PyTorch, a token a forward."""

    def __init__(self, device: str = "cuda", arch: str | None = None):
        self.device = device
        self.plan: Plan = make_plan(ExportConfig("gemma4-tiny", output_dir=None, cuda_arch=arch))
        self.speculator = load_speculator(self.plan, EagerAttention, cuda.DTYPE, cuda.conversion(self.plan))
        cuda.prepare(self.speculator, self.plan)
        self.target = placed(self.speculator, device).target

    @torch.no_grad()
    def __call__(self, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        """The continuation, and at each token the margin by which it was the best."""
        ids, margins, fed, start = [], [], prompt, 0
        with small_m_dispatch(self.plan.small_m_limit):
            while len(ids) < count and not (ids and ids[-1] in self.plan.eos_ids):
                input_pos = torch.arange(start, start + len(fed), device=self.device)
                state, _ = self.target(torch.tensor([fed], device=self.device), input_pos, ())
                best = self.target.logits(state[:, -1:]).float().flatten().topk(2)
                ids.append(int(best.indices[0]))
                margins.append(float(best.values[0] - best.values[1]))
                fed, start = ids[-1:], start + len(fed)
        return ids, margins


def compare(session: TorchSession, greedy: EagerGreedy, prompts: list[list[int]]) -> dict[str, Any]:
    """Raises where a token differs by more than a near-tie."""
    rounds, tokens, divergences = 0, 0, []
    for number, prompt in enumerate(prompts):
        result = complete(session, prompt, max_new_tokens=NEW_TOKENS)
        expected, margins = greedy(prompt, NEW_TOKENS)
        rounds, tokens = rounds + result.stats.num_drafts, tokens + len(result.token_ids)
        for place, (ours, theirs) in enumerate(zip(result.token_ids, expected, strict=False)):
            if ours != theirs:
                divergences.append((number, place, round(margins[place], 4)))
                break
    for prompt, place, margin in divergences:
        if margin > NEAR_TIE:
            raise RuntimeError(f"prompt {prompt} parts from eager greedy at token {place}, by a margin of {margin}")
    same = f"{len(prompts) - len(divergences)} of {len(prompts)} prompts"
    return {
        "identical to eager greedy": same,
        "first divergence (prompt, token, margin)": divergences[0] if divergences else None,
        "tokens a round": round(tokens / max(rounds, 1), 2),
    }


def measure_layers(session: TorchSession, model: Path, copy_bandwidth: float) -> dict[str, Any]:
    """Times of a session's methods; ``copy_bandwidth`` in bytes a second, read and written."""
    metadata = session.metadata
    window, longest = metadata.chain_len + 1, metadata.max_prefill
    prompt = torch.randint(3, metadata.vocab_size, (1, longest))
    feature = session.prefill(prompt, session.positions[:longest]).feature
    calls: dict[str, Callable[[], Any]] = {
        PREFILL: lambda: session.prefill(prompt, session.positions[:longest]),
        TARGET_VERIFY: lambda: session.target_verify(prompt[:, :window], session.positions[longest : longest + window]),
        DRAFT_DECODE: lambda: session.draft_decode(prompt[:, :1], feature[:, :1], session.positions[:1]),
    }
    milliseconds = step_milliseconds(calls, repeats=20)
    tables = {method.name: method.table for method in read_methods(read_pte(model))}
    facts: dict[str, Any] = {}
    for name in METHODS:
        read = sum(w.storage_bytes for w in tables[name].storages().values() if "cache" not in w.name)
        share = read / (1e-3 * milliseconds[name]) / copy_bandwidth
        facts[name] = f"{milliseconds[name]:.3f} ms, {share:.0%} of copy bandwidth"
    start = time.perf_counter()
    result = complete(session, prompt[0, :256].tolist(), max_new_tokens=128)
    facts["tokens/s"] = round(len(result.token_ids) / (time.perf_counter() - start), 1)
    facts["GPU memory GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return facts


@click.command(epilog="Example: python scripts/gpu_check.py --layers 6 --json gpu_check.json")
@click.option("--layers", default=4, show_default=True, help="Full-width layers of Gemma 4 31B.")
@click.option("--elsewhere", type=click.Path(path_type=Path, exists=True), help="gemma4-tiny exported without a GPU.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the report here too.")
def main(layers: int, elsewhere: Path | None, json_file: Path | None) -> None:
    """Check and measure on this machine's GPU what cannot be seen without one."""
    if not torch.cuda.is_available():
        click.echo("This needs an NVIDIA GPU and PyTorch's CUDA build, and found none; nothing was run.")
        return
    report, arch = Report(), cuda.local_arch()
    machine = {"gpu": torch.cuda.get_device_name(), "arch": arch}
    machine |= {"torch": torch.__version__, "cuda": torch.version.cuda, "triton": triton.__version__}
    click.echo("  ".join(f"{key} {value}" for key, value in machine.items()))
    bandwidth = bench_small_m.copy_bandwidth()
    report.step("kernels against the reference", check_kernels)
    report.step("small-M kernel, 5376 x 21504", lambda facts: time_kernel(facts, bandwidth))
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        check_tiny(report, place, arch, elsewhere)
        report.step(f"export of {layers} full-width layers", lambda facts: export_layers(facts, report, place, layers))
        report.step(f"{layers} full-width layers", lambda facts: run_layers(facts, place / "wide", bandwidth))
    found = {"machine": machine, "copy_bytes_per_s": bandwidth, "steps": [asdict(step) for step in report.steps]}
    if json_file:
        json_file.write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(1 if report.failed else 0)


def check_kernels(facts: dict[str, Any]) -> None:
    for name, (_, k) in bench_small_m.LINEARS.items():
        bench_small_m.check(name, bench_small_m.made(name), k)
    facts["linears"] = len(bench_small_m.LINEARS)


def time_kernel(facts: dict[str, Any], bandwidth: float) -> None:
    timing = bench_small_m.time_linear(bench_small_m.GOAL_LINEAR, bandwidth)
    facts |= {"us at 8 rows": round(timing.us[8], 1), "of copy bandwidth": round(timing.copy_share[8], 3)}
    facts["8 rows / 1 row"] = round(timing.growth, 3)


def check_tiny(report: Report, place: Path, arch: str, elsewhere: Path | None) -> None:
    """Both ways to make gemma4-tiny's artifact, each held against eager greedy decoding."""
    tiny = ("--target-model", "gemma4-tiny")
    report.step("gemma4-tiny, exported with the GPU", lambda facts: export(report, place / "native", *tiny))
    if elsewhere is None:
        named = (*tiny, "--cuda-arch", arch)
        without = place / "named"
        report.step("gemma4-tiny, exported without it", lambda facts: export(report, without, *named, visible=False))
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()[:8]]
    made = [("with", place / "native"), ("without", elsewhere or place / "named")]
    for name, folder in made:
        report.step(f"runs, exported {name} the GPU", lambda facts, folder=folder: run_tiny(facts, folder, prompts))


def run_tiny(facts: dict[str, Any], folder: Path, prompts: list[str]) -> None:
    session, text = opened(folder), Text(folder)
    facts |= compare(session, EagerGreedy(), [text.encode(prompt) for prompt in prompts])
    session.close()


def opened(folder: Path) -> TorchSession:
    if not folder.is_dir():
        raise NotRun("there is no export")
    return open_session(open_artifact(folder), "torch")


def export_layers(facts: dict[str, Any], report: Report, place: Path, layers: int) -> None:
    target, draft = place / "target", place / "draft"
    for folder in (target, draft):
        folder.mkdir()
    config = bench_export.gemma4_config(layers)
    bench_export.save_target(target, config)
    bench_export.save_draft(draft, config, [1, layers // 2, layers - 1])
    flags = ("--target-model", "gemma4-31B", "--checkpoint", str(target), "--draft", str(draft))
    facts |= {stage["stage"]: stage["seconds"] for stage in export(report, place / "wide", *flags)["stages"]}


def run_layers(facts: dict[str, Any], folder: Path, bandwidth: float) -> None:
    session = opened(folder)
    torch.cuda.reset_peak_memory_stats()
    facts |= measure_layers(session, folder / MODEL_FILE, bandwidth)
    session.close()


if __name__ == "__main__":
    main()
