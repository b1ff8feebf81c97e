"""The measurement of a draft head during an export: when it is made, what it prints, and the plan that follows from
it."""

from typing import Any

from eagle3.export.fit.cost import why_not_measured
from eagle3.export.output.progress import Progress
from eagle3.export.planning.plan import Plan
from eagle3.runner.system.command import one_line


def fitted(plan: Plan, progress: Progress) -> tuple[Plan, dict[str, Any] | None]:
    """Measure the plan's head unless ``--no-fit`` is given. Returns the plan with the head's best reading, and the
    entry of ``export.json``.

    Raises ValueError if the files specify one reading and more proposals are clearly accepted with another.
    """
    config = plan.config
    if config.fit is False or not plan.has_draft or config.random_weights:
        return plan, None
    if (reason := why_not_measured(plan, asked=bool(config.fit))) is not None:
        progress.say(f"the head's readings were not measured: {reason}")
        return plan, None
    from eagle3.export.fit.fitting import Measured, fitted_plan
    from eagle3.export.speculator.tensor_files import return_freed_memory

    try:
        with progress.stage("measure the draft head"):
            measured = Measured(plan, config.text)
            fit = measured.fit(plan)
    # some models cannot compute a whole text in one forward: they are exported without a measurement
    except Exception as error:
        if config.fit:
            raise
        progress.say(f"the head's readings were not measured: {one_line(error)}")
        return plan, None
    plan, lines = fitted_plan(plan, fit)
    for line in lines:
        progress.say(line)
    record = fit.as_json()
    if config.fit or (measured.writes and plan.qlinear != "none"):
        with progress.stage("measure quantization"):
            said = measured.said_of_quantization(plan)
        if said is not None:
            line, record["quantization"] = said
            progress.say(line)
    return_freed_memory()
    return plan, record
