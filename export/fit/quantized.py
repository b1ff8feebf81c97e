"""Measures what quantization costs: the share of tokens that change, and the acceptance of the head on the quantized
target.

The unquantized target wrote the text, so that both are compared after the same tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eagle3.export.draft.common.field import HeadReading
from eagle3.export.fit.attention import Pieces, WholeText
from eagle3.export.fit.seen import Seen, look
from eagle3.export.fit.texts import Piece
from eagle3.export.fit.trials import Trials
from eagle3.export.fit.verdict import Expected, of_given_text
from eagle3.export.lowering.backend import load_backend
from eagle3.export.planning.plan import Plan
from eagle3.export.speculator.speculator import Eagle3Speculator
from eagle3.targets import TapTarget
from eagle3.targets.attention import with_int8_caches


@dataclass(frozen=True)
class Quantized:
    """The effect of quantization on one head. ``changed`` is the share of the text's tokens after which the quantized
    target gives another greedy token."""

    recipes: str
    changed: float
    before: Expected
    after: Expected

    def line(self) -> str:
        """Return the line to print."""
        return (
            f"{self.recipes}: {self.changed:.1%} of the target's tokens change, and a round gives "
            f"{self.after.text()} in place of {self.before.text()}, on the text of the unquantized target"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "recipes": self.recipes,
            "changed_tokens": round(self.changed, 4),
            "unquantized": self.before.as_json(),
            "quantized": self.after.as_json(),
        }


@torch.no_grad()
def share_of_quantization(plan: Plan, seen: Sequence[Seen], unquantized: TapTarget) -> Quantized | None:
    """Measure the plan's recipes on a text that the ``unquantized`` target has ``seen``. Returns None if nothing is
    quantized, or if the quantized models do not run on this machine."""
    given = {"--qlinear": plan.qlinear, "--draft-qlinear": plan.draft_qlinear}
    recipes = [f"{flag} {recipe}" for flag, recipe in given.items() if recipe not in ("none", "checkpoint")]
    recipes += ["--kv-cache int8"] if plan.config.int8_caches else []
    backend = load_backend(plan.config.backend)
    if not recipes or not backend.eager_on_host:
        return None
    length = max(len(each.tokens) for each in seen)
    pieces = Pieces(length)
    factory: Any = lambda shape: WholeText(shape, pieces)  # noqa: E731 - an attention as backends make it
    target = plan.spec.module().load(
        plan.target_source.tensors(),
        plan.target_config,
        length,
        backend.dtype,
        with_int8_caches(factory) if plan.config.int8_caches else factory,
        backend.conversion(plan),
    )
    reading = HeadReading(plan.draft, plan.taps, plan.target_config)
    layers = plan.target_config.num_hidden_layers
    begun = [Piece(each.kind, each.tokens[: each.begin].tolist()) for each in seen]
    again = [
        look(target, layers, [of], [each.tokens.tolist()], pieces)[0] for of, each in zip(begun, seen, strict=True)
    ]
    trials = Trials(reading, target, again, plan.chain_len, backend.dtype)
    head = trials.head(reading)
    backend.prepare(Eagle3Speculator(target, head, plan.taps), plan)
    after = of_given_text(trials.of_head(head, reading))
    whole = Trials(reading, unquantized, seen, plan.chain_len, backend.dtype)
    before = of_given_text(whole.run(reading))
    differ = [(one.greedy != other.greedy)[one.begin - 1 :].float() for one, other in zip(seen, again, strict=True)]
    return Quantized(", ".join(recipes), float(torch.cat(differ).mean()), before, after)
