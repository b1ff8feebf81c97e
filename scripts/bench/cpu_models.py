"""Writes synthetic checkpoints of models for the CPU, and measures an artifact of one.

Widths are those of the published models and of published EAGLE-3 heads for them. Weights are random, so only size and
speed are meaningful. ``python scripts/bench/cpu_models.py ARTIFACT --acceptance 3.3`` runs an artifact and prints
memory, milliseconds per call, and the speedup for that acceptance length. ``bench_export.py --backend xnnpack`` does
all of it.
"""

import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import click

if __name__ == "__main__":  # as eagle3-run does; an export also imports this module, but uses all cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, PreTrainedConfig, Qwen3_5TextConfig, Qwen3Config

from eagle3.export.planning.memory import GIB
from eagle3.runner.artifact.opening import open_artifact
from eagle3.runner.hosts.opening import open_session
from eagle3.runner.hosts.session import Session
from eagle3.runner.system.machine import linux_bytes
from eagle3.targets import TARGETS

SHARED = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6}
CPU_MODELS: dict[str, Callable[..., PreTrainedConfig]] = {
    "qwen3-4B": lambda layers=36: Qwen3Config(
        **SHARED,
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=layers,
        max_position_embeddings=40960,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
        tie_word_embeddings=True,
        dtype="bfloat16",
    ),
    "llama3.1-8B": lambda layers=32: LlamaConfig(
        **SHARED,
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": 5e5, "rope_type": "default"},
        tie_word_embeddings=False,
        dtype="bfloat16",
    ),
    "qwen3.5-4B": lambda layers=32: Qwen3_5TextConfig(
        vocab_size=248320,
        hidden_size=2560,
        intermediate_size=9216,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=262144,
        rope_parameters={"rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.25},
        tie_word_embeddings=True,
        dtype="bfloat16",
    ),
}
"""Configurations by target. Called with a number of layers, or without arguments for all layers."""
PROMPT = 64
"""Default number of tokens in the cache when a call is timed; ``prefill_ms`` is the time of a chunk of this size."""


def save_cpu_target(
    folder: Path, target: str, config: PreTrainedConfig, make: Callable[[torch.Size, None], torch.Tensor]
) -> None:
    """Write the target with one shard per layer, so that only one shard is in memory. ``make`` returns a weight."""
    shapes: dict[str, dict[str, torch.Size]] = {}
    for name, value in TARGETS[target].module().skeleton(config, max_seq_len=1024).model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        parts = name.split(".")
        shard = parts[2] if parts[1] == "layers" else parts[-2]
        shapes.setdefault(shard, {})[name] = value.shape
    weight_map = {}
    for shard, named in shapes.items():
        save_file({name: make(shape, None) for name, shape in named.items()}, folder / f"{shard}.safetensors")
        weight_map |= dict.fromkeys(named, f"{shard}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config.save_pretrained(folder)


class Timed:
    """Times calls of a session over random tokens, each at the first free position. Before that, chunks of ``PROMPT``
    tokens are prefilled, at least ``prompt`` tokens in all.

    A recurrent target commits the rows of earlier calls, and cannot go back before them. So its prefill is timed after
    a new start, and its verify behind the row of a decode, which it commits."""

    def __init__(self, session: Session, prompt: int = PROMPT):
        self.session, metadata = session, session.metadata
        self.chunk = max(metadata.min_prefill, min(PROMPT, metadata.max_prefill))
        self.at = self.chunk * math.ceil(prompt / self.chunk)
        if self.at + metadata.chain_len >= metadata.max_seq_len:
            raise click.UsageError(f"a prompt of {prompt} tokens leaves no room in a context of {metadata.max_seq_len}")
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(metadata.vocab_size, (1, metadata.max_seq_len), generator=generator)
        self.recurrent = metadata.rollback_rows is not None
        self._prefilled(self.at - self.chunk)
        self.feature = session.prefill(*self._rows(self.at - self.chunk, self.chunk)).feature[:, -1:]

    def _prefilled(self, end: int) -> None:
        for start in range(0, end, self.chunk):
            self.session.prefill(*self._rows(start, self.chunk))

    def prefill(self) -> float:
        if self.recurrent:
            self._prefilled(self.at - self.chunk)
        return self._timed(self.session.prefill, *self._rows(self.at - self.chunk, self.chunk))

    def verify(self, rows: int) -> float:
        return self._timed(self.session.target_verify, *self._rows(self.at + self.recurrent, rows))

    def decode(self) -> float:
        return self._timed(self.session.decode, *self._rows(self.at, 1))

    def draft(self, rows: int) -> float:
        tokens, positions = self._rows(self.at, rows)
        return self._timed(self.session.draft_decode, tokens, self.feature.repeat(1, rows, 1), positions)

    def _rows(self, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and positions."""
        rows = slice(start, start + count)
        return self.tokens[:, rows].contiguous(), self.session.positions[rows]

    def _timed(self, method: Callable, *given: torch.Tensor) -> float:
        """Return the milliseconds of a call."""
        start = time.perf_counter()
        method(*given)
        return 1e3 * (time.perf_counter() - start)


def measure(artifact: Path, acceptance: float, repeats: int, prompt: int) -> dict[str, float]:
    """Measure memory and times of an artifact. Milliseconds are medians; the calls are timed in turn.

    A round is a verify, a draft call over the rows of the accepted tokens, and a draft call of one row for each further
    proposal.
    """
    before = held_by("self", "RssAnon", "RssFile")
    start = time.perf_counter()
    session = open_session(open_artifact(artifact))
    if not session.has_decode:
        raise click.UsageError(f"{artifact} has no method decode: export it with --with-decode")
    loaded = time.perf_counter() - start
    timed, chain = Timed(session, prompt), session.metadata.chain_len
    accepted = max(1, round(acceptance))
    calls = {
        "prefill": timed.prefill,
        "decode": timed.decode,
        "verify": lambda: timed.verify(chain + 1),
        "draft_accepted": lambda: timed.draft(accepted),
        "draft_row": lambda: timed.draft(1),
    }
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(2 * repeats):  # the first half to warm up
        for name, call in calls.items():
            took[name].append(call())
    ms = {name: statistics.median(times[repeats:]) for name, times in took.items()}
    whole = ms["verify"] + ms["draft_accepted"] + (chain - 1) * ms["draft_row"]
    after = held_by("self", *before)
    return {
        "load_seconds": loaded,
        "private_mib": 1024 * (after["RssAnon"] - before["RssAnon"]),
        "mapped_mib": 1024 * (after["RssFile"] - before["RssFile"]),
        **{f"{name}_ms": value for name, value in ms.items()},
        "verify_decodes": ms["verify"] / ms["decode"],
        "round_ms": whole,
        "speedup": acceptance * ms["decode"] / whole,
    }


def run_text(run: dict[str, float]) -> str:
    """Format the result of ``measure`` for a person."""
    return (
        f"  loads in {run['load_seconds']:.1f} s, {run['private_mib']:,.0f} MiB private, {run['mapped_mib']:,.0f} MiB "
        f"mapped\n  decode {run['decode_ms']:.1f} ms, a verify {run['verify_ms']:.1f} ms "
        f"({run['verify_decodes']:.2f} decodes), a draft row {run['draft_row_ms']:.1f} ms, a round "
        f"{run['round_ms']:.1f} ms: {run['speedup']:.2f} times as fast as decoding"
    )


def held_by(process: int | str, *keys: str) -> dict[str, float]:
    """Return a process's memory in GiB under Linux's names for it, 0 if the process has ended."""
    return {key: (linux_bytes(f"/proc/{process}/status", key) or 0) / GIB for key in keys}


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--acceptance", default=3.0, show_default=True, help="Assumed acceptance length, for the speedup.")
@click.option("--repeats", default=15, show_default=True)
@click.option("--prompt", default=PROMPT, show_default=True, help="Tokens in the cache when a call is timed.")
def main(artifact: Path, acceptance: float, repeats: int, prompt: int) -> None:
    """Measure an artifact that has the method decode, and print one JSON object."""
    click.echo(json.dumps(measure(artifact, acceptance, repeats, prompt)))


if __name__ == "__main__":
    main()
