"""The tokens that a module generates, which its artifact is compared with on a GPU: written beside it, without a GPU.

The module computes in bfloat16 with the packed weights of the export, on the CPU, by the same kernels' references.
"""

import json
from pathlib import Path
from typing import Any

import torch
from proposed import proposed

from eagle3.export.configuration.config import ExportConfig
from eagle3.export.lowering.cuda.backend import BACKEND as cuda
from eagle3.export.lowering.cuda.graph.dispatch import small_m_dispatch
from eagle3.export.pipeline import load_speculator, make_metadata
from eagle3.export.planning.plan import Plan, make_plan
from eagle3.runner.contract import EXPORT_RECORD
from eagle3.runner.hosts.session import EagerSession
from eagle3.runner.loop.generation import complete
from eagle3.targets.attention import EagerAttention

CANDIDATES, LONGEST = 40, 20
"""The number of random prompts to choose from, and the length of the longest in tokens."""
PATHS = ("checkpoint", "draft")


def config_of(artifact: Path) -> ExportConfig:
    """Return the flags of an export, from its record."""
    flags = json.loads((artifact / EXPORT_RECORD).read_text())["flags"]
    flags |= {name: Path(flags[name]) for name in PATHS if flags[name]} | {"output_dir": None, "config_folder": None}
    return ExportConfig(**flags)


def expected(artifact: Path, tokens: int, prompts: list[list[int]] | int) -> list[dict[str, Any]]:
    """Return for each prompt its ids (``prompt``), the ``token_ids`` that follow, their ``margins``, the counts of the
    rounds (``stats``) and the head's ``proposals``. A number of prompts: of random ones, those with the largest
    margins. Raises ValueError if the module's steps and its verify windows choose other tokens on all prompts."""
    greedy, found = EagerGreedy(config_of(artifact)), []
    for prompt in [each for _, each in chosen(greedy, prompts, tokens)] if isinstance(prompts, int) else prompts:
        ids, margins = greedy(prompt, tokens, stops=False)
        generated = eagerly(greedy, prompt, tokens)
        if ids == generated["token_ids"]:
            found.append({"prompt": prompt, "margins": margins, **generated})
    if not found:
        raise ValueError(f"{artifact}: the module's steps and its verify windows choose other tokens")
    return found


class EagerGreedy:
    """Greedy decoding with one token per forward, by the packed weights of an export."""

    def __init__(self, config: ExportConfig):
        self.plan: Plan = make_plan(config)
        self.speculator = load_speculator(self.plan, EagerAttention, cuda.dtype, cuda.conversion(self.plan))
        cuda.prepare(self.speculator, self.plan)

    @torch.no_grad()
    def __call__(self, prompt: list[int], count: int, stops: bool = True) -> tuple[list[int], list[float]]:
        """Return the completion, and for each token the margin by which its logit was the largest, in standard
        deviations of the logits. Without ``stops``, decoding continues after an end token."""
        ids, margins, fed, start = [], [], prompt, 0
        target = self.speculator.target
        with small_m_dispatch(self.plan.few_rows):
            while len(ids) < count and not (stops and ids and ids[-1] in self.plan.eos_ids):
                input_pos = torch.arange(start, start + len(fed))
                state, _ = target(torch.tensor([fed]), input_pos, ())
                logits = target.logits(state[:, -1:]).float().flatten()
                best = logits.topk(2)
                ids.append(int(best.indices[0]))
                margins.append(float((best.values[0] - best.values[1]) / logits.std()))
                fed, start = ids[-1:], start + len(fed)
        return ids, margins


def chosen(greedy: EagerGreedy, prompts: int, tokens: int) -> list[tuple[float, list[int]]]:
    """Return the random prompts whose next ``tokens`` tokens have the largest margins, each with its smallest
    margin."""
    generator, found = torch.Generator().manual_seed(1), []
    for number in range(CANDIDATES):
        size = 3 + number % (LONGEST - 2)
        prompt = torch.randint(greedy.plan.target_config.vocab_size, (size,), generator=generator).tolist()
        found.append((min(greedy(prompt, tokens, stops=False)[1]), prompt))
    return sorted(found, reverse=True)[:prompts]


def eagerly(greedy: EagerGreedy, prompt: list[int], tokens: int) -> dict[str, Any]:
    """Generate with the module's three methods."""
    speculator = greedy.speculator
    session = EagerSession(speculator, make_metadata(greedy.plan, {}, speculator.draft.ids_in_target()))
    session.has_speculate = False
    with small_m_dispatch(greedy.plan.few_rows), proposed(session) as proposals:
        result = complete(session, prompt, max_new_tokens=tokens, stop_ids=[])
    return {"token_ids": result.token_ids, "stats": result.stats.counts(), "proposals": proposals}
