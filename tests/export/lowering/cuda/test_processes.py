"""Methods compiled in two processes equal those compiled in one."""

import os
import signal
import time
from multiprocessing import active_children
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from executorch.backends.aoti.aoti_backend import AotiBackend
from executorch.backends.cuda.cuda_backend import CudaBackend
from executorch.backends.cuda.cuda_weight_collector import CudaWeightCollector
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.backend.backend_details import PreprocessResult

from eagle3.export.lowering.cuda.named_gpu import processes
from eagle3.export.lowering.cuda.named_gpu.processes import forked, halves, may_fork, two_processes
from eagle3.export.lowering.cuda.named_gpu.weights import HostData, collect, weights_on_host

NODES = {"prefill": 3, "verify": 4, "draft": 1, "speculate": 5}


def programs():
    """Return methods that share one weight and have one of their own."""
    shared = torch.arange(64, dtype=torch.int32)
    return {
        name: [
            SimpleNamespace(
                graph=SimpleNamespace(nodes=range(nodes)),
                state_dict={"shared": shared, name: torch.full((64,), nodes)},
                constants={},
                name=name,
            )
        ]
        for name, nodes in NODES.items()
    }


def compiled(given, cores, check=lambda name: None):
    """Return the data by key, each method's description of its weights, and the process of each; ``preprocess`` stands
    for Inductor."""
    recorded = {}

    def preprocess(cls, program, specs):
        capture = CudaWeightCollector.current_capture()
        made = torch.arange(program.state_dict[program.name][0].item())  # by the compiler
        weights = {
            name: (tensor, None) for name, tensor in {**program.state_dict, "made." + program.name: made}.items()
        }
        capture.artifact = collect(capture.collector, weights, "", lambda tensor: 1)
        store = NamedDataStore()
        store.add_named_data(f"library of {program.name}", program.name.encode())
        store.add_named_data("blob", HostData(torch.empty(0)), external_tag="aoti_cuda_blob")
        recorded[program.name] = os.getpid()
        return PreprocessResult(f"library of {program.name}\nblob".encode(), {}, store.get_named_data_store_output())

    with (
        patch.object(os, "sched_getaffinity", lambda pid: set(range(cores))),
        patch.object(AotiBackend, "preprocess", classmethod(preprocess)),
        weights_on_host(),
        two_processes(recorded, check),
    ):
        results = CudaBackend.preprocess_multimethod(given, {name: [[]] for name in given})
    store = results["prefill"][0].data_store_output
    assert not any(
        getattr(data, "digest", None) for data in store.buffers
    )  # none was hashed to see that it is the same
    held = [getattr(data, "tensor", None) for data in store.buffers]
    buffers = [data if isinstance(data, bytes) else data.to_bytes() for data in store.buffers]
    entries = store.pte_data | store.external_data["aoti_cuda_blob"]
    data = {key: (entry.buffer_index, buffers[entry.buffer_index]) for key, entry in entries.items()}
    return data, {name: result.processed_bytes for name, (result,) in results.items()}, recorded, held


def test_two_processes_compile_the_same_as_one():
    given = programs()
    one, two = compiled(given, cores=1), compiled(given, cores=2)
    assert one[:2] == two[:2] and list(one[0]) == list(two[0]) and list(one[1]) == list(two[1]) == list(NODES)
    assert list(two[2]) == list(NODES)
    assert {name for name, process in two[2].items() if process != os.getpid()} == {"verify", "prefill"}
    assert set(one[2].values()) == {os.getpid()}
    weights = {id(tensor) for (program,) in given.values() for tensor in program.state_dict.values()}
    assert weights <= {id(tensor) for tensor in two[3]}  # not copies


def test_a_check_that_fails_in_the_second_process_fails_the_export():
    def check(name):
        if name == "verify":
            raise ValueError("verify was compiled for some of its lengths")

    with pytest.raises(ValueError, match="verify was compiled for some"):
        compiled(programs(), cores=2, check=check)


def test_methods_are_divided_into_halves_of_similar_work():
    assert halves(NODES) == (["speculate", "draft"], ["verify", "prefill"])
    assert halves({"forward": 1}) == (["forward"], [])


@pytest.mark.parametrize(("cores", "free", "forks"), [(2, 1 << 40, True), (2, 1, False), (1, 1 << 40, False)])
def test_two_processes_are_used_only_with_two_cores_and_twice_the_memory(cores, free, forks):
    with (
        patch.object(os, "sched_getaffinity", lambda pid: set(range(cores))),
        patch.object(processes, "linux_bytes", lambda file, key: {"RssAnon": 1 << 20}[key]),
        patch.object(processes, "free_memory", lambda: free),
    ):
        assert may_fork() is forks


class Unsendable(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def test_an_error_in_the_forked_process_is_raised_with_its_cause():
    def fails():
        try:
            raise OSError("No space left on device")
        except OSError as error:
            raise ValueError("no room") from error

    with forked(fails, "work") as result, pytest.raises(ValueError, match="no room") as raised:
        result()
    assert "No space left on device" in str(raised.value.__cause__)

    def fails_unsendably():
        raise Unsendable("this", "that")

    with forked(fails_unsendably, "work") as result, pytest.raises(RuntimeError, match="Unsendable: this and that"):
        result()


def test_a_killed_fork_is_reported_in_one_line():
    says = pytest.raises(RuntimeError, match="compiling verify ended with exit code -9")
    with forked(lambda: os.kill(os.getpid(), signal.SIGKILL), "compiling verify") as result, says:
        result()


def test_a_forked_process_ends_with_its_context():
    with pytest.raises(KeyboardInterrupt), forked(lambda: time.sleep(600), "work"):
        (process,) = active_children()
        raise KeyboardInterrupt
    assert process.exitcode == -signal.SIGKILL
