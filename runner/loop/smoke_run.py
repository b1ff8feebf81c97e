"""Runs an artifact in a process of its own, for the exporter: ``python -m eagle3.runner.loop.smoke_run ARTIFACT``.

Reads ``{"prompts": [[1, 2], ...], "max_new_tokens": 32}`` from stdin and prints ``{"generations": [{"token_ids",
"stats", "window", "by_fused_rounds", "by_lookup"}, ...], "step_ms": {...}, "cpu_share": 0.98}``. ``window`` is the
first verify window after the prompt: a token and the proposals after it. ``by_fused_rounds`` has the token ids of fused
rounds (``speculate``), if the artifact has that method. ``by_lookup`` has those of rounds that verify what a lookup
proposes, if it has no draft head. ``step_ms`` has the milliseconds of single calls. ``cpu_share`` is the CPU time of
the thread that made them divided by their wall time. Errors are reported as by every command. A crash of this process
does not end the caller.

With ``--methods MODULE:FUNCTION`` the function returns what computes the artifact's methods, by name, on a machine
whose ExecuTorch cannot run them. Nothing is timed then.
"""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eagle3.runner.system.command import OneLineFailures
from eagle3.runner.system.machine import leave_threads_to_xnnpack

if TYPE_CHECKING:
    from torch import Tensor

    from eagle3.runner.hosts.session import Session, Step

WARMUP, CALLS = 2, 7
"""The number of untimed calls of each method, and of timed calls whose median is taken."""


@click.command(cls=OneLineFailures)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--methods", help="MODULE:FUNCTION, which maps the file of a program to its methods.")
def main(artifact: Path, methods: str | None) -> None:
    """Generate greedily from prompts of token ids; all features must be finite."""
    leave_threads_to_xnnpack()

    from eagle3.runner.artifact.opening import open_artifact
    from eagle3.runner.hosts.opening import open_session
    from eagle3.runner.hosts.session import MethodsSession
    from eagle3.runner.loop.generation import complete
    from eagle3.runner.loop.lookup_choice import LookupChoice
    from eagle3.runner.loop.step_times import round_steps, step_milliseconds, with_cpu_share

    asked = json.load(sys.stdin)
    opened, generations = open_artifact(artifact), []
    session: Session
    if methods:
        module, _, name = methods.partition(":")
        session = MethodsSession(getattr(importlib.import_module(module), name)(opened.model), opened.metadata)
    else:
        session = open_session(opened)
    for prompt in asked["prompts"]:
        watched = WatchedSession(session)
        result = complete(watched, prompt, max_new_tokens=asked["max_new_tokens"])
        window = watched.windows.get(len(prompt), [])
        generations.append({"token_ids": result.token_ids, "stats": result.stats.as_json(), "window": window})
        if session.has_speculate:
            fused = complete(session, prompt, max_new_tokens=asked["max_new_tokens"])
            generations[-1]["by_fused_rounds"] = fused.token_ids
        if not session.metadata.has_draft:
            lookup = LookupChoice(0, session.metadata.window - 1)
            proposed = complete(session, prompt, max_new_tokens=asked["max_new_tokens"], lookup=lookup)
            generations[-1]["by_lookup"] = proposed.token_ids
    steps = {} if methods else round_steps(session)
    step_milliseconds(steps, repeats=WARMUP)
    step_ms, cpu_share = with_cpu_share(lambda: step_milliseconds(steps, repeats=CALLS))
    click.echo(json.dumps({"generations": generations, "step_ms": step_ms, "cpu_share": cpu_share}))


class WatchedSession:
    """A session that raises ValueError for NaN or infinite features and keeps its verify windows: ``windows``, by the
    position of their first token. It has no fused rounds, because those return no feature."""

    has_speculate = False

    def __init__(self, session: "Session"):
        self._session, self.windows = session, dict[int, list[int]]()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the session has
        value = getattr(self._session, name)
        return self._checked(name, value) if name in ("prefill", "target_verify", "draft_decode") else value

    def _checked(self, name: str, method: "Callable[..., Step]") -> "Callable[..., Step]":
        def call(*inputs: "Tensor") -> "Step":
            step = method(*inputs)
            given = "logits" if step.feature is None else "features"
            values = step.logits if step.feature is None else step.feature
            if values is not None and not values.isfinite().all():
                raise ValueError(f"{name} returns NaN or infinite {given}")
            if name == "target_verify":
                tokens, input_pos = inputs
                self.windows[int(input_pos[0])] = tokens[0].tolist()
            return step

        return call


if __name__ == "__main__":
    main()
