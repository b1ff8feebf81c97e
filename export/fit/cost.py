"""Estimates the cost of a measurement, decides whether an export measures without being asked to, and names the recipes
whose effect is to be measured."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle3.export.checkpoints.random_folder import LAYER
from eagle3.export.checkpoints.source import TensorHeader
from eagle3.export.fit import texts
from eagle3.export.planning.plan import Plan
from eagle3.runner.system.machine import free_memory

FLOPS_A_CORE = 2.5e10
"""The operations per second of one core of an AVX2 processor, in float32 products of some hundred rows."""
FORWARDS = 24
"""The forwards of a head over the text, of all of its readings: half of the text for each of 20, twice that for their
later steps, the rest of the text for those that may be better. A block's rows are counted, its later steps are not."""
READ_A_SECOND = 1e9
"""The bytes per second of a disk, for a file that does not stay in memory."""
MOST_SECONDS = 60.0
"""The longest estimated time of a measurement that the user did not ask for."""


@dataclass(frozen=True)
class Cost:
    """The memory and the time of a measurement. ``streamed``: the target is computed a layer at a time, since it does
    not fit into memory whole."""

    streamed: bool
    bytes: int
    seconds: float

    def text(self) -> str:
        """Return it for a person."""
        how = ", the target a layer at a time" if self.streamed else ""
        minutes = max(1, round(self.seconds / 60))
        return f"about {minutes} minute{'s' * (minutes > 1)} and {self.bytes / 1e9:,.1f} GB{how}"


def cost(plan: Plan) -> Cost:
    """Estimate a measurement of the plan's head on the texts that ship, on this machine."""
    import torch

    in_layers: Counter[str] = Counter()
    for name, header in plan.target_headers.items():
        if (found := LAYER.match(name)) is not None:
            in_layers[found[2]] += header.elements
    elements = sum(header.elements for header in plan.target_headers.values())
    draft = sum(header.elements for header in plan.draft.headers.values())
    states = texts.GIVEN * plan.target_config.hidden_size * (plan.target_config.num_hidden_layers + 2)  # of a piece
    multiplied = draft - _elements(plan.draft.headers, "embed_tokens.weight")
    if plan.draft.shares_lm_head:
        multiplied += plan.target_config.vocab_size * plan.target_config.hidden_size
    speed = FLOPS_A_CORE * torch.get_num_threads()

    def products(count: int) -> float:
        """Return the seconds of both models over so many pieces of text."""
        tokens = count * texts.GIVEN
        rows = min(tokens * plan.draft.block_rows, texts.BLOCK_ROWS) or tokens
        return 2 * (tokens * elements + FORWARDS * rows * multiplied) / speed

    takes, free = 4 * (elements + draft + texts.SEGMENTS * states), free_memory()
    if free is None or takes <= free:
        return Cost(False, takes, products(texts.SEGMENTS))
    a_layer = 2 * max(in_layers.values(), default=0)  # beside what is read or merged
    held = 4 * (elements - in_layers.total() + a_layer + draft + texts.STREAMED * states)
    reads = sum(header.bytes for header in plan.target_headers.values())
    return Cost(True, held, products(texts.STREAMED) + reads / READ_A_SECOND)


def _elements(headers: Mapping[str, TensorHeader], name: str) -> int:
    return headers[name].elements if name in headers else 0


def why_not_measured(plan: Plan, asked: bool) -> str | None:
    """Return a reason not to measure, None where there is none. ``asked``: the user typed ``--fit``, and waits."""
    if plan.target_config.max_position_embeddings <= texts.GIVEN or plan.max_seq_len <= texts.GIVEN:
        return f"the context is shorter than the texts of {texts.GIVEN} tokens"
    estimate, free = cost(plan), free_memory()
    if free is not None and estimate.bytes > free:
        return f"it takes {estimate.text()}, but {free / 1e9:,.1f} GB are free"
    if not asked and estimate.seconds > MOST_SECONDS:
        return f"it would take {estimate.text()}: type --fit"
    return None


def recipes_of(plan: Plan) -> str:
    """Return the flags by which the plan quantizes something, as they are typed; "" where nothing is."""
    given = {
        "--qlinear": plan.qlinear,
        "--qembedding": plan.config.qembedding,
        "--draft-qlinear": plan.draft_qlinear,
        "--kv-cache": plan.config.kv_cache,
    }
    return ", ".join(f"{flag} {recipe}" for flag, recipe in given.items() if recipe not in (None, "none", "checkpoint"))


def not_measured(plan: Plan, reason: str) -> tuple[str, dict[str, Any]]:
    """Return the line and the entry of ``export.json`` on recipes whose effect is not known, and why."""
    recipes = recipes_of(plan)
    return f"what {recipes} costs was not measured: {reason}", {"recipes": recipes, "not_measured": reason}
