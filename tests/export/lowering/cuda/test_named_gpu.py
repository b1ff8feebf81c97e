"""Each part of the stand-in for a named GPU works within its context, and leaves no trace afterwards."""

import hashlib
import io
import os
import subprocess
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import triton
from shared_libraries import loaded_by
from torch._inductor import compile_fx, config, graph
from torch._inductor.runtime.hints import HeuristicType
from torch._inductor.runtime.triton_heuristics import CachingAutotuner, config_to_dict
from torch._inductor.select_algorithm import AlgorithmSelectorCache
from torch._inductor.template_heuristics.triton import CUDAConfigHeuristic
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._triton import has_triton
from triton import Config
from triton.runtime import driver

from eagle3.export.configuration.config import ExportConfig
from eagle3.export.lowering.cuda import backend
from eagle3.export.lowering.cuda.kernels import sums
from eagle3.export.lowering.cuda.named_gpu import named_gpu
from eagle3.export.lowering.cuda.named_gpu.choices import MORE, Tile, choices, nanoseconds
from eagle3.export.lowering.cuda.named_gpu.compiling import OneConfiguration, compiling
from eagle3.export.lowering.cuda.named_gpu.configurations import groups, usage
from eagle3.export.lowering.cuda.named_gpu.fake_device import fake_device, operators
from eagle3.export.lowering.cuda.named_gpu.fatbins import Fatbins
from eagle3.export.lowering.cuda.named_gpu.second_image import SecondImages
from eagle3.export.lowering.cuda.named_gpu.weights import HostData, on_named_gpu, weights_on_host
from eagle3.export.patching.toolchain import cpp_compiler, cuda_home, toolchain
from eagle3.runner.system.gpus import BY_ARCH

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing is substituted")


@without_gpu
@pytest.mark.parametrize(("arch", "divided"), [("sm_80", (0, 1)), ("sm_90", (264, 3)), ("sm_100", (0, 3))])
def test_an_export_splits_matmuls_for_the_named_gpu(arch, divided, monkeypatch):
    class Lowering(Exception):
        pass

    def lower(*_given, **_options):
        raise Lowering(sums.division(2 * 21504, 21, 128))

    monkeypatch.setattr(backend, "to_edge_transform_and_lower", lower)
    plan = SimpleNamespace(methods=(), config=ExportConfig("gemma4-tiny", cuda_arch=arch))
    with pytest.raises(Lowering) as lowering:
        backend.BACKEND.lower({}, {}, plan)
    assert lowering.value.args[0] == divided


@without_gpu
def test_operators_of_fake_cuda_tensors_need_no_device():
    with operators(), FakeTensorMode():
        x, at = torch.empty(5, 3, device="cuda"), torch.empty(2, dtype=torch.int64, device="cuda")
        assert [x[1:].shape, x[at].shape, x[2].shape, (~(x > 0)).shape] == [(4, 3), (2, 3), (3,), (5, 3)]
        x[1:], x[at] = torch.empty(4, 3, device="cuda"), torch.empty(2, 3, device="cuda")
        assert x.copy_(x.clone()) is x
    real = torch.arange(6).view(3, 2)
    with operators():
        real[1:], real[torch.tensor([0])] = torch.tensor([7, 8]), torch.tensor([9, 9])
        assert real[:, 0].tolist() == [9, 7, 7] and (~(real > 8)).sum() == 4


@without_gpu
def test_device_properties_are_those_of_the_gpu_named_last():
    assert not has_triton()  # an answer that PyTorch keeps
    for arch, capability in (("sm_90", (9, 0)), ("sm_86", (8, 6))):
        with fake_device(BY_ARCH[arch]):
            from torch._inductor.codegen.cuda.cuda_env import get_cuda_arch

            assert torch.cuda.is_available() and has_triton()
            assert torch.cuda.get_device_capability() == capability
            assert get_cuda_arch() == arch.removeprefix("sm_")
            memory = torch.cuda.get_device_properties().shared_memory_per_block_optin
            assert memory == BY_ARCH[arch].shared_memory_per_block
    assert not torch.cuda.is_available() and not has_triton()


@triton.jit
def _maximum(x, y, n: triton.language.constexpr):
    triton.language.store(y, triton.language.max(triton.language.load(x + triton.language.arange(0, n)), 0))


@without_gpu
@pytest.mark.parametrize("arch", ["sm_87", "sm_90", "sm_100", "sm_110", "sm_121"])
def test_triton_compiles_for_the_named_gpu_code_that_later_ones_run_too(arch):
    """Code is not for sm_90a, whose PTX is for that architecture alone. Unpatched, Triton's LLVM ends the process for
    a maximum over a warp on sm_100."""
    source = triton.compiler.ASTSource(_maximum, {"x": "*fp32", "y": "*fp32", "n": "constexpr"}, {"n": 256})
    earlier = driver._active
    with compiling(BY_ARCH[arch]):
        compiled = triton.compile(source, target=driver.active.get_current_target())
    assert driver._active is earlier and f".target {arch}\n" in compiled.asm["ptx"]


def tuner(configs: list[Config], compiled: dict[str, tuple[int, int]], kind: HeuristicType) -> SimpleNamespace:
    """Return an autotuner whose configurations take the resources in ``compiled``: bytes of shared memory and stack."""

    def compile_one(config: Config) -> SimpleNamespace:
        shared, spilled = compiled[str(config)]
        metadata = SimpleNamespace(shared=shared, num_warps=config.num_warps)
        kernel = SimpleNamespace(metadata=metadata, asm={"cubin": (32, spilled), "ptx": ""})
        return SimpleNamespace(kernel=kernel, config=config)

    return SimpleNamespace(
        configs=configs,
        fn=SimpleNamespace(__name__="kernel"),
        heuristic_type=kind,
        triton_meta={"constants": {}},
        inductor_meta={"precomputed_grids": [{"config": config_to_dict(c), "cpp": str(c.kwargs)} for c in configs]},
        _precompile_config=compile_one,
    )


def chosen(arch: str, *args) -> tuple[Config, list[dict]]:
    one = tuner(*args)
    with patch("eagle3.export.lowering.cuda.named_gpu.configurations.usage", lambda cubin: cubin):
        gpus = [BY_ARCH[arch]]
        result = OneConfiguration(gpus, SecondImages(gpus, nullcontext), Fatbins()).chosen(one)
    return result.config, one.inductor_meta["precomputed_grids"]


KB, SMALL, WIDE = 1 << 10, Config({"BLOCK": 32}, 4, 1), Config({"BLOCK": 64}, 4, 2)
WIDEST = Config({"BLOCK": 128}, 8, 3)


def test_the_first_inductor_configuration_that_fits_the_gpu_is_compiled():
    compiled = {str(WIDEST): (200 * KB, 0), str(WIDE): (64 * KB, 500), str(SMALL): (KB, 0)}
    given = [WIDEST, WIDE, SMALL], compiled, HeuristicType.POINTWISE
    assert chosen("sm_90", *given)[0] is WIDEST
    assert chosen("sm_86", *given)[0] is WIDE
    compiled[str(WIDE)] = compiled[str(SMALL)] = (1 << 20, 0)
    with pytest.raises(ValueError, match="no configuration of the kernel kernel fits sm_86"):
        chosen("sm_86", *given)


def test_a_kernel_of_ours_gets_the_most_bytes_in_flight_that_fit_without_spills():
    compiled = {str(WIDEST): (100 * KB, 0), str(WIDE): (64 * KB, 0), str(SMALL): (KB, 0)}
    given = [SMALL, WIDE, WIDEST], compiled, HeuristicType.USER_AUTOTUNE
    assert chosen("sm_90", *given)[0] is WIDEST
    assert chosen("sm_80", *given)[0] is WIDE  # two of which have room on a multiprocessor
    compiled[str(WIDE)] = (90 * KB, 0)
    assert chosen("sm_80", *given)[0] is WIDEST
    assert chosen("sm_89", *given)[0] is WIDE
    compiled[str(WIDEST)] = (100 * KB, 24)
    assert chosen("sm_90", *given)[0] is WIDE


def test_other_warps_and_stages_are_tried_if_no_configuration_fits():
    offered = [each for group in groups([SMALL, WIDE]) for each in group]
    compiled = {str(each): (KB, 100) for each in offered}
    compiled |= {str(WIDE): (KB, 300), str(SMALL): (KB, 0)}
    assert chosen("sm_90", [SMALL, WIDE], compiled, HeuristicType.USER_AUTOTUNE)[0] is SMALL
    ahead = next(each for each in offered if (each.num_warps, each.num_stages) == (8, 2))
    compiled[str(ahead)] = (KB, 0)
    found, grids = chosen("sm_90", [SMALL, WIDE], compiled, HeuristicType.USER_AUTOTUNE)
    assert str(found) == str(ahead) and found.kwargs == {"BLOCK": 64}
    assert grids[-1] == {"config": config_to_dict(found), "cpp": str(WIDE.kwargs)}
    compiled = {str(each): (KB, 100) for each in offered} | {str(SMALL): (KB, 50)}
    assert chosen("sm_90", [SMALL, WIDE], compiled, HeuristicType.USER_AUTOTUNE)[0] is SMALL  # the least of all


@pytest.mark.parametrize(
    ("arch", "shared", "most"), [("sm_120", 64 * KB, 255), ("sm_80", 64 * KB, 128), ("sm_90", KB, None)]
)
def test_a_spilling_kernel_with_one_configuration_gets_the_free_registers(arch, shared, most):
    given, roomier = (Config({"BLOCK": 64}, 8, 4, maxnreg=each) for each in (None, most))

    def taken(spilled: int, then: int) -> str:
        compiled = {str(roomier): (shared, then), str(given): (shared, spilled)}
        return str(chosen(arch, [given], compiled, HeuristicType.USER_AUTOTUNE)[0])

    assert taken(8, 0) == str(roomier)
    assert taken(8, 16) == taken(0, 0) == str(given)


@triton.jit
def _many_sums(x, y, n: triton.language.constexpr):
    place = triton.language.arange(0, n)
    found = triton.language.load(x + place[:, None] * n + place[None, :])
    triton.language.store(y + place[:, None] * n + place[None, :], triton.language.dot(found, found))


@without_gpu
def test_spills_are_read_from_the_compiled_kernel():
    source = triton.compiler.ASTSource(_many_sums, {"x": "*bf16", "y": "*fp32", "n": "constexpr"}, {"n": 64})
    spilled = []
    for registers in (None, 32):
        options = {"num_warps": 4, "maxnreg": registers}
        with compiling(BY_ARCH["sm_90"]):
            compiled = triton.compile(source, target=driver.active.get_current_target(), options=options)
        spilled.append(usage(compiled.asm["cubin"])[1])
    assert spilled[0] == 0 < spilled[1]


def test_few_rows_use_tiles_with_many_bytes_in_flight_and_many_rows_use_large_tiles():
    tiles = [Tile(16, 32, 16, 1, 2), Tile(16, 32, 128, 5, 2), Tile(64, 64, 64, 3, 8), Tile(128, 128, 64, 3, 4)]
    tiles += [Tile(128, 256, 128, 5, 8), Tile(128, 256, 32, 2, 2)]  # too much shared memory, too many registers

    def rank(rows: int, arch: str) -> list[Tile]:
        times = {tile: nanoseconds(tile, (1, rows, 5376, 16128), 2, BY_ARCH[arch]) for tile in tiles}
        assert times[tiles[-1]] == times[tiles[-2]] == float("inf")
        return sorted(tiles[:-2], key=times.get)

    for arch in BY_ARCH:
        assert rank(8, arch)[0] == tiles[1] and rank(1024, arch)[0] == tiles[3]
        assert rank(1024, arch)[-1] == tiles[0]


def test_matmul_templates_are_ranked_and_never_timed():
    before = AlgorithmSelectorCache.do_autotuning, config.shape_padding, config.compile_threads
    with choices(BY_ARCH["sm_90"]):
        ranked = AlgorithmSelectorCache.do_autotuning(None, "mm", [], None, {}, "key", ["b", "a", "c"], None)
        assert sorted(ranked, key=ranked.get) == ["b", "a", "c"]  # what are no templates keep their order
        assert not config.shape_padding and config.compile_threads == 1
        assert CUDAConfigHeuristic().get_mm_configs().keywords["configs"][-len(MORE) :] == MORE
    assert before == (AlgorithmSelectorCache.do_autotuning, config.shape_padding, config.compile_threads)


class Table(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(4, 8), requires_grad=False)
        self.register_buffer("cache", torch.zeros(2, 8))

    def forward(self, x):
        return self.table[x] + self.cache[0]


@without_gpu
def test_weights_are_fake_on_the_gpu_with_their_data_on_the_host():
    module = Table()
    program = torch.export.export(module, (torch.tensor([1, 2]),))
    with fake_device(BY_ARCH["sm_90"]), weights_on_host():
        moved = on_named_gpu(program)
        weight = moved.state_dict["table"]
        assert weight.device.type == "cuda" and weight.shape == (4, 8)
        assert weight.host_value.data_ptr() == module.table.data_ptr()  # not a copy
        assert compile_fx.clone_preserve_strides(weight).host_value is weight.host_value
        assert not graph.is_same_tensor(weight, moved.state_dict["cache"])
        assert all(
            value.device.type == "cuda"
            for node in moved.graph.nodes
            for value in [node.meta["val"]]
            if value is not None
        )


@pytest.mark.parametrize("view", [lambda t: t.t(), lambda t: t[1:], lambda t: t[:, 2], lambda t: t[:0]])
def test_host_data_are_the_bytes_of_the_tensor_in_memory(view):
    tensor = view(torch.arange(64, dtype=torch.int16).reshape(8, 8))
    data = HostData(tensor)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((extent,), (1,)) if tensor.numel() else tensor
    expected = flat.numpy().tobytes()
    written = io.BytesIO()
    data.write_to_file(written)
    assert written.getvalue() == data.to_bytes() == expected and len(data) == len(expected)
    assert data.prefix(3) == expected[:3] and data.sha256() == hashlib.sha256(expected).digest()


@pytest.mark.parametrize("unused", ["--as-needed", "--no-as-needed"])
def test_the_toolchain_is_on_the_path_and_a_library_linked_with_it_loads_the_driver(unused, tmp_path):
    before = dict(os.environ)
    source, library = tmp_path / "kernel.cpp", tmp_path / "kernel.so"
    source.write_text('extern "C" int cuLaunchKernel(); int launch() { return cuLaunchKernel(); }')
    with toolchain():
        version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
        assert "Cuda compilation tools" in version
        link = [f"-Wl,{unused}", "-shared", "-fPIC", source, "-lcuda", "-o", library]
        subprocess.run([cpp_compiler(), *link], check=True)
    assert "libcuda.so.1" in loaded_by(library)
    assert dict(os.environ) == before


def test_a_missing_cuda_toolchain_is_refused_with_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    if not os.path.exists("/usr/local/cuda/bin/nvcc"):
        with pytest.raises(FileNotFoundError, match=r"pip install 'eagle3-export\[cuda\]'"):
            cuda_home()


@without_gpu
def test_the_stand_in_for_a_named_gpu_is_removed_after_a_failure():
    def patched():
        owners = (torch.cuda, torch._C, graph.GraphLowering, CachingAutotuner, AlgorithmSelectorCache)
        return [dict(vars(owner)) for owner in owners], dict(os.environ), config.get_config_copy()

    before = patched()
    with pytest.raises(KeyError, match="midway"), named_gpu("sm_90"):
        raise KeyError("midway")
    assert patched() == before
