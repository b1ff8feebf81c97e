"""Shows where each method of a CPU artifact spends its time: XNNPACK's nodes, ExecuTorch's operators, what is between.

    python scripts/bench/profile_steps.py out

A method is loaded with ExecuTorch's event tracer (ETDump), which XNNPACK reports its nodes to. Times are means over the
middle half of the calls, sorted by duration; every part uses the same calls, so the parts add up.
"""

import sys
from collections import Counter, defaultdict
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

from eagle3.runner.artifact.opening import Artifact, open_artifact
from eagle3.runner.commands.bench_figures import machine
from eagle3.runner.commands.bench_report import rendered
from eagle3.runner.contract import TARGET_VERIFY
from eagle3.runner.hosts.executorch_host import ExecuTorchSession, load_llm_ops, load_runtime
from eagle3.runner.hosts.packed_file import packed_weights_shared
from eagle3.runner.loop.step_times import session_steps
from eagle3.runner.system.command import calm_stderr
from eagle3.runner.system.machine import leave_threads_to_xnnpack

CALLS, WARMUP = 60, 20
EXECUTE, DELEGATES, OPERATORS = "Method::execute", "DELEGATE_CALL", "OPERATOR_CALL"
"""ExecuTorch's events that contain others: a whole call, its delegates, its operators."""
BETWEEN_NODES, BETWEEN_OPERATORS, BETWEEN = "around XNNPACK's nodes", "around operators", "around both"
Part = tuple[str, int, float]
"""The name of a part of a call, how many times it runs, and its milliseconds."""


def profile(artifact: Path) -> dict[str, tuple[float, list[Part]]]:
    """Return for each step the milliseconds of a traced call and its parts, the longest first.

    Raises ValueError for a CUDA artifact.
    """
    opened = open_artifact(artifact)
    if opened.is_cuda:
        raise ValueError(f"{opened.model} is for CUDA: ExecuTorch traces XNNPACK only")
    load_llm_ops(load_runtime())
    with packed_weights_shared():
        session = ExecuTorchSession(load_runtime().load_program(opened.model), opened.metadata, lazily=True)
    return {name: traced(opened, name) for name in session_steps(session)}


def traced(opened: Artifact, name: str) -> tuple[float, list[Part]]:
    """Trace the calls of a step, in a session of its own."""
    with calm_stderr():
        from executorch.devtools import Inspector  # takes seconds: it imports ExecuTorch's compiler

        program = load_runtime().load_program(opened.model, enable_etdump=True)
        with packed_weights_shared():
            call = session_steps(ExecuTorchSession(program, opened.metadata, {TARGET_VERIFY, name}))[name]
        for _ in range(CALLS):
            call()
        with TemporaryDirectory() as folder:
            trace = Path(folder, "trace.etdp")
            program.write_etdump_result_to_file(str(trace), str(trace.with_suffix(".bin")))
            blocks = Inspector(etdump_path=str(trace)).event_blocks
    *_, events = (block.events for block in blocks if any(event.name == EXECUTE for event in block.events))
    return parts([(each.name, each.is_delegated_op, each.perf_data.raw[WARMUP:]) for each in events if each.perf_data])


def parts(events: list[tuple[str, bool, list[float]]]) -> tuple[float, list[Part]]:
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
    return total, [(name, count[name], ms[name]) for name in sorted(ms, key=ms.__getitem__, reverse=True)]


def main() -> None:
    leave_threads_to_xnnpack()
    print(machine(None))
    for name, (total, found) in profile(Path(sys.argv[1])).items():
        shown = [part for part in found if part[2] >= total / 100]
        cells = [
            {name: part, "times": str(count or ""), "ms": f"{ms:.3f}", "share": f"{ms / total:.0%}"}
            for part, count, ms in shown
        ]
        print(f"\n{name}: {total:.3f} ms, traced\n{rendered(cells)}")


if __name__ == "__main__":
    main()
