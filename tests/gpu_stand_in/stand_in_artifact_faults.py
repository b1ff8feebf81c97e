"""Puts faults into gemma4-tiny's CUDA artifact, its kernels and the runner, one at a time, and prints the error of
each.

python tests/gpu_stand_in/stand_in_artifact_faults.py ARTIFACT        JSON: the error of each fault, "" for none
python tests/gpu_stand_in/stand_in_artifact_faults.py ARTIFACT early  the same for faults of launches that begin early
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import click
import torch
from interpreted_artifact import looked_at
from stand_in_driver import A100, H100, Device
from stand_in_sessions import Sessions, stderr

from eagle3.runner.contract import DRAFT_DECODE, TARGET_VERIFY
from eagle3.runner.hosts import torch_host, torch_host_checks
from eagle3.runner.hosts.torch_host import TorchSession

FAULTS: dict[str, Callable[[Sessions], None]] = {}
EARLY_FAULTS: dict[str, Callable[[Sessions], None]] = {}


def fault(function: Callable[[Sessions], None]) -> Callable[[Sessions], None]:
    FAULTS[function.__name__] = function
    return function


def early_fault(function: Callable[[Sessions], None]) -> Callable[[Sessions], None]:
    EARLY_FAULTS[function.__name__] = function
    return function


def opened(sessions: Sessions, **options) -> TorchSession:
    return looked_at(sessions.machine.open(sessions.artifact, **options))


def draft(sessions: Sessions, session: TorchSession) -> None:
    """Run a draft step of one row at position 0."""
    feature = torch.ones(1, 1, sessions.feature_width(), dtype=torch.bfloat16)
    session._call(DRAFT_DECODE, torch.ones(1, 1, dtype=torch.long), feature, session.positions[:1])


def verify(sessions: Sessions, session: TorchSession) -> None:
    """Verify a window of two rows from position 0 on."""
    session._call(TARGET_VERIFY, torch.ones(1, 2, dtype=torch.long), session.positions[:2])


@contextmanager
def computing(sessions: Sessions) -> Iterator[None]:
    sessions.machine.kernels.computes = True
    try:
        yield
    finally:
        sessions.machine.kernels.computes = False


@contextmanager
def written(sessions: Sessions, name: str, before: str, after: str) -> Iterator[None]:
    """Replace a line in the kernels whose name contains ``name``."""
    kernels = [kernel for kernel in sessions.machine.kernels.kernels if name in kernel.name and before in kernel.source]
    assert kernels, f"no kernel {name} has {before}"
    sources = [kernel.source for kernel in kernels]

    def write(source: str, kernel) -> None:
        kernel.source = source
        kernel.__dict__.pop("function", None)

    for kernel in kernels:
        write(kernel.source.replace(before, after), kernel)
    try:
        yield
    finally:
        for kernel, source in zip(kernels, sources, strict=True):
            write(source, kernel)


@fault
def right(sessions: Sessions) -> None:
    with computing(sessions):
        session = opened(sessions, graphs=False)
        draft(sessions, session)
        session.close()


# --- kernels


@fault
def stale_slot_attended_to(sessions: Sessions) -> None:
    with computing(sessions), written(sessions, "attention", "<= last[:, None])", "<= last[:, None] + 1)"):
        draft(sessions, opened(sessions, graphs=False))


@fault
def counter_not_set_back(sessions: Sessions) -> None:
    with computing(sessions), written(sessions, "small_m", "tl.store(counter, 0", "tl.store(counter, 1"):
        draft(sessions, opened(sessions, graphs=False))


@fault
def row_beyond_the_last_is_read(sessions: Sessions) -> None:
    clamped = "row = tl.minimum(packed // GROUPS, rows - 1)"
    with computing(sessions), written(sessions, "attention", clamped, "row = packed"):
        draft(sessions, opened(sessions, graphs=False))


# --- the runner


@fault
def constant_on_the_host(sessions: Sessions) -> None:
    place = torch_host._place

    def on_host(mapped, extent, weight, device):
        placed = place(mapped, extent, weight, device)
        return placed.cpu() if "lm_head" in weight.name or "norm" in weight.name else placed

    with patch.object(torch_host, "_place", on_host):
        opened(sessions)


@fault
def inputs_of_a_graph_freed(sessions: Sessions) -> None:
    session = sessions.machine.open(sessions.artifact)
    for _ in range(4):
        sessions.round(session)
    (graphed,) = session._graphs.values()
    graphed._inputs[0].untyped_storage().resize_(0)
    graphed._graph.replay()
    torch.cuda.synchronize()


@fault
def ids_read_before_they_are_there(sessions: Sessions) -> None:
    written_late = []  # the copies must not write into memory that Python has freed

    def early(self: torch.Tensor) -> torch.Tensor:
        if not self.is_cuda:
            return self
        written_late.append(torch.empty(self.shape, dtype=self.dtype))
        return written_late[-1].copy_(self, non_blocking=True).clone()

    with patch.object(torch.Tensor, "cpu", early):
        try:
            draft(sessions, opened(sessions, graphs=False))
        finally:
            torch.cuda.synchronize()


@fault
def storages_freed_before_the_methods(sessions: Sessions) -> None:
    session = opened(sessions, graphs=False)
    draft_only = session._methods[DRAFT_DECODE]
    session.close()
    session._methods[DRAFT_DECODE] = draft_only
    draft(sessions, session)


# --- the device


@fault
def artifact_of_another_architecture(sessions: Sessions) -> None:
    sessions.machine.device.become(A100)
    opened(sessions)


@fault
def module_of_another_architecture(sessions: Sessions) -> None:
    sessions.machine.device.become(A100)
    with patch.object(torch_host_checks, "check_architectures", lambda *given: None):
        draft(sessions, opened(sessions, graphs=False))


@fault
def too_little_shared_memory(sessions: Sessions) -> None:
    sessions.machine.device.become(Device(90, 32 << 10))
    with patch.object(torch_host_checks, "check_architectures", lambda *given: None):
        draft(sessions, opened(sessions, graphs=False))


@fault
def too_little_memory(sessions: Sessions) -> None:
    sessions.machine.device.become(H100._replace(total=8 << 20))
    opened(sessions)


# --- launches that begin early

WAIT = "tl.extra.cuda.gdc_wait()"
RECORDS, BF16 = "int4_records_small_m", "_bf16_small_m"


def with_early_fault(sessions: Sessions, call: Callable, name: str, before: str, after: str) -> None:
    with computing(sessions), written(sessions, name, before, after):
        call(sessions, opened(sessions, graphs=False))


@early_fault
def records_without_a_wait(sessions: Sessions) -> None:
    with_early_fault(sessions, verify, RECORDS, WAIT, "pass")


@early_fault
def bfloat16_without_a_wait(sessions: Sessions) -> None:
    with_early_fault(sessions, draft, BF16, WAIT, "pass")


@early_fault
def inductors_kernel_without_a_wait(sessions: Sessions) -> None:
    with_early_fault(sessions, draft, "triton_", WAIT, "pass")


@early_fault
def records_load_their_input_before_the_wait(sessions: Sessions) -> None:
    with_early_fault(sessions, verify, RECORDS, WAIT, f"tl.load(X + x_at); {WAIT}")


@early_fault
def bfloat16_loads_its_input_before_the_wait(sessions: Sessions) -> None:
    with_early_fault(sessions, draft, BF16, WAIT, f"tl.load(X + x_at, mask=m[None, None, :] < M, other=0); {WAIT}")


@early_fault
def bfloat16_counts_before_the_wait(sessions: Sessions) -> None:
    with_early_fault(sessions, draft, BF16, WAIT, f"tl.atomic_add(ARRIVED, 0); {WAIT}")


@early_fault
def bfloat16_asks_for_its_input_before_the_wait(sessions: Sessions) -> None:
    with_early_fault(sessions, draft, BF16, WAIT, f"ask_l2(X, 16); {WAIT}")


@early_fault
def bfloat16_asks_past_the_end_of_its_weight(sessions: Sessions) -> None:
    with_early_fault(sessions, draft, BF16, "tl.minimum(each // 2, N - 1 - n0)", "(each // 2 + 1)")


@early_fault
def records_ask_for_the_next_weight_past_its_end(sessions: Sessions) -> None:
    with_early_fault(sessions, verify, RECORDS, "pid.to(tl.uint64) * OF_NEXT", "(pid.to(tl.uint64) + 1) * OF_NEXT")


@early_fault
def right_with_its_weight_loaded_before_the_wait(sessions: Sessions) -> None:
    with_early_fault(sessions, draft, BF16, WAIT, f"tl.load(W + w_at); {WAIT}")


def said(sessions: Sessions, function: Callable[[Sessions], None]) -> str:
    text = ""
    with stderr() as read:
        try:
            function(sessions)
        except (RuntimeError, ValueError) as error:
            text = f"{error} {read()}"
    try:
        return " ".join(text.split())
    finally:
        sessions.machine.device.recover()
        sessions.machine.device.become(H100)
        sessions.machine.placed = {}


def main(artifact: Path, faults: dict[str, Callable[[Sessions], None]]) -> None:
    torch.set_num_threads(1)
    sessions = Sessions(artifact)
    sessions.machine.kernels.computes = False
    with sessions.machine.running():
        click.echo(json.dumps({name: said(sessions, function) for name, function in faults.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), EARLY_FAULTS if sys.argv[2:] == ["early"] else FAULTS)
