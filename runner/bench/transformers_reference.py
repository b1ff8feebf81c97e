"""Runs the same target in transformers, in float32, as the reference for an artifact."""

import copy
import inspect
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from eagle3.runner.bench.figures import divergence, spread, tokens_per_second
from eagle3.runner.bench.measure import Completion, Outcome
from eagle3.runner.contract import TARGET_VERIFY, Metadata
from eagle3.runner.model import Result
from eagle3.runner.rounds.step_times import step_milliseconds, step_position


def add_transformers(
    report: dict[str, Any], checkpoint: Path, outcomes: Sequence[Outcome], step_ms: Sequence[dict[str, float]]
) -> None:
    """Run the prompts of the first configuration through transformers once, greedily, and add the results to
    ``report``.

    Call it after all other measurements: transformers uses a thread per core, and these keep spinning for a while.
    """
    metadata, completions = outcomes[0].configuration.model.metadata, outcomes[0].passes[0]
    reference = TransformersReference(checkpoint)
    step = {"transformers": reference.step(metadata.usual_window, step_position(metadata.max_seq_len))}
    step_milliseconds(step, repeats=10)  # a warm-up
    reference.complete(completions[0], metadata)
    theirs, seconds = zip(*(reference.complete(completion, metadata) for completion in completions), strict=True)
    rate, ms = sum(map(len, theirs)) / sum(seconds), step_milliseconds(step)["transformers"]
    report["step_ms"]["transformers, same rows"] = spread([ms])
    report["step_ratios"][f"{TARGET_VERIFY} / transformers"] = spread(taken[TARGET_VERIFY] / ms for taken in step_ms)
    for figures, outcome in zip(report["ways"], outcomes, strict=True):
        figures["ratio_to_transformers"] = spread(tokens_per_second(stats) / rate for stats in outcome.stats())
    report["transformers"] = {
        "tokens_per_second": round(rate, 1),
        "divergence": divergence(completions, theirs, reference.margin),
    }


class TransformersReference:
    def __init__(self, checkpoint: Path):
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.set_num_threads(os.cpu_count() or 1)  # a thread per core is torch's own default
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, local_files_only=True)
        self.model.eval().requires_grad_(False)

    def complete(self, completion: Completion, metadata: Metadata) -> tuple[list[int], float]:
        """Return the greedy completion of the same prompt, and the seconds it took."""
        prompt, options = completion.result.prompt_token_ids, completion.result.options
        self.model.generation_config.eos_token_id = options.stop_ids(metadata) or None
        given = torch.tensor([prompt])
        start = time.perf_counter()
        out = self.model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=min(options.max_new_tokens, metadata.max_seq_len - len(prompt)),
            do_sample=False,
            repetition_penalty=1.0,
        )
        return out[0, len(prompt) :].tolist(), time.perf_counter() - start

    def step(self, rows: int, position: int) -> Callable[[], Any]:
        """Return a call that runs a forward of ``rows`` rows after ``position`` cached tokens; it leaves the cache
        unchanged."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        taken = inspect.signature(self.model.forward).parameters
        name = "cache" if "cache" in taken else "past_key_values"  # transformers 5.23 has the second name
        self.model(torch.ones(1, position, dtype=torch.long), **{name: cache})
        tokens = torch.arange(1, rows + 1)[None]
        return lambda: self.model(tokens, **{name: copy.deepcopy(cache)})

    def margin(self, result: Result, position: int) -> dict[str, float]:
        """Return the difference of the two largest logits where the token at ``position`` was chosen."""
        tokens = result.prompt_token_ids + result.token_ids[:position]
        top = self.model(torch.tensor([tokens])).logits[0, -1].topk(2).values
        return {"top2_margin": float(top[0] - top[1])}
