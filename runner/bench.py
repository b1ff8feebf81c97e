"""Measurements over one artifact in one process: every claim of speed is a ratio within such a run."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3.runner.contract import DECODE, TARGET_VERIFY
from eagle3.runner.loop import complete
from eagle3.runner.session import ExecuTorchSession
from eagle3.runner.statistics import SpeculationStats


@dataclass
class Run:
    """All prompts one after the other, one way."""

    token_ids: list[list[int]]
    seconds: float
    method_seconds: dict[str, float]
    method_calls: dict[str, int]
    stats: SpeculationStats

    @property
    def tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def loop_share(self) -> float:
        """Share of the wall time spent outside the methods: the loop's own Python."""
        return 1 - sum(self.method_seconds.values()) / self.seconds

    def as_json(self) -> dict[str, Any]:
        methods = {
            name: {"calls": calls, "mean_ms": round(1000 * self.method_seconds[name] / calls, 4)}
            for name, calls in self.method_calls.items()
        }
        return {
            "tokens": self.tokens,
            "seconds": round(self.seconds, 4),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "methods": methods,
            "loop_share": round(self.loop_share, 4),
        }


def run_prompts(session: ExecuTorchSession, prompts: Sequence[list[int]], max_new_tokens: int, speculate: bool) -> Run:
    session.seconds.clear()
    session.calls.clear()
    stats, token_ids = SpeculationStats(), []
    start = time.perf_counter()
    for prompt in prompts:
        result = complete(session, prompt, max_new_tokens=max_new_tokens, speculate=speculate)
        token_ids.append(result.token_ids)
        stats.add(result.stats)
    seconds = time.perf_counter() - start
    return Run(token_ids, seconds, dict(session.seconds), dict(session.calls), stats)


def step_milliseconds(session: ExecuTorchSession, position: int, repeats: int = 200) -> dict[str, float]:
    """Median time of a step at ``position``: ``target_verify`` of a whole window, ``decode`` where it is there."""
    rows = session.metadata.chain_len + 1
    tokens, input_pos = torch.arange(1, rows + 1)[None], torch.arange(position, position + rows)
    calls = {TARGET_VERIFY: lambda: session.target_verify(tokens, input_pos)}
    if session.has_decode:
        calls[DECODE] = lambda: session.decode(tokens[:, :1].contiguous(), input_pos[:1])
    return {name: _median_ms(call, repeats) for name, call in calls.items()}


def first_divergence(ours: Sequence[list[int]], theirs: Sequence[list[int]]) -> tuple[int, int] | None:
    """(prompt, position) of the first token that differs, None where all agree."""
    for prompt, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for position in range(max(len(a), len(b))):
            if a[position : position + 1] != b[position : position + 1]:
                return prompt, position
    return None


class TransformersReference:
    """The same target in transformers, in float32, to hold an artifact against."""

    def __init__(self, checkpoint: Path):
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.set_num_threads(os.cpu_count())  # a thread a core, as torch has it by itself
        if not (checkpoint / "config.json").is_file():
            raise FileNotFoundError(
                f"{checkpoint / 'config.json'} is missing: --checkpoint wants a Hugging Face folder"
            )
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, local_files_only=True)
        self.model.eval().requires_grad_(False)

    def generate(
        self, prompts: Sequence[list[int]], max_new_tokens: int, max_seq_len: int
    ) -> tuple[list[list[int]], float]:
        """Greedy continuations, within the artifact's context, and the seconds they took."""
        token_ids = []
        start = time.perf_counter()
        for prompt in prompts:
            given = torch.tensor([prompt])
            mask = torch.ones_like(given)
            count = min(max_new_tokens, max_seq_len - len(prompt))
            out = self.model.generate(
                given, attention_mask=mask, max_new_tokens=count, do_sample=False, repetition_penalty=1.0
            )
            token_ids.append(out[0, len(prompt) :].tolist())
        return token_ids, time.perf_counter() - start

    def rows_ms(self, rows: int, position: int, repeats: int = 50) -> float:
        """Median time of a forward of ``rows`` rows behind a cache of ``position``."""
        from transformers import DynamicCache

        def prepare():
            cache = DynamicCache(config=self.model.config)
            self.model(torch.ones(1, position, dtype=torch.long), past_key_values=cache)
            return cache

        tokens, caches = torch.arange(1, rows + 1)[None], [prepare() for _ in range(repeats + 10)]
        return _median_ms(lambda: self.model(tokens, past_key_values=caches.pop()), repeats)

    def margin(self, prompt: list[int], tokens: list[int], position: int) -> float:
        """Difference of the two largest logits where the token at ``position`` was chosen."""
        top = self.model(torch.tensor([prompt + tokens[:position]])).logits[0, -1].topk(2).values
        return float(top[0] - top[1])


def _median_ms(call: Callable[[], Any], repeats: int) -> float:
    for _ in range(10):
        call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1000 * sorted(times)[len(times) // 2]
