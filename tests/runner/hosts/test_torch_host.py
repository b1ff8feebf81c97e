"""PyTorch hosts a CUDA artifact: an artifact compiled for the CPU runs completely, one for CUDA is tested up to the
launch."""

import json
import logging
import re
import shutil
from collections import Counter
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import fail_command, run_command
from cuda_artifact import ARCHS
from eager import eager_speculator
from order_of_calls import OrderOfCalls

from eagle3.export.configuration.config import ExportConfig
from eagle3.export.planning.plan import make_plan
from eagle3.runner.artifact.cuda_library import Library
from eagle3.runner.artifact.cuda_weights import TABLE_FAMILY, TABLE_MAGIC, WEIGHTS_FILE, read_ptd_index
from eagle3.runner.artifact.opening import open_artifact
from eagle3.runner.artifact.pte import read_pte
from eagle3.runner.commands.bench import main as bench_main
from eagle3.runner.commands.run import main as run_main
from eagle3.runner.contract import (
    DRAFT_DECODE,
    METHODS,
    MODEL_FILE,
    READ_STATE,
    SPECULATE,
    TARGET_VERIFY,
    WRITE_STATE,
    row_bounds,
)
from eagle3.runner.hosts import one_host, opening, torch_host, torch_host_checks
from eagle3.runner.hosts.cuda_graph import NEEDED, SingleThreaded, _tensors, capture
from eagle3.runner.hosts.opening import choose_runtime, open_session
from eagle3.runner.hosts.session import EagerSession
from eagle3.runner.hosts.torch_host import TorchSession
from eagle3.runner.loop.generation import complete
from eagle3.runner.sampling.options import Sampling
from eagle3.runner.sampling.sampler import Sampler

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
PROMPT = "5,6,7,8,9,10,11,12,13,14,15"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Use one thread, because a second one mostly waits during small multiplications, which takes long on a busy
    machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def hosted(host_artifact):
    session = open_session(open_artifact(host_artifact))
    assert isinstance(session, TorchSession)
    return session


@pytest.fixture(scope="module")
def eager(hosted):
    plan = make_plan(ExportConfig("gemma4-tiny", output_dir=None, cuda_arch="sm_90"))
    return EagerSession(eager_speculator(plan), hosted.metadata)


@pytest.fixture
def copied(host_artifact, tmp_path):
    """A copy of the artifact, which tests damage."""
    return Path(shutil.copytree(host_artifact, tmp_path / "copied"))


def prompt_of(length: int) -> list[int]:
    return [(7 * i + 3) % 2000 + 5 for i in range(length)]


# --- on the CPU, end to end


# Fewer than min-prefill; a chunk and one token more; chunks and verify windows.
@pytest.mark.parametrize("length", [2, 65, 131])
def test_pytorch_hosted_tokens_equal_transformers_greedy_tokens(length, hosted, reference):
    prompt = prompt_of(length)
    given = torch.tensor([prompt])
    greedy = reference.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=24, do_sample=False, repetition_penalty=1.0
    )[0, length:].tolist()
    for chain_len in range(1, hosted.metadata.chain_len + 1):
        assert complete(hosted, prompt, max_new_tokens=24, chain=chain_len).token_ids == greedy


def test_a_seed_gives_the_same_text_under_pytorch_and_executorch(hosted, session, eager):
    """Neither the host of the methods nor the chain length changes the text."""
    prompt, sampling = prompt_of(40), Sampling(temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=6)
    texts = [
        complete(
            each, prompt, max_new_tokens=40, chain=chain, choice=Sampler(sampling, each.metadata, prompt)
        ).token_ids
        for each in (hosted, session, eager)
        for chain in (0, 3)
    ]
    assert len(set(texts[0])) > 5 and all(text == texts[0] for text in texts)


def test_every_length_of_every_hosted_method_equals_eager(hosted, eager):
    width = eager.target_verify(torch.ones(1, 2, dtype=torch.long), torch.arange(2))[1].shape[-1]
    generator = torch.Generator().manual_seed(0)
    for name in METHODS:
        position = 0  # in each cache: target_verify writes the slots of prefill again
        least, most = row_bounds(hosted.metadata)[name]
        for rows in sorted({*range(least, min(most, least + 8) + 1), most}):
            tokens = torch.randint(5, 2000, (1, rows), generator=generator)
            feature = [torch.randn(1, rows, width, generator=generator)] if name == "draft_decode" else []
            at = hosted.positions[position : position + rows]
            position += rows
            ids, *made = getattr(hosted, name)(tokens, *feature, at)
            expected_ids, *expected = getattr(eager, name)(tokens, *feature, at)
            assert torch.equal(ids, expected_ids), (name, rows)
            torch.testing.assert_close(made, expected, rtol=1e-3, atol=1e-3)  # feature and logits


def test_a_number_of_rows_outside_a_methods_bounds_is_refused(hosted):
    for rows in (1, hosted.metadata.chain_len + 2):
        with pytest.raises(ValueError, match=f"target_verify takes 2 to 4 rows, fed {rows}"):
            hosted.target_verify(torch.ones(1, rows, dtype=torch.long), hosted.positions[:rows])
    with pytest.raises(ValueError, match="no method decode: export it with --with-decode"):
        hosted.decode(torch.ones(1, 1, dtype=torch.long), hosted.positions[:1])


def test_each_storage_is_copied_to_the_device_once_for_all_methods(host_artifact):
    methods = torch_host.read_methods(read_pte(host_artifact / MODEL_FILE))
    needed = torch_host.storages(methods)
    placed = torch_host.place_storages(
        host_artifact / WEIGHTS_FILE, read_ptd_index(host_artifact / WEIGHTS_FILE), needed, torch.device("cpu")
    )
    users = Counter(key for method in methods for key in method.table.storages())
    caches = {weight.storage_key for method in methods for weight in method.table.weights if "cache" in weight.name}
    assert sum(count == 3 for key, count in users.items() if key in caches) >= 12  # keys and values of six layers
    assert len({storage.data_ptr() for storage in placed.values()}) == len(placed) == len(users)


def test_a_closed_session_frees_its_memory_and_reports_that_it_is_closed(host_artifact):
    session = open_session(open_artifact(host_artifact), "torch")
    complete(session, [5, 6, 7], max_new_tokens=4)
    session.close()
    session.close()
    with pytest.raises(ValueError, match="is closed"):
        complete(session, [5, 6, 7], max_new_tokens=4)


def test_the_commands_run_a_pytorch_hosted_artifact(host_artifact, hosted, tmp_path):
    expected = complete(hosted, [int(token) for token in PROMPT.split(",")], max_new_tokens=12).token_ids
    args = ("--prompt-tokens", PROMPT, "--max-new-tokens", 12, "--json")
    assert json.loads(run_command(run_main, host_artifact, *args).stdout)["token_ids"] == expected
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt_tokens": expected}))
    report = json.loads(
        run_command(bench_main, host_artifact, "--prompts", prompts, "--max-new-tokens", 8, "--json").stdout
    )
    assert report["ways"][1]["stats"]["generation_tokens"] == 3 * 8 and "target_verify" in report["step_ms"]


# --- CUDA graphs, all but capture and replay


def test_the_capturable_entry_point_equals_the_container(hosted):
    tokens, at = torch.tensor([prompt_of(64)]), hosted.positions
    feature = hosted.prefill(tokens, at[:64]).feature
    for name, method in hosted._methods.items():
        rows = hosted._rows[name][0]
        values = [tokens[:, :rows], *([feature[:, :rows]] if name == DRAFT_DECODE else []), at[:rows]]
        run, free = method.capturable()
        inputs = [hosted._fitting(value) for value in values]
        expected = method(inputs)
        for _ in range(2):  # first over the container's caches, then over its own
            assert all(torch.equal(one, other) for one, other in zip(run(inputs), expected, strict=True))
        free()


def test_a_container_whose_constants_are_refused_is_freed_with_its_constants(hosted):
    method = hosted._methods[SPECULATE]
    library, made = method._library, []

    class Counted:
        def __getattr__(self, name):
            made.append(name.removeprefix("AOTInductorModelContainer"))
            return getattr(library, name)

    name, given = next(iter(method._constants.items()))
    tensor = given.clone()
    held = tensor._use_count()
    with pytest.raises(RuntimeError, match="UpdateUserManagedConstantBufferPairs failed"):
        SingleThreaded(Counted(), torch.device("cpu"), {name: tensor})  # all other constants are missing
    assert made.count("CreateWithDevice") == made.count("Delete") == 2  # a lookup, then a call
    assert tensor._use_count() == held
    with pytest.raises(ValueError, match="its library has no AOTInductorModelContainerCreateWithDevice"):
        SingleThreaded(SimpleNamespace(), torch.device("cpu"), {})


@pytest.mark.parametrize("taken", [0, 1])
def test_a_failing_run_frees_the_inputs_that_the_library_did_not_take(taken):
    took = []

    def run(container, given, count, *others):
        for index in range(taken):
            took.append(given[index])
            given[index] = None
        return 1

    def count(container, into):
        into._obj.value = 1
        return 0

    calls = dict.fromkeys(NEEDED, lambda *given: 0)
    calls |= {name: run for name in calls if name.endswith("RunSingleThreaded")}
    calls |= {name: count for name in calls if name.endswith("GetNumOutputs")}
    inputs = [torch.zeros(3), torch.ones(2)]
    held = [each._use_count() for each in inputs]
    with pytest.raises(RuntimeError, match="RunSingleThreaded failed"):
        SingleThreaded(SimpleNamespace(**calls), torch.device("cpu"), {})(inputs)
    assert [each._use_count() for each in inputs] == [count + (at < taken) for at, count in enumerate(held)]
    _tensors(took)


def test_memory_is_freed_if_a_method_does_not_load(host_artifact, monkeypatch):
    placed, place, load = {}, torch_host.place_storages, torch_host.load_method

    def keep(*given):
        placed.update(place(*given))
        return placed

    def refuse_verify(method, *given):
        if method.name == TARGET_VERIFY:
            raise ValueError("the library of target_verify does not load")
        return load(method, *given)

    monkeypatch.setattr(torch_host, "place_storages", keep)
    monkeypatch.setattr(torch_host, "load_method", refuse_verify)
    with pytest.raises(ValueError, match="target_verify does not load"):
        open_session(open_artifact(host_artifact))
    assert placed and not any(storage.untyped_storage().nbytes() for storage in placed.values())


class FakeStream:
    pass


@pytest.fixture
def cuda(monkeypatch):
    """A stand-in for ``torch.cuda`` in a capture, with the current stream and the pool of allocations."""
    state = SimpleNamespace(stream="the caller's", pools=[], refuses=None, ended=0)

    @contextmanager
    def stream(chosen):
        before, state.stream = state.stream, chosen
        try:
            yield
        finally:
            state.stream = before

    class Captured:
        def capture_begin(self, pool, capture_error_mode):
            state.pools.append(pool)
            if state.refuses == "begin":
                raise RuntimeError("no capture")

        def capture_end(self):
            state.ended += 1
            state.pools.pop()
            if state.refuses in ("body", "end"):
                raise RuntimeError("failed due to a previous error")

    for owner, name, value in (
        (torch.cuda, "CUDAGraph", Captured),
        (torch.cuda, "Stream", FakeStream),
        (torch.cuda, "stream", stream),
        (torch.cuda, "device", lambda device: nullcontext()),
        (torch.cuda, "synchronize", lambda: None),
        (torch.cuda, "empty_cache", lambda: None),
        (torch.cuda, "graph_pool_handle", lambda: (0, 1)),
        (torch._C, "_cuda_endAllocateToPool", lambda device, pool: state.pools.remove(pool)),
        (torch._C, "_cuda_releasePool", lambda device, pool: None),
    ):
        monkeypatch.setattr(owner, name, value)
    return state


@pytest.mark.parametrize("refuses", ["begin", "body", "end", None])
def test_a_capture_restores_stream_and_pool_however_it_ends(refuses, cuda):
    cuda.refuses, streams = refuses, []

    def body():
        streams.append(cuda.stream)
        if refuses == "body":
            raise RuntimeError("what the kernel said")

    said = {"begin": "no capture", "body": "what the kernel said", "end": "previous error"}
    with pytest.raises(RuntimeError, match=said[refuses]) if refuses else nullcontext():
        capture(body, torch.device("cuda", 0))
    assert cuda.stream == "the caller's" and not cuda.pools
    assert cuda.ended == (refuses != "begin")
    assert [type(stream) for stream in streams] == [FakeStream] * (refuses != "begin")


@pytest.fixture
def graphed(host_artifact):
    """A session with methods of its own."""
    with closing(open_session(open_artifact(host_artifact))) as session:
        yield session


@pytest.mark.parametrize("whole", [True, False])
def test_rounds_are_replayed_after_warming_up_and_graphs_are_freed_before_the_memory(whole, graphed, hosted):
    graphed.has_speculate, graphs = whole, []
    graphed.replay_graphs(lambda *given: graphs.append(OrderOfCalls()) or graphs[-1].capture(*given))
    assert set(graphed._graphs) == {(SPECULATE, 4)} if whole else {(TARGET_VERIFY, 4), (DRAFT_DECODE, 1)}
    options = {"max_new_tokens": 40, "stop_ids": []}
    for length in (20, 70):
        result = complete(graphed, prompt_of(length), **options)
        assert result.token_ids == complete(hosted, prompt_of(length), **options).token_ids
    for graph in graphs:
        assert graph.calls[:2] == ["capture", "replay"] and set(graph.calls[1:]) == {"replay"}
    if whole:  # the host reads each round's ids, and passes in only the first inputs
        given, real = [], graphed._graphs[SPECULATE, 4]
        graphed._graphs[SPECULATE, 4] = lambda inputs: given.append(inputs) or real(inputs)
        complete(graphed, prompt_of(20), **options)
        graphed._graphs[SPECULATE, 4], static = real, real._inputs
        assert all(inputs[0] is static[0] and inputs[1] is static[1] for inputs in given[1:]) and len(given) > 6
    rounds = result.stats.num_drafts
    assert sum(graph.calls.count("replay") for graph in graphs) > (rounds if whole else 3 * rounds)
    graphed._free = lambda: graphs[0].calls.append("memory")
    graphed.close()
    assert graphs[0].calls[-2:] == ["reset", "memory"] and graphs[-1].calls.count("reset") == 1


WINDOWS = [[5, 6, 7, 8], [900, 1000, 1100, 1200], [5, 6, 7, 8]]


def test_the_outputs_of_a_replay_survive_the_next_one(graphed):
    graphed.has_speculate = False
    graphed.replay_graphs(lambda *given: OrderOfCalls().capture(*given))
    complete(graphed, prompt_of(20), max_new_tokens=40, stop_ids=[])
    one, other, again = (graphed.target_verify(torch.tensor([window]), graphed.positions[:4]) for window in WINDOWS)
    for kept, between, same in zip(one[1:], other[1:], again[1:], strict=True):  # all outputs but the ids
        assert torch.equal(kept, same) and not torch.equal(kept, between)


def test_a_method_that_cannot_be_captured_runs_without_a_graph_and_is_logged_once(graphed, hosted, caplog):
    def refuse(_body, _device):
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    graphed.replay_graphs(refuse)
    expected = complete(hosted, prompt_of(20), max_new_tokens=40).token_ids
    with caplog.at_level(logging.WARNING):  # commands disable it unless --verbose is given
        assert complete(graphed, prompt_of(20), max_new_tokens=40).token_ids == expected
    said = "no CUDA graph of speculate, which runs without one: operation not permitted when stream is capturing"
    assert caplog.messages == [said]


# --- which runtime


class Registry:
    def __init__(self, *names: str):
        self.registered_backend_names = list(names)
        self.is_available = self.registered_backend_names.__contains__


class Runtime:
    """A stand-in for ``executorch.runtime`` that records what is loaded."""

    def __init__(self, *names: str):
        self.backend_registry, self.loaded = Registry(*names), []

    def load_program(self, model, data_path):
        self.loaded.append((model, data_path))
        raise RuntimeError("no device")


def test_executorch_is_preferred_if_it_has_the_backend_and_gets_the_weights(host_artifact, monkeypatch):
    opened, runtime = open_artifact(host_artifact), Runtime("XnnpackBackend", "CudaBackend")
    monkeypatch.setattr(opening, "load_runtime", lambda: runtime)
    monkeypatch.setattr(one_host, "provider", lambda: None)  # other tests ran artifacts in this process
    assert [choose_runtime(opened, asked) for asked in ("auto", "executorch", "torch")] == [
        "executorch",
        "executorch",
        "torch",
    ]
    with pytest.raises(ValueError, match="no device.*needs an NVIDIA GPU.*weight tables; --verbose shows"):
        open_session(opened)
    assert runtime.loaded == [(host_artifact / MODEL_FILE, host_artifact / WEIGHTS_FILE)]


def test_pytorch_is_the_host_if_executorch_lacks_the_backend(host_artifact, monkeypatch):
    opened = open_artifact(host_artifact)
    monkeypatch.setattr(opening, "load_runtime", lambda: Runtime("XnnpackBackend"))
    assert choose_runtime(opened, "auto") == "torch"
    with pytest.raises(ValueError, match="needs CudaBackend, this ExecuTorch has XnnpackBackend: type --runtime torch"):
        open_session(opened, "executorch")


def test_pytorch_refuses_to_host_an_artifact_of_another_backend(host_artifact, artifact):
    opened = open_artifact(artifact)
    assert [choose_runtime(opened, asked) for asked in ("auto", "executorch")] == ["executorch"] * 2
    code, line = fail_command(run_main, artifact, "--prompt-tokens", PROMPT, "--runtime", "torch")
    assert code == 1 and "runs CUDA artifacts" in line and "is for xnnpack" in line


# --- refusals


def run_fails(folder: Path) -> str:
    code, line = fail_command(run_main, folder, "--prompt-tokens", PROMPT, "--runtime", "torch")
    assert code == 1
    return line


def test_a_weight_table_of_another_version_is_refused_by_the_host(copied):
    model = copied / MODEL_FILE
    model.write_bytes(model.read_bytes().replace(TABLE_MAGIC, TABLE_FAMILY + b"4"))
    line = run_fails(copied)
    assert str(model) in line and "ETCUDAFQN4" in line and "ETCUDAFQN3" in line and "another version" in line


def test_missing_truncated_or_foreign_weights_are_refused(copied, cuda_artifact):
    stored = copied / WEIGHTS_FILE
    with stored.open("r+b") as file:
        file.truncate(stored.stat().st_size // 2)
    assert "ends early" in run_fails(copied)
    shutil.copy(cuda_artifact / WEIGHTS_FILE, stored)  # has the same names, on another device
    assert "lacks it" in run_fails(copied) and "different exports" in run_fails(copied)
    stored.unlink()
    assert f"{stored} is missing" in run_fails(copied)


def test_a_symbol_that_the_host_lacks_is_named_before_anything_loads(copied, monkeypatch):
    model = copied / MODEL_FILE
    spoiled = model.read_bytes().replace(b"\0aoti_torch_empty_strided\0", b"\0aoti_torch_empty_striped\0")
    model.write_bytes(spoiled)
    monkeypatch.setattr(torch_host, "place_storages", None)
    line = run_fails(copied)
    assert "need aoti_torch_empty_striped, which PyTorch" in line and "prefill, target_verify, draft_decode" in line


def test_a_program_with_operators_outside_its_delegates_is_refused(host_artifact):
    pte = read_pte(host_artifact / MODEL_FILE)
    plan = pte.plan("prefill")
    plan.operators[0].name = "aten::add"
    with pytest.raises(ValueError, match="prefill runs aten::add outside of its delegate"):
        torch_host.read_methods(pte)


# --- for CUDA, up to the launch


@pytest.fixture(scope="module")
def cuda_methods(cuda_artifact):
    return torch_host.read_methods(read_pte(cuda_artifact / MODEL_FILE))


def test_the_methods_of_a_cuda_artifact_are_read_with_the_order_of_their_inputs(cuda_methods):
    assert [method.name for method in cuda_methods] == [*METHODS, SPECULATE, READ_STATE, WRITE_STATE]
    caches = 14  # of six layers and the head's
    counts = {DRAFT_DECODE: (3, 3), READ_STATE: (1, caches), WRITE_STATE: (1 + caches, 1)}
    for method in cuda_methods:
        inputs, outputs = counts.get(method.name, (2, 3))
        assert sorted(method.inputs) == list(range(inputs)) and sorted(method.outputs) == list(range(outputs))
        assert {weight.device for weight in method.table.weights} == {"cuda"}
    assert not torch_host.made_for_cpu(cuda_methods)


def test_weights_are_views_of_the_mapped_file(cuda_methods, cuda_artifact):
    stored = cuda_artifact / WEIGHTS_FILE
    index, needed = read_ptd_index(stored), torch_host.storages(cuda_methods)
    on_host = {key: replace(weight, device="cpu") for key, weight in needed.items()}
    placed = torch_host.place_storages(stored, index, on_host, torch.device("cpu"))
    whole = torch.frombuffer(bytearray(stored.read_bytes()), dtype=torch.uint8)
    for weight in {weight for method in cuda_methods for weight in method.table.weights}:
        value = torch_host.view(placed[weight.storage_key], weight)
        assert (value.dtype, value.shape, value.stride()) == (weight.dtype, weight.shape, weight.stride)
        extent = index[weight.storage_key]
        assert value.data_ptr() == placed[weight.storage_key].data_ptr() + weight.offset * weight.dtype.itemsize
        assert torch.equal(placed[weight.storage_key], whole[extent.offset : extent.offset + extent.size])


@WITHOUT_GPU
def test_a_cuda_artifact_without_a_gpu_says_what_it_needs(cuda_artifact, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt_tokens": [5, 6]}))
    for command, *args in ((run_main, "--prompt-tokens", PROMPT), (bench_main, "--prompts", prompts)):
        code, line = fail_command(command, cuda_artifact, *args)
        assert code == 1 and f"NVIDIA GPUs ({','.join(ARCHS)})" in line
        if torch.version.cuda is None:
            assert "not a CUDA build" in line and "install PyTorch's CUDA build" in line


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch has CUDA's symbols")
def test_a_cpu_build_lacks_the_symbols_of_cuda_and_no_others(cuda_methods):
    torch_host.export_host_symbols(torch.device("cpu"))
    needs = {symbol for method in cuda_methods for symbol in method.parsed.needs}
    missing = torch_host_checks.missing_symbols(needs)
    assert {"cuLaunchKernel", "cudaMalloc", "aoti_torch_create_cuda_stream_guard"} <= set(missing)
    assert all(re.match(r"cu[A-Z]|cuda[A-Z]|aoti_torch_\w*cuda", symbol) for symbol in missing)
    assert "aoti_torch_empty_strided" not in missing


def test_only_gpu_architectures_that_run_the_kernels_are_accepted(cuda_methods):
    libraries = {method.name: method.parsed for method in cuda_methods}
    for capability in ((8, 0), (8, 6), (9, 0), (10, 0), (12, 0)):  # the artifact's own, and later ones by PTX
        torch_host_checks.check_architectures(libraries, capability, None)
    with pytest.raises(
        ValueError,
        match="the GPU is sm_75, kernel .* of prefill is made for .*sm_90.*serves sm_80, .*--cuda-arch sm_75",
    ):
        torch_host_checks.check_architectures(libraries, (7, 5), None)


@pytest.mark.parametrize(
    ("form", "arch", "runs", "fails"),
    [
        ("sass", "sm_86", [(8, 6), (8, 9)], [(8, 0), (9, 0)]),
        ("ptx", "sm_86", [(8, 6), (8, 9), (9, 0), (12, 0)], [(8, 0), (7, 5)]),
        ("sass", "sm_90a", [(9, 0)], [(8, 9), (10, 0)]),
        ("ptx", "sm_90a", [(9, 0)], [(10, 0)]),
        ("sass", "sm_100f", [(10, 0), (10, 3)], [(9, 0), (12, 0)]),
        ("ptx", "sm_100f", [(10, 0), (10, 3)], [(12, 0)]),
    ],
)
def test_machine_code_and_ptx_run_on_the_architectures_that_nvidia_documents(form, arch, runs, fails):
    assert all(torch_host_checks.runs_on(form, arch, capability) for capability in runs)
    assert not any(torch_host_checks.runs_on(form, arch, capability) for capability in fails)


def test_kernels_of_bare_machine_code_have_the_manifests_architecture_or_are_refused():
    bare = {"prefill": Library({"triton_poi_0": b"\x7fELF" + bytes(60)}, [])}
    torch_host_checks.check_architectures(bare, (9, 0), "sm_90")
    with pytest.raises(ValueError, match="made for SASS sm_90"):
        torch_host_checks.check_architectures(bare, (10, 0), "sm_90")
    damaged = {"prefill": Library({"triton_poi_0": b"PTX?" + bytes(60)}, [])}
    with pytest.raises(ValueError, match="kernel triton_poi_0 of prefill is no fatbin"):
        torch_host_checks.check_architectures(damaged, (9, 0), "sm_90")


def test_too_little_gpu_memory_is_reported_with_amounts_before_allocating(cuda_methods):
    needed = sum(weight.storage_bytes for weight in torch_host.storages(cuda_methods).values())
    torch_host_checks.check_memory(needed, 0, needed, 2 * needed)
    words = r"take 14.60 GiB, a run 0.50 more, 14.00 of 16.00 GiB are free, 1.10 too few: .* --draft-qlinear default"
    with pytest.raises(ValueError, match=words):
        torch_host_checks.check_memory(round(14.6 * 2**30), 1 << 29, 14 << 30, 16 << 30)


def test_an_old_driver_is_refused(monkeypatch):
    torch_host_checks.check_driver(13000, "13.0.88")
    torch_host_checks.check_driver(13020, "12.9.1")
    torch_host_checks.check_driver(12080, None)
    with pytest.raises(ValueError, match="it runs CUDA 12.8, the artifact's kernels are of CUDA 13.0.88"):
        torch_host_checks.check_driver(12080, "13.0.88")

    def too_old():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update ...")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", too_old)
    with pytest.raises(ValueError, match=r"\(sm_90\) and PyTorch .* \(CUDA 13.0\).*too old \(found version 11040\)$"):
        torch_host_checks.check_gpu({"cuda_arch": "sm_90"})


# --- with a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_cuda_artifact_runs_and_its_features_and_logits_stay_on_the_device(cuda_artifact):
    session = open_session(open_artifact(cuda_artifact), "torch")
    ids, feature, logits = session.prefill(torch.tensor([prompt_of(20)]), session.positions[:20])
    assert ids.device.type == "cpu" and feature.device.type == logits.device.type == "cuda"
    results = [complete(session, prompt_of(70), max_new_tokens=64, chain=length) for length in (1, 2, 3)]
    assert results[0].token_ids == results[1].token_ids == results[2].token_ids
    assert results[2].stats.mean_acceptance_length > 1.3  # a draft that sees the wrong features gets about 1.0
    session.close()
