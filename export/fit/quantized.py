"""Measures what quantization costs: the share of tokens that change, and the acceptance of the head on the quantized
target.

The unquantized target wrote the text, so that both are compared after the same tokens, by the chains behind each of
them.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from eagle3.export.draft.common.field import HeadReading
from eagle3.export.fit.attention import WholeText
from eagle3.export.fit.cost import recipes_of
from eagle3.export.fit.seen import Computed, look
from eagle3.export.fit.streamed import Load, in_memory
from eagle3.export.fit.texts import Piece
from eagle3.export.fit.trials import Trials
from eagle3.export.fit.verdict import Expected, of_given_text
from eagle3.export.lowering.backend import Backend, load_backend
from eagle3.export.planning.plan import Plan
from eagle3.export.speculator.speculator import Eagle3Speculator
from eagle3.targets.attention import with_int8_caches

DTYPE = torch.float32


@dataclass(frozen=True)
class Quantized:
    """The effect of quantization on one head. ``changed`` is the share of the text's tokens after which the quantized
    target gives another greedy token; ``before`` and ``after`` are the chains behind all tokens of the text."""

    recipes: str
    changed: float
    before: Expected
    after: Expected
    in_float32: bool
    """True if the artifact computes with another dtype, whose rounding is not in the figures."""

    def line(self) -> str:
        """Return the line to print."""
        weights = "; the rounding of bfloat16 is not in it" if self.in_float32 else ""
        return (
            f"{self.recipes}: {self.changed:.1%} of the target's tokens change, and chains behind all tokens of the "
            f"unquantized target's text give {self.after.text()} in place of {self.before.text()}{weights}"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "recipes": self.recipes,
            "changed_tokens": round(self.changed, 4),
            "unquantized": self.before.as_json(),
            "quantized": self.after.as_json(),
            "in_float32": self.in_float32,
        }


@torch.no_grad()
def share_of_quantization(plan: Plan, over: Computed, load: Load) -> Quantized | None:
    """Measure the plan's recipes on a text that the unquantized target has computed, ``over``. Returns None if nothing
    is quantized. ``load`` loads its target.

    Raises ValueError for recipes that quantize on a GPU alone.
    """
    if not (recipes := recipes_of(plan)):
        return None
    backend = load_backend(plan.config.backend)
    reading = HeadReading(plan.draft, plan.taps, plan.target_config)
    before = of_given_text(Trials(reading, over, plan.chain_len, DTYPE).run(reading))
    again = quantized_target(plan, over, backend, load)
    trials = Trials(reading, again, plan.chain_len, DTYPE)
    head = trials.head(reading)
    backend.prepare_measured(Eagle3Speculator(again.target, head, plan.taps), plan)
    after = of_given_text(trials.of_head(head, reading))
    pairs = zip(over.seen, again.seen, strict=True)
    differ = [(one.greedy != other.greedy)[one.begin - 1 :].float() for one, other in pairs]
    return Quantized(recipes, float(torch.cat(differ).mean()), before, after, backend.dtype != DTYPE)


def quantized_target(plan: Plan, over: Computed, backend: Backend, load: Load = in_memory) -> Computed:
    """Return the plan's quantized target with its states of the same text; the same target if the plan does not
    quantize it."""
    if plan.qlinear == "none" and plan.config.qembedding in (None, "none") and not plan.config.int8_caches:
        return over
    attention = with_int8_caches(WholeText) if plan.config.int8_caches else WholeText
    slots = max(len(each.tokens) for each in over.seen) + 1
    target = load(plan, slots, DTYPE, attention, backend.measured_conversion(plan))
    layers = plan.target_config.num_hidden_layers
    again = [look(target, layers, Piece(each.kind, each.tokens.tolist())) for each in over.seen]
    seen = [replace(new, begin=each.begin) for new, each in zip(again, over.seen, strict=True)]
    return Computed(target, seen, over.written)
