"""The line of a dry run on what quantization costs: measured where that takes seconds, otherwise the reason why not."""

from typing import Any

from eagle3.export.fit.cost import cost, not_measured, recipes_of, why_not_measured
from eagle3.export.planning.plan import Plan
from eagle3.runner.system.command import one_line

MOST_SECONDS = 5.0
"""The longest estimated time of a measurement in a dry run."""


def quantization_of(plan: Plan, weights_here: bool) -> tuple[str, dict[str, Any]] | None:
    """Return a line on what the typed recipes cost, and its entry of ``--json``; None if no recipe was typed, or if
    there is no head. ``weights_here`` is False if the plan was made from headers alone."""
    config = plan.config
    typed = (config.qlinear, config.draft_qlinear, config.qembedding, config.kv_cache)
    recipes = recipes_of(plan)
    if not any(typed) or not recipes or not plan.has_draft or config.random_weights:
        return None
    line, entry = _said(plan, weights_here)
    return f"cost     {line}", entry


def _said(plan: Plan, weights_here: bool) -> tuple[str, dict[str, Any]]:
    if (reason := _why_not(plan, weights_here)) is not None:
        return not_measured(plan, reason)
    from eagle3.export.fit.fitting import Measured

    try:
        said = Measured(plan, plan.config.text).said_of_quantization(plan)
    # some models cannot compute a whole text in one forward: the plan holds for them too
    except Exception as error:  # noqa: BLE001
        return not_measured(plan, one_line(error))
    assert said is not None, "a recipe was typed"
    return said


def _why_not(plan: Plan, weights_here: bool) -> str | None:
    if not weights_here:
        return "the weights are not on this machine"
    if (reason := why_not_measured(plan, asked=True)) is not None:
        return reason
    estimate = cost(plan)
    if estimate.seconds > MOST_SECONDS:
        return f"it would take {estimate.text()}: type --fit-only in place of --dry-run"
    return None
