"""Runs the prompts of a file on replicas in a Ray cluster, with Ray Data. Reading prompts and writing results is left
to ``batch.py``.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from eagle3.runner.commands.batch import Batch, Outcome
from eagle3.runner.text.prompts import Prompt

AT_ONCE = 16
"""The number of prompts in one Ray task. Their results arrive together; if the run is interrupted before that, a later
run computes all of them again.
"""
Said = Sequence[str | None]


class Worker:
    """A replica with a model of its own. Ray creates it on the node where it runs."""

    def __init__(self, artifact: str, loading: dict[str, Any], chat: bool, system: str | None, options: dict[str, Any]):
        from eagle3.runner import load

        self._batch = Batch(load(artifact, **loading), chat, system, options)

    def __call__(self, row: dict[str, bytes]) -> list[dict[str, bytes]]:
        from ray import cloudpickle

        prompt, replies = cloudpickle.loads(row["asked"])
        outcomes = self._batch.run([prompt], {prompt.line: replies})
        return [{"outcome": cloudpickle.dumps(outcome)} for outcome in outcomes]


def over_ray(
    artifact: Path, replicas: int, loading: dict[str, Any]
) -> Callable[[Batch, Sequence[Prompt], Mapping[int, Said]], Iterator[Outcome]]:
    """Return a ``compute`` function for ``run_batch`` that runs prompts on this number of replicas. Every node has the
    artifact at the same path. Each replica of a CUDA artifact has a GPU of its own. The cluster is that of RAY_ADDRESS,
    or this machine.
    """
    return functools.partial(_outcomes, artifact.absolute(), replicas, loading)


def _outcomes(
    artifact: Path,
    replicas: int,
    loading: dict[str, Any],
    batch: Batch,
    prompts: Sequence[Prompt],
    replies: Mapping[int, Said],
) -> Iterator[Outcome]:
    """Yield the outcomes as they are computed, not in the order of the prompts."""
    import ray
    from ray import cloudpickle

    if not ray.is_initialized():
        ray.init(logging_level="warning", log_to_driver=False)
    gpus = 1 if batch.model.metadata.manifest.get("backend") == "cuda" else 0
    _check_room(ray.cluster_resources(), ray.available_resources(), replicas, "GPU" if gpus else "CPU")
    ray.data.DataContext.get_current().enable_progress_bars = False  # ``run_batch`` shows its own progress bar
    asked = [{"asked": cloudpickle.dumps((prompt, replies.get(prompt.line, [])))} for prompt in prompts]
    blocks = max(math.ceil(len(asked) / AT_ONCE), min(len(asked), replicas))
    answered = ray.data.from_items(asked, override_num_blocks=blocks).flat_map(
        Worker,
        fn_constructor_args=(str(artifact), loading, batch.chat, batch.system, batch.options),
        compute=ray.data.ActorPoolStrategy(size=replicas),
        num_gpus=gpus,
    )
    for row in answered.iter_rows():
        yield cloudpickle.loads(row["outcome"])


def _check_room(cluster: Mapping[str, float], free: Mapping[str, float], replicas: int, of: str) -> None:
    """Raise ValueError if a cluster has fewer CPUs (GPUs for CUDA) than replicas, and warn if fewer are free: Ray
    itself would wait for free ones without a message.
    """
    if cluster.get(of, 0) < replicas:
        most = int(cluster.get(of, 0))
        advice = f"type --ray {most}, or add nodes" if most else "add nodes that have one"
        raise ValueError(
            f"--ray {replicas} takes {replicas} {of}s, one for each replica, but the Ray cluster has "
            f"{cluster.get(of, 0):g}: {advice}"
        )
    if free.get(of, 0) < replicas:
        click.echo(
            f"Ray has {free.get(of, 0):g} of {cluster[of]:g} {of}s free: replicas wait until others end", err=True
        )
