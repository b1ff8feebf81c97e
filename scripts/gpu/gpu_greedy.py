"""The reference for a session on a GPU: greedy decoding in eager PyTorch with the packed weights of an export."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torchao.utils import TorchAOBaseTensor

from eagle3.export.configuration.config import ExportConfig
from eagle3.export.lowering.cuda.backend import BACKEND as cuda
from eagle3.export.lowering.cuda.graph.dispatch import small_m_dispatch
from eagle3.export.lowering.cuda.kernels.sums import made_for_here
from eagle3.export.pipeline import load_speculator
from eagle3.export.planning.plan import Plan, make_plan
from eagle3.runner.hosts.session import Session
from eagle3.runner.loop.generation import complete
from eagle3.targets.attention import EagerAttention

NEW_TOKENS = 64
NEAR_TIE = 0.075
"""The margin, in standard deviations of the logits, within which kernels with different rounding may choose either
token."""


def placed(module: nn.Module, device: str) -> nn.Module:
    """Move a module to a device. The parts of its quantized weights are moved one by one."""

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
    """Greedy decoding with one token per forward."""

    def __init__(self, device: str = "cuda", config: ExportConfig | None = None):
        """``config`` is the export's; the default is gemma4-tiny for this machine's GPU."""
        self.device = device
        self.plan: Plan = make_plan(config or ExportConfig("gemma4-tiny"))
        self.speculator = load_speculator(self.plan, EagerAttention, cuda.dtype, cuda.conversion(self.plan))
        cuda.prepare(self.speculator, self.plan)
        self.target = placed(self.speculator, device).target

    @torch.no_grad()
    def __call__(self, prompt: list[int], count: int, stops: bool = True) -> tuple[list[int], list[float]]:
        """Return the completion, and for each token the margin by which its logit was the largest, in standard
        deviations of the logits. Without ``stops``, decoding continues after an end token."""
        ids, margins, fed, start = [], [], prompt, 0
        here = made_for_here() if self.device == "cuda" else nullcontext()  # splits K as an export does
        with small_m_dispatch(self.plan.few_rows), here:
            while len(ids) < count and not (stops and ids and ids[-1] in self.plan.eos_ids):
                input_pos = torch.arange(start, start + len(fed), device=self.device)
                state, _ = self.target(torch.tensor([fed], device=self.device), input_pos, ())
                logits = self.target.logits(state[:, -1:]).float().flatten()
                best = logits.topk(2)
                ids.append(int(best.indices[0]))
                margins.append(float((best.values[0] - best.values[1]) / logits.std()))
                fed, start = ids[-1:], start + len(fed)
        return ids, margins


def first_difference(ours: list[int], theirs: list[int], margins: list[float]) -> tuple[int, float] | None:
    """Return the index of the first difference and the margin of ``theirs`` there, None if there is none."""
    places = (place for place, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other)
    place = next(places, None)
    return None if place is None else (place, round(margins[place], 4))


def compare(session: Session, greedy: EagerGreedy, prompts: list[list[int]]) -> dict[str, Any]:
    """Compare a session with eager greedy decoding. Raises RuntimeError if a token differs by more than a near-tie."""
    rounds, tokens, divergences = 0, 0, []
    for number, prompt in enumerate(prompts):
        result = complete(session, prompt, max_new_tokens=NEW_TOKENS)
        expected, margins = greedy(prompt, NEW_TOKENS)
        rounds, tokens = rounds + result.stats.num_drafts, tokens + len(result.token_ids)
        if parting := first_difference(result.token_ids, expected, margins):
            divergences.append((number, *parting))
    for prompt, place, margin in divergences:
        if margin > NEAR_TIE:
            raise RuntimeError(
                f"prompt {prompt} differs from eager greedy at token {place}, by a margin of {margin} deviations"
            )
    same = f"{len(prompts) - len(divergences)} of {len(prompts)} prompts"
    return {
        "identical to eager greedy": same,
        "first divergence (prompt, token, margin)": divergences[0] if divergences else None,
        "tokens a round": round(tokens / max(rounds, 1), 2),
    }
