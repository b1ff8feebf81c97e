"""Part 7: compiles the methods in two processes, each about half of the work.

Inductor is Python and uses one core. Without a GPU a fork is possible, and it has the traced programs and all weights
from the start. It sends back a library per method and the addresses of its weights, which are the same in this process.
The second process takes memory of its own for the graphs that it compiles.
"""

import ctypes
import gc
import os
import pickle
import signal
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from typing import Any, TypeVar

import torch
from executorch.backends.aoti.aoti_backend import AotiBackend
from executorch.backends.cuda.cuda_backend import CudaBackend, _aoti_device_type_for_weight
from executorch.backends.cuda.cuda_weight_collector import CudaWeightArtifact, CudaWeightCollector, CudaWeightEntry
from executorch.exir.backend.backend_details import PreprocessResult
from torch import Tensor
from torch.export import ExportedProgram

from eagle3.export.lowering.cuda.named_gpu.weights import HostData, Place, host_data, place
from eagle3.export.patching.patches import replaced
from eagle3.runner.system.machine import free_memory, linux_bytes

Compiled = tuple[PreprocessResult, CudaWeightArtifact]
Sent = tuple[PreprocessResult, list[CudaWeightEntry], dict[str, Place | bytes]]
Result = TypeVar("Result")
DIE_WITH_PARENT = 1  # the number of prctl's PR_SET_PDEATHSIG


@contextmanager
def two_processes(recorded: MutableMapping[str, Any], check: Callable[[str], None]) -> Iterator[None]:
    """Make ExecuTorch's CUDA backend compile several methods in two processes, if there are two cores and enough
    memory.

    The other process calls ``check`` with the name of each method that it compiled, and sends back the entry of
    ``recorded`` under that name. The results are the same as with one process, in the order of the methods.
    """

    def preprocess(
        cls: type[CudaBackend], programs: dict[str, list[ExportedProgram]], specs: dict[str, Any]
    ) -> dict[str, list[PreprocessResult]]:
        collector = CudaWeightCollector()
        held = {place(tensor): tensor for given in programs.values() for one in given for tensor in _tensors(one)}
        nodes = {name: sum(len(one.graph.nodes) for one in given) for name, given in programs.items()}
        ours, theirs = halves(nodes) if may_fork() else (list(programs), [])

        def compiled(name: str) -> list[Compiled]:
            given = zip(programs[name], specs[name], strict=True)
            return [_compiled(program, spec, collector) for program, spec in given]

        def compiled_there() -> dict[str, tuple[list[Sent], Any]]:
            torch.set_num_threads(1)  # a fork does not have the parent's threads
            sent: dict[str, tuple[list[Sent], Any]] = {}
            for name in theirs:
                results = [_as_sent(*one, held) for one in compiled(name)]
                check(name)
                sent[name] = results, recorded[name]
            return sent

        with forked(compiled_there, f"compiling {' and '.join(theirs)}") if theirs else nullcontext(dict) as there:
            done = {name: compiled(name) for name in ours}
            sent = there()
        records = dict(recorded) | {name: record for name, (_, record) in sent.items()}
        recorded.clear()
        for name in programs:
            recorded[name] = records[name]
            if name in sent:
                done[name] = [_received(*one, held, collector) for one in sent[name][0]]
            for result, artifact in done[name]:
                collector.add_preprocess_result(result, artifact, cls.get_device_name())
        collector.finish()
        return {name: [result for result, _ in done[name]] for name in programs}

    with replaced("executorch.backends.cuda.cuda_backend.CudaBackend.preprocess_multimethod", classmethod(preprocess)):
        yield


def may_fork() -> bool:
    """Return True if there are two cores, and enough memory for a fork that writes to all memory it shares."""
    if len(os.sched_getaffinity(0)) < 2:
        return False
    held, free = linux_bytes("/proc/self/status", "RssAnon"), free_memory()
    return held is None or free is None or held < free


def halves(weights: dict[str, int]) -> tuple[list[str], list[str]]:
    """Split names into two groups of about the same total weight."""
    groups: tuple[list[str], list[str]] = [], []
    sums = [0, 0]
    for name in sorted(weights, key=weights.__getitem__, reverse=True):
        lighter = sums.index(min(sums))
        groups[lighter].append(name)
        sums[lighter] += weights[name]
    return groups


@contextmanager
def forked(work: Callable[[], Result], what: str) -> Iterator[Callable[[], Result]]:
    """Start ``work`` in a fork. The yielded function waits for its result, or raises what it raised. The fork is killed
    at the end of the context, and when this process ends."""
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    gc.freeze()  # otherwise each collection would write to all shared memory, and so copy it
    process = context.Process(target=_work_and_send, args=(work, sender))
    process.start()
    sender.close()

    def result() -> Result:
        try:
            value, error = receiver.recv()
        except EOFError:
            process.join()
            raise RuntimeError(
                f"{what} ended with exit code {process.exitcode}: if that is -9, memory ran out; type taskset -c 0 "
                "before the command to compile in one process"
            ) from None
        if error is not None:
            raise error
        return value

    try:
        yield result
    finally:
        process.kill()
        process.join()
        receiver.close()
        gc.unfreeze()


def _work_and_send(work: Callable[[], object], sender: Connection) -> None:
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends this process
    outcome: tuple[object, object]
    try:
        outcome = work(), None
    except Exception as error:
        outcome = None, _sendable(error)
    sender.send(outcome)


def _sendable(error: Exception) -> object:
    """Return the error with its traceback as its cause. An error that cannot be pickled becomes a RuntimeError with its
    text."""
    wrapped = ExceptionWithTraceback(error, error.__traceback__)
    try:
        pickle.loads(pickle.dumps(wrapped))
    except Exception:
        return ExceptionWithTraceback(RuntimeError(f"{type(error).__name__}: {error}"), error.__traceback__)
    return wrapped


def _compiled(program: ExportedProgram, specs: list[Any], collector: CudaWeightCollector) -> Compiled:
    """Do the same as ``CudaBackend._preprocess_with_weight_collector``, but do not collect the weights, which must
    happen in the order of the methods."""
    with collector.capture(_aoti_device_type_for_weight) as capture:
        result = AotiBackend.preprocess.__func__(CudaBackend, program, specs)
    return result, capture.artifact


def _tensors(program: ExportedProgram) -> Iterator[Tensor]:
    for values in (program.state_dict, program.constants):
        yield from (value for value in values.values() if isinstance(value, Tensor))


def _as_sent(result: PreprocessResult, artifact: CudaWeightArtifact, held: dict[Place, Tensor]) -> Sent:
    """Prepare a result for sending: a weight that both processes have is sent as its place, other data as bytes."""
    store = result.data_store_output
    store.buffers = [data if isinstance(data, bytes) else data.to_bytes() for data in store.buffers]
    data = {
        key: where if (where := place(data.tensor)) in held else data.to_bytes()
        for key, data in artifact.storages.items()
    }
    return result, artifact.entries, data


def _received(
    result: PreprocessResult,
    entries: list[CudaWeightEntry],
    data: dict[str, Place | bytes],
    held: dict[Place, Tensor],
    collector: CudaWeightCollector,
) -> Compiled:
    storages = {
        key: HostData(_tensor_of(found)) if isinstance(found, bytes) else host_data(collector, held[found])
        for key, found in data.items()
    }
    return result, CudaWeightArtifact(entries=entries, storages=storages)


def _tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
