"""Measurements over one artifact in one process: every claim of speed is a ratio within such a run."""

import copy
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eagle3.runner.contract import DECODE, TARGET_VERIFY
from eagle3.runner.loop import complete
from eagle3.runner.session import Session
from eagle3.runner.statistics import GenerationStats


@dataclass
class Run:
    """All prompts generated one way, in a session."""

    token_ids: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    method_seconds: Counter = field(default_factory=Counter)
    method_calls: Counter = field(default_factory=Counter)
    stats: GenerationStats = field(default_factory=GenerationStats)

    def add(self, session: Session, prompt: list[int], max_new_tokens: int, speculate: bool) -> None:
        start = time.perf_counter()
        result = complete(session, prompt, max_new_tokens=max_new_tokens, chain=None if speculate else 0)
        self.seconds += time.perf_counter() - start
        self.method_seconds += session.seconds
        self.method_calls += session.calls
        self.token_ids.append(result.token_ids)
        self.stats.add(result.stats)

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


def step_milliseconds(calls: Mapping[str, Callable[[], Any]], repeats: int = 100) -> dict[str, float]:
    """Median milliseconds of each call. They take turns, so that a machine's moods fall on all alike."""
    times = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: 1000 * sorted(taken)[repeats // 2] for name, taken in times.items()}


def session_steps(session: Session, position: int) -> dict[str, Callable[[], Any]]:
    """A step at ``position``: ``target_verify`` of a whole window, ``decode`` where it is there."""
    rows = session.metadata.chain_len + 1
    tokens, input_pos = torch.arange(1, rows + 1)[None], session.positions[position : position + rows]
    steps = {TARGET_VERIFY: lambda: session.target_verify(tokens, input_pos)}
    if session.has_decode:
        token = tokens[:, :1].contiguous()
        steps[DECODE] = lambda: session.decode(token, input_pos[:1])
    return steps


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

    def generate(self, prompt: list[int], max_new_tokens: int) -> tuple[list[int], float]:
        """The greedy continuation and the seconds it took."""
        given = torch.tensor([prompt])
        start = time.perf_counter()
        out = self.model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            repetition_penalty=1.0,
        )
        return out[0, len(prompt) :].tolist(), time.perf_counter() - start

    def step(self, rows: int, position: int) -> Callable[[], Any]:
        """A forward of ``rows`` rows behind a cache of ``position``, which it takes back."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        self.model(torch.ones(1, position, dtype=torch.long), past_key_values=cache)
        tokens = torch.arange(1, rows + 1)[None]
        return lambda: self.model(tokens, past_key_values=copy.deepcopy(cache))

    def margin(self, prompt: list[int], tokens: list[int], position: int) -> float:
        """Difference of the two largest logits where the token at ``position`` was chosen."""
        top = self.model(torch.tensor([prompt + tokens[:position]])).logits[0, -1].topk(2).values
        return float(top[0] - top[1])
