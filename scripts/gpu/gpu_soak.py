"""The stage ``soak`` of ``gpu_check.py``: gemma4-tiny for thousands of rounds, greedy, sampled and by a JSON schema.

Each prompt's greedy text must stay the same, each text by the schema must be JSON, and memory must not grow.
"""

import gc
import json
import re
from pathlib import Path
from typing import Any

import torch
from gpu_artifacts import Check, labelled, made
from gpu_steps import Facts, NotRun

from eagle3.runner import load
from eagle3.runner.model import Model

ROUNDS, BEFORE = 10_000, 1_000
"""The rounds of a soak, and those after which memory is measured first, since caches of compiled code have grown."""
RESERVE = 30
"""Seconds of the stage that are left for what comes after the rounds."""
MOST = {"GPU": 16.0, "host": 64.0}
"""The most MiB by which memory may grow."""
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["n"]}
SCHEMA["additionalProperties"] = False
TOKENS = 64


def soak(check: Check, prompts: Path) -> None:
    if not check.elsewhere:
        check.report.step("10,000 rounds", _no_artifact)
    for label, folder in labelled(check.elsewhere).items():
        check.report.step(
            f"{label}{ROUNDS:,} rounds", lambda facts, folder=folder: soaked(facts, check, folder, prompts)
        )


def _no_artifact(_facts: Facts) -> None:
    raise NotRun("name gemma4-tiny's artifact with --elsewhere")


def soaked(facts: Facts, check: Check, folder: Path, prompts: Path) -> None:
    """Generate until ``ROUNDS`` are done or no time is left. Raises RuntimeError if a greedy text changes, a text is
    not JSON, or memory grows."""
    asked = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()[:8]]
    first, rounds, before = {}, 0, None
    with load(made(folder), runtime="torch") as model:
        while rounds < ROUNDS and check.report.left > RESERVE:
            for prompt in asked:
                text, more = generated(model, prompt, rounds)
                if first.setdefault(prompt, text) != text:
                    raise RuntimeError(f"after {rounds:,} rounds the greedy text of {prompt[:40]!r} is another one")
                rounds += more
            if before is None and rounds >= min(BEFORE, ROUNDS):
                before = memory()
        after = memory()
    grown = {name: round(size - before[name], 1) for name, size in after.items()} if before else {}
    facts |= {"rounds": rounds, "grown, MiB": grown}
    if wrong := [f"{name} {size} MiB" for name, size in grown.items() if size > MOST[name]]:
        raise RuntimeError(f"memory grew in {rounds:,} rounds: {', '.join(wrong)}")


def generated(model: Model, prompt: str, seed: int) -> tuple[str, int]:
    """Return the greedy text of a prompt, and the rounds that it, a sampled text and one by ``SCHEMA`` took. Raises
    ValueError if the latter is not JSON."""
    plain: dict[str, Any] = {"max_new_tokens": TOKENS, "ignore_eos": True}
    greedy = model.generate(prompt, **plain)
    sampled = model.generate(prompt, **plain, temperature=0.8, top_p=0.95, seed=seed)
    by_schema = model.generate(prompt, max_new_tokens=TOKENS, structured_outputs={"json": SCHEMA})
    json.loads(by_schema.text)
    return greedy.text, sum(each.stats.num_drafts + each.stats.num_undrafted for each in (greedy, sampled, by_schema))


def memory() -> dict[str, float]:
    """Return the MiB that this process holds of the host's memory, and that are taken on the GPU if there is one."""
    gc.collect()
    held = re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())
    assert held is not None
    found = {"host": int(held[1]) / 1024}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found["GPU"] = (total - free) / (1 << 20)
    return found
