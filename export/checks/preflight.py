"""Checks a plan before weights load: the backend's needs, the memory, the target's twin and the head."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from eagle3.export.configuration.backends import BACKENDS
from eagle3.export.lowering.backend import Backend, load_backend
from eagle3.export.output.progress import Progress
from eagle3.export.planning.memory import GIB
from eagle3.export.planning.plan import Plan
from eagle3.runner.system.machine import free_memory, size_text


def preflight(plan: Plan, progress: Progress) -> dict[str, Any]:
    """Check the plan, and return the manifest's entry on the twin check. Raises ValueError or FileNotFoundError with
    one line. A dry run only warns if this machine has too little free memory for the export, since another may have
    enough."""
    from eagle3.export.draft.loading import check_head
    from eagle3.export.twin.target import check_target

    backend = load_backend(plan.config.backend)
    backend.check(plan)
    check_memory(plan, backend)
    check_footprint(plan, backend, progress)
    with progress.warned_of(ValueError) if plan.config.dry_run else nullcontext():
        check_export_memory(plan, backend)
    with progress.stage("twin check"), _one_thread():
        return {
            "target": check_target(plan.spec, plan.config.target_model, plan.checkpoint, plan.target_config),
            "draft": check_head(plan.draft, len(plan.taps)) if plan.has_draft else None,
        }


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread: products this small are not worth the wait for other threads, above all on a busy
    machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def check_memory(plan: Plan, backend: Backend) -> None:
    """Raise ValueError if the KV caches do not fit into the memory of this machine, or of the GPU that was named."""
    takes = plan.cache_bytes
    has, whose = backend.memory(plan)
    if takes > has:
        raise ValueError(
            f"--max-seq-len {plan.max_seq_len} makes KV caches of {size_text(takes)}, but {whose} has "
            f"{size_text(has)}: type --max-seq-len {int(plan.max_seq_len * has / takes / 2)} or less"
        )


@dataclass(frozen=True)
class ExportMemory:
    """The memory that an export takes on this machine."""

    takes: int | None
    """The number of bytes; None if weights stay mapped."""
    in_files: bool
    """True if the export keeps its converted weights in files, because they would take more than a third of the free
    memory. The remaining memory then caches the checkpoint's files. Writing the weights takes a sixth of the time of
    loading."""


def memory_of_export(plan: Plan, backend: Backend) -> ExportMemory:
    held, rest, free = backend.held_bytes(plan), backend.export_bytes(plan), free_memory()
    in_files = free is not None and 3 * (held + (rest or 0)) > free
    return ExportMemory(rest if rest is None or in_files else rest + held, in_files)


def check_export_memory(plan: Plan, backend: Backend) -> ExportMemory:
    """Return the memory that the export takes. Raises ValueError if this machine has too little free memory."""
    memory, free = memory_of_export(plan, backend), free_memory()
    if memory.takes is None or free is None or memory.takes <= free:
        return memory
    smaller = [recipe for recipe in BACKENDS[plan.config.backend].recipes if recipe != "none"]
    advice = f", or type --qlinear {smaller[0]}" if plan.qlinear == "none" and smaller else ""
    raise ValueError(
        f"the export takes about {size_text(memory.takes)} of memory, but only {size_text(free)} are free: "
        f"free some{advice}"
    )


def check_footprint(plan: Plan, backend: Backend, progress: Progress) -> None:
    """Raise ValueError if a run does not fit into the memory of this machine's GPU. For an architecture given by a
    flag, print only a warning, since other GPUs of that architecture may be larger."""
    takes = backend.footprint(plan)
    has, whose = backend.memory(plan)
    if takes is None or takes.total <= has:
        return
    flags = backend.suggest_flags(plan, has)
    advice = f"type {flags}, or take a larger GPU" if flags else "take a larger GPU"
    line = f"a run takes {takes}, but {whose} has {has / GIB:.2f}, {(takes.total - has) / GIB:.2f} too few: {advice}"
    if backend.runs_here():
        raise ValueError(line)
    progress.say(f"Warning: {line}")
