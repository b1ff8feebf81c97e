"""Estimates the cost of a measurement, and decides whether an export measures without being asked to."""

from collections import Counter
from dataclasses import dataclass

from eagle3.export.checkpoints.random_folder import LAYER
from eagle3.export.fit import texts
from eagle3.export.planning.plan import Plan
from eagle3.runner.hardware.memory import free_memory

FLOPS_A_CORE = 2.5e10
"""The operations per second of one core of an AVX2 processor, in float32 products of some hundred rows."""
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
    products = 2 * texts.GIVEN * (elements + 20 * draft) / (FLOPS_A_CORE * torch.get_num_threads())
    takes, free = 4 * (elements + draft + texts.SEGMENTS * states), free_memory()
    if free is None or takes <= free:
        return Cost(False, takes, texts.SEGMENTS * products)
    a_layer = 2 * max(in_layers.values(), default=0)  # beside what is read or merged
    held = 4 * (elements - in_layers.total() + a_layer + draft + texts.STREAMED * states)
    reads = sum(header.bytes for header in plan.target_headers.values())
    return Cost(True, held, texts.STREAMED * products + reads / READ_A_SECOND)


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
