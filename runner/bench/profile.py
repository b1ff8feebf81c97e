"""Profiles the methods: traces their calls with ExecuTorch, and times the reading of their weights and the
multiplications.

A method is loaded once more with ExecuTorch's event tracer (ETDump), which XNNPACK reports its nodes to. Times are
means over the middle half of the calls, sorted by duration. Every part uses the same calls, so the parts add up. The
tracer takes time itself; the time of a call without it is reported as well.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from eagle3.runner.artifact.opening import Artifact, open_artifact
from eagle3.runner.artifact.pte import read_pte
from eagle3.runner.artifact.xnnpack_graph import read_graphs
from eagle3.runner.bench.machine import cores, machine
from eagle3.runner.console.command import calm_stderr
from eagle3.runner.contract import DECODE, DRAFT_DECODE, PREFILL, SPECULATE, TARGET_VERIFY, Metadata
from eagle3.runner.hosts.executorch_host import ExecuTorchSession, load_runtime
from eagle3.runner.hosts.opening import open_session
from eagle3.runner.hosts.session import Session
from eagle3.runner.hosts.xnnpack_options import packed_weights_shared
from eagle3.runner.rounds.step_times import step_milliseconds, step_position

CALLS, WARMUP = 60, 20
EXECUTE, DELEGATES, OPERATORS = "Method::execute", "DELEGATE_CALL", "OPERATOR_CALL"
"""ExecuTorch's events that contain others: a whole call, its delegates, its operators."""
BETWEEN_NODES, BETWEEN_OPERATORS, BETWEEN = "around XNNPACK's nodes", "around operators", "around both"


class Call(NamedTuple):
    rows: int
    run: Callable[[Session], Any]


def profile(path: Path) -> dict[str, Any]:
    """Return for each method the milliseconds of the parts of a call, of reading its weights, and of its
    multiplications.

    Raises ValueError for a CUDA artifact, and the errors of ``open_artifact``.
    """
    artifact = open_artifact(path)
    if artifact.is_cuda:
        advice = "scripts/gpu/gpu_check.py times a CUDA artifact"
        raise ValueError(f"--profile takes ExecuTorch's trace of XNNPACK, {artifact.model} has none: {advice}")
    session, pte = open_session(artifact), read_pte(artifact.model)
    multiply_adds_a_ms = multiply_rate()
    methods = {}
    for name, call in calls(session).items():
        delegates = pte.plan(name).delegates
        graph = read_graphs(map(pte.delegate_blob, delegates))
        # the linears of a fused round have different numbers of rows
        multiply_adds = graph.multiply_adds_of_all_rows if name == SPECULATE else call.rows * graph.multiply_adds
        methods[name] = {
            "rows": call.rows,
            "ms": milliseconds(partial(call.run, session)),
            "delegates": len(delegates),
            "nodes": dict(graph.nodes.most_common()),
            "weight_bytes": graph.weight_bytes,
            "read_ms": graph.weight_bytes / read_rate(graph.weight_bytes),
            "multiply_adds": multiply_adds,
            "multiply_ms": multiply_adds / multiply_adds_a_ms,
            **traced(artifact, name, call),
        }
    return {"position": profile_position(artifact.metadata), "machine": machine(None), "methods": methods}


def calls(session: Session) -> dict[str, Call]:
    """Return a call of each method as generation makes it: the longest prefill chunk, a verify window, a token. The
    chunk begins earlier if it would exceed the context."""
    metadata = session.metadata
    at, chunk = profile_position(metadata), metadata.max_prefill
    window = metadata.usual_window
    first = min(at, metadata.max_seq_len - chunk)
    tokens, positions = torch.arange(1, chunk + 1)[None] % metadata.vocab_size, session.positions
    rows, token = tokens[:, :window].contiguous(), tokens[:, :1].contiguous()
    verified = session.target_verify(rows, positions[at : at + window])
    found = {
        PREFILL: Call(chunk, lambda session: session.prefill(tokens, positions[first : first + chunk])),
        TARGET_VERIFY: Call(window, lambda session: session.target_verify(rows, positions[at : at + window])),
    }
    if metadata.has_draft:
        feature = verified.own_feature()[:, :1].contiguous()
        found[DRAFT_DECODE] = Call(1, lambda session: session.draft_decode(token, feature, positions[at : at + 1]))
    if session.has_decode:
        found[DECODE] = Call(1, lambda session: session.decode(token, positions[at : at + 1]))
    if session.has_speculate and at + 2 * window <= metadata.max_seq_len:
        found[SPECULATE] = Call(window, lambda session: session.speculate(rows, positions[at : at + window]))
    return found


def profile_position(metadata: Metadata) -> int:
    """Return the position of the calls: with recurrent layers 0, since a traced method runs in a session of its own,
    whose states are empty."""
    return step_position(metadata.max_seq_len) if metadata.rollback_rows is None else 0


def traced(artifact: Artifact, name: str, call: Call) -> dict[str, Any]:
    """Trace the calls of a method. Returns ``traced_ms`` and ``parts``, the longest first: ``name``, ``count`` and
    ``ms`` per call."""
    with calm_stderr():
        from executorch.devtools import Inspector  # takes seconds: it imports ExecuTorch's compiler

        program = load_runtime().load_program(artifact.model, enable_etdump=True)
        with packed_weights_shared():
            session = ExecuTorchSession(program, artifact.metadata, [name])
        for _ in range(CALLS):
            call.run(session)
        with TemporaryDirectory() as folder:
            trace = Path(folder, "trace.etdp")
            program.write_etdump_result_to_file(str(trace), str(trace.with_suffix(".bin")))
            blocks = Inspector(etdump_path=str(trace)).event_blocks
    events = next(block.events for block in blocks if any(event.name == EXECUTE for event in block.events))
    return parts([(each.name, each.is_delegated_op, each.perf_data.raw[WARMUP:]) for each in events if each.perf_data])


def parts(events: list[tuple[str, bool, list[float]]]) -> dict[str, Any]:
    """Sum up ``events`` by kind. An event is a name, whether a delegate reported it, and the milliseconds in each call.
    XNNPACK numbers the nodes of a kind."""
    whole = next(taken for name, _, taken in events if name == EXECUTE)
    order = sorted(range(len(whole)), key=whole.__getitem__)
    typical = order[len(order) // 4 : -(len(order) // 4) or None]
    ms: defaultdict[str, float] = defaultdict(float)
    count: Counter[str] = Counter()
    for name, delegated, taken in events:
        kind = name.rpartition(" #")[0] if delegated else name.removeprefix("native_call_")
        ms[kind] += mean(taken[index] for index in typical)
        count[kind] += 1
        if name not in (EXECUTE, DELEGATES, OPERATORS):
            ms[BETWEEN_NODES if delegated else BETWEEN_OPERATORS] -= mean(taken[index] for index in typical)
    total, delegates, operators = (ms.pop(name, 0) for name in (EXECUTE, DELEGATES, OPERATORS))
    ms[BETWEEN_NODES] += delegates
    ms[BETWEEN_OPERATORS] += operators
    ms[BETWEEN] = total - delegates - operators
    longest_first = sorted(ms.items(), key=itemgetter(1), reverse=True)
    named = [{"name": name, "count": count[name], "ms": taken} for name, taken in longest_first]
    return {"traced_ms": total, "parts": named}


def milliseconds(call: Callable[[], Any]) -> float:
    step_milliseconds({"": call}, repeats=WARMUP)
    return step_milliseconds({"": call}, repeats=CALLS)[""]


def read_rate(size: int) -> float:
    """Return the bytes per millisecond that a sum over ``size`` bytes of float32 reads. If the bytes fit into the
    processor's caches, they are read from there. Of the torch operations that were tried, a sum reads fastest, and a
    matrix-vector product slowest."""
    values = torch.ones(max(1, size // 4))
    with all_cores():
        return 4 * values.numel() / milliseconds(values.sum)


def multiply_rate(side: int = 1024) -> float:
    """Return the multiply-adds per millisecond of a float32 matmul of square matrices."""
    matrix = torch.ones(side, side)
    with all_cores():
        return side**3 / milliseconds(lambda: torch.mm(matrix, matrix))


@contextmanager
def all_cores() -> Iterator[None]:
    """Give torch one thread per core within this context."""
    threads = torch.get_num_threads()
    torch.set_num_threads(cores())
    try:
        yield
    finally:
        torch.set_num_threads(threads)
