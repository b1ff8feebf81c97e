"""Times single calls of an artifact's methods."""

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from eagle3.runner.contract import DECODE, DRAFT_STEP, SPECULATE, TARGET_VERIFY, TWO_ROWS
from eagle3.runner.hosts.session import Session
from eagle3.runner.loop.rounds import chunks

Returned = TypeVar("Returned")


def step_milliseconds(calls: Mapping[str, Callable[[], Any]], repeats: int = 100) -> dict[str, float]:
    """Return the median milliseconds of each call. The calls take turns, so changes of the machine's speed affect all
    of them alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: 1000 * sorted(taken)[repeats // 2] for name, taken in times.items()}


def with_cpu_share(call: Callable[[], Returned]) -> tuple[Returned, float]:
    """Return what ``call`` returns, and the CPU time of this thread during the call divided by its wall time. A share
    well below 1 means that the thread slept, or that other programs had the processor."""
    wall, cpu = time.perf_counter(), time.thread_time()
    returned = call()
    return returned, (time.thread_time() - cpu) / (time.perf_counter() - wall)


def step_position(max_seq_len: int) -> int:
    """Return the position at which steps are timed."""
    return min(128, max_seq_len // 2)


def compute_up_to(session: Session, position: int) -> None:
    """Compute the positions before ``position`` if recurrent layers need their states there."""
    metadata = session.metadata
    for start, end in chunks(0, position, metadata) if metadata.rollback_rows is not None else ():
        rows = max(2, end - start)  # a verify window has at least two rows; slots after ``end`` are written again
        method = session.prefill if end - start >= metadata.min_prefill else session.target_verify
        method(torch.ones(1, rows, dtype=torch.long), session.positions[start : start + rows])


def session_steps(session: Session) -> dict[str, Callable[[], Any]]:
    """Return a call of each method to time: ``target_verify`` of a whole verify window, and ``decode`` and
    ``speculate`` if the artifact has them."""
    position, rows = step_position(session.metadata.max_seq_len), session.metadata.usual_window
    tokens, input_pos = torch.arange(1, rows + 1)[None], session.positions[position : position + rows]
    compute_up_to(session, position)
    steps: dict[str, Callable[[], Any]] = {TARGET_VERIFY: lambda: session.target_verify(tokens, input_pos)}
    if session.has_decode:
        token = tokens[:, :1].contiguous()
        steps[DECODE] = lambda: session.decode(token, input_pos[:1])
    if session.has_speculate and position + 2 * rows <= session.metadata.max_seq_len:
        steps[SPECULATE] = lambda: session.speculate(tokens, input_pos)
    return steps


def round_steps(session: Session) -> dict[str, Callable[[], Any]]:
    """Return ``session_steps`` with a verify of two rows and a draft step of one row, the parts of rounds of any chain
    length."""
    position = step_position(session.metadata.max_seq_len)
    if not session.metadata.has_draft:
        return session_steps(session)
    tokens, input_pos = torch.arange(1, 3)[None], session.positions[position : position + 2]
    compute_up_to(session, position)
    feature = session.target_verify(tokens, input_pos).own_feature()[:, :1].clone()
    token = tokens[:, :1].contiguous()
    return session_steps(session) | {
        TWO_ROWS: lambda: session.target_verify(tokens, input_pos),
        DRAFT_STEP: lambda: session.draft_decode(token, feature, input_pos[:1]),
    }
