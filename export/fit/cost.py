"""Estimates the cost of a measurement, and decides whether an export measures without being asked to."""

from eagle3.export.fit import texts
from eagle3.export.planning.plan import Plan
from eagle3.runner.hardware.memory import free_memory

FLOPS_A_CORE = 2.5e10
"""The operations per second of one core of an AVX2 processor, in float32 products of some hundred rows."""
MOST_SECONDS = 60.0
"""The longest estimated time of a measurement that the user did not ask for."""


def why_not_measured(plan: Plan, asked: bool) -> str | None:
    """Return the reason not to measure; None if there is none. ``asked`` is True if the user typed ``--fit``, and so
    accepts a long measurement."""
    import torch

    if plan.quantized_headers:
        return "the target's weights are quantized already"
    if plan.target_config.max_position_embeddings <= texts.GIVEN or plan.max_seq_len <= texts.GIVEN:
        return f"the context is shorter than the texts of {texts.GIVEN} tokens"
    elements = sum(header.elements for header in plan.target_headers.values())
    draft = sum(header.elements for header in plan.draft.headers.values())
    takes, free = 4 * (elements + draft), free_memory()
    if free is not None and takes > free:
        return f"both models take {takes / 1e9:,.1f} GB in float32, {free / 1e9:,.1f} GB are free"
    tokens = texts.SEGMENTS * texts.GIVEN
    seconds = 2 * tokens * (elements + 20 * draft) / (FLOPS_A_CORE * torch.get_num_threads())
    if not asked and seconds > MOST_SECONDS:
        return f"it would take about {seconds / 60:.0f} minutes: type --fit"
    return None
