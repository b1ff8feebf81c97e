"""gemma4-tiny, lowered to CUDA by the command itself, has correct metadata and the packed weights."""

import importlib.metadata
import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from commands import fail_command, run_command
from cuda_artifact import ARCHS
from machine_code.libraries import cuda_kernels
from machine_code.sass import read_codes_for
from shared_libraries import loaded_by

from eagle3.export.cli import main as export_main
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.exporting import output_name
from eagle3.export.lowering.cuda.backend import BACKEND as cuda
from eagle3.export.lowering.cuda.kernels.int4.records.tensor import pack_records
from eagle3.export.pipeline import load_speculator
from eagle3.export.planning.plan import make_plan
from eagle3.export.speculator.merged_linears import merge_linears
from eagle3.runner.artifact.cuda_library import fatbin_entries
from eagle3.runner.artifact.cuda_weights import WEIGHTS_FILE, read_ptd_index
from eagle3.runner.artifact.pte import read_pte
from eagle3.runner.commands.inspect import main as inspect_main
from eagle3.runner.contract import DRAFT_DECODE, METHODS, MODEL_FILE, PREFILL, SPECULATE, TARGET_VERIFY
from eagle3.runner.hosts.torch_host import read_methods
from eagle3.runner.system.gpus import BY_ARCH, GPUS
from eagle3.targets.attention import EagerAttention

ARCH = () if torch.cuda.is_available() else ("--cuda-arch", "sm_90")
EXPORT = ("--target-model", "gemma4-tiny")


@pytest.fixture(scope="module")
def found(cuda_artifact):
    return json.loads(run_command(inspect_main, cuda_artifact, "--json", "--verify").stdout)


def test_verify_reads_each_quantized_weight_once_and_prefill_dequantizes_it_in_the_kernel(found):
    linears = {name: method["linears"] for name, method in found["methods"].items()}
    # Six layers of 4 products (queries, keys and values; output; gate and up; down), and the head.
    assert linears["target_verify"] == {"small_m": 25, "large_m": 0, "dequantize": 0}
    assert linears["speculate"] == linears["target_verify"]
    assert linears["prefill"] == {"small_m": 1, "large_m": 24, "dequantize": 0}
    assert linears["draft_decode"] == {"small_m": 0, "large_m": 0, "dequantize": 0}  # a draft in bfloat16
    assert found["metadata"]["get_min_prefill_chunk"] == 9


def test_the_manifest_has_the_architecture_and_the_compiler_of_the_kernels(found):
    manifest = found["metadata"]["get_manifest"]
    assert manifest["qlinear"] == "default" and manifest["draft_qlinear"] == "none"
    if not torch.cuda.is_available():
        assert manifest["cuda_arch"] == ",".join(ARCHS)
        assert manifest["kernels"] == "chosen by estimate"
        for name in METHODS:  # plain targets: their PTX runs on later architectures
            architectures = found["methods"][name]["delegates"]["CudaBackend"]["architectures"]
            # INT4 matmuls of many rows have a second image
            images = {*ARCHS, "sm_90a"} if name == PREFILL else {*ARCHS}
            assert set(architectures["sass"]) == images
            assert {ARCHS[0]} <= set(architectures["ptx"]) <= {ARCHS[0], ARCHS[-1]}


def test_the_cuda_artifact_is_complete_and_matches_its_record(found):
    assert {MODEL_FILE, WEIGHTS_FILE, "tokenizer.json"} <= {entry["name"] for entry in found["files"]}
    assert all(entry["matches_record"] is not False for entry in found["files"])


HARMLESS = {"aoti_torch_empty_strided", "aoti_torch_warn", "aoti_torch_clone_preserve_strides", "_Unwind_Resume"}
"""Memory is PyTorch's; the clone is of an input that is not aligned."""


def output_of(*command) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_no_cuda_method_reads_copies_or_waits_on_the_host(cuda_artifact, tmp_path):
    """The compiled code calls no such function, so that a round can be captured as a CUDA graph."""
    launches = {}
    for method in read_methods(read_pte(cuda_artifact / MODEL_FILE)):
        library = tmp_path / f"{method.name}.so"
        library.write_bytes(method.library)
        run_impl = re.search(r"\S+AOTInductorModel8run_impl\S+", output_of("nm", "-D", "--defined-only", library))
        code = output_of("objdump", "-d", f"--disassemble={run_impl[0]}", library)
        called = re.findall(r"call\s+[0-9a-f]+ <([^>@]+)", code)
        assert {name for name in called if not name.startswith("_Z")} <= HARMLESS, method.name
        launches[method.name] = sum("call_" in name for name in called)
    assert launches[SPECULATE] > launches[TARGET_VERIFY] + launches[DRAFT_DECODE] > 50


def test_each_cuda_library_lists_the_driver_as_needed(cuda_artifact, tmp_path):
    """ExecuTorch's runtime opens only the library; a symbol that is missing would end the process at the first call."""
    for method in read_methods(read_pte(cuda_artifact / MODEL_FILE)):
        library = tmp_path / f"{method.name}.so"
        library.write_bytes(method.library)
        assert "libcuda.so.1" in loaded_by(library), method.name


def test_weights_in_the_ptd_equal_the_packed_weights_bit_for_bit(cuda_artifact, tmp_path):
    assert compared_weights(cuda_artifact, tmp_path, in_records=False) > 120


@pytest.mark.whole
def test_weights_in_the_ptd_of_records_are_records_and_nothing_holds_them_twice(records_artifact, tmp_path):
    """Fewer tensors are compared: a weight in tiles has two or more parts beside its codes."""
    assert compared_weights(records_artifact, tmp_path, in_records=True) > 60
    manifest = json.loads(run_command(inspect_main, records_artifact, "--json").stdout)["metadata"]["get_manifest"]
    assert manifest["int4_weights"] == {"records": 25, "tiles": 0}


@pytest.mark.whole
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: Triton compiles for it alone")
def test_kernels_of_few_rows_over_records_have_an_image_by_bulk_copies(records_artifact):
    """It has no PTX and no stack. Triton's code beside it keeps the limit of registers of its launch."""
    fatbins = {
        (method, name): fatbin
        for method, kernels in cuda_kernels(records_artifact / MODEL_FILE).items()
        for name, fatbin in kernels.items()
        if name.startswith("int4_records_small_m_kernel")
    }
    assert {method for method, _ in fatbins} >= {SPECULATE, TARGET_VERIFY}
    of_both = read_codes_for(fatbins.values(), [(9, 0), (8, 9)])
    for (method, _), fatbin in fatbins.items():
        assert list(fatbin_entries(fatbin)) == [("sass", "sm_90"), ("ptx", "sm_90"), ("sass", "sm_90a")]
        own, plain = of_both[fatbin].values()
        assert own.spill_bytes == 0 and own.ptx == ""
        most = 128 if method == PREFILL else 80  # a prefill has tiles of 16 rows
        assert own.registers <= most and plain.registers <= most


def compared_weights(artifact, tmp_path, in_records: bool) -> int:
    """Compare every weight of an artifact with the packed ones of its checkpoint, and return their number."""
    plan = make_plan(ExportConfig("gemma4-tiny", output_dir=None, cuda_arch=ARCH[1] if ARCH else None))
    speculator = load_speculator(plan, EagerAttention, cuda.dtype, cuda.conversion(plan))
    cuda.prepare(speculator, plan)
    merge_linears(speculator, tmp_path)
    if in_records:
        pack_records(speculator, tmp_path)
    index = read_ptd_index(artifact / WEIGHTS_FILE)
    stored = (artifact / WEIGHTS_FILE).read_bytes()
    prefix, compared = "cuda_fqn_weight:cuda:speculator.", 0
    for name, value in speculator.named_parameters():
        parts = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
        module = name.removesuffix(".weight")
        for number, part in enumerate(parts):
            extent = index[f"{prefix}{module}.parametrizations.weight.original{number}"]
            expected = getattr(value, part).contiguous().view(torch.uint8).numpy().tobytes()
            assert stored[extent.offset : extent.offset + extent.size] == expected, (name, part)
            compared += 1
        if not parts:
            extent = index[prefix + name]
            assert stored[extent.offset : extent.offset + extent.size] == value.view(torch.uint8).numpy().tobytes()
            compared += 1
    return compared


def fails(tmp_path, *args) -> tuple[int, str]:
    outcome = fail_command(export_main, *EXPORT, "--output-dir", tmp_path / "place" / "out", *args)
    assert not (tmp_path / "place").exists()
    return outcome


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to take the architecture from")
def test_without_a_gpu_and_an_architecture_every_gpu_is_planned_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    planned = json.loads(run_command(export_main, *EXPORT, "--dry-run", "--json").stdout)
    assert planned["fits"].keys() == GPUS.keys()
    assert output_name("gemma4-tiny", None, "cuda", ",".join(BY_ARCH)) == Path("gemma4-tiny-cuda-all")
    assert output_name("gemma4-tiny", None, "cuda", "sm_80,sm_90") == Path("gemma4-tiny-cuda-sm_80-sm_90")


def test_an_unknown_architecture_is_a_usage_error_that_lists_the_known(tmp_path):
    code, line = fails(tmp_path, "--cuda-arch", "sm_91")
    assert code == 2 and all(arch in line for arch in ("sm_80", "sm_90", "sm_120"))
    code, line = fails(tmp_path, "--cuda-arch", "sm_90,sm_12")
    assert code == 2 and "Did you mean 'sm_12" in line


def test_a_chain_length_beyond_the_small_m_kernels_is_refused(tmp_path):
    code, line = fails(tmp_path, *ARCH, "--chain-len", "16")
    assert code == 2 and "16" in line


def test_another_triton_version_is_refused_before_weights_load(tmp_path, monkeypatch):
    real = importlib.metadata.version
    monkeypatch.setattr("importlib.metadata.version", lambda name: "3.6.0" if name == "triton" else real(name))
    if not torch.cuda.is_available():
        code, line = fails(tmp_path, *ARCH)
        assert code == 1 and "triton 3.6.0" in line and "pip install 'triton==3.7.*'" in line


def test_a_missing_triton_says_what_to_install(tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "triton" else real(name))
    code, line = fails(tmp_path, *ARCH)
    assert code == 1 and "--backend cuda needs triton: type pip install 'eagle3-export[cuda]'" in line


def test_a_missing_compiler_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    code, line = fails(tmp_path, *ARCH)
    assert code == 1 and "no-such-compiler is not on PATH" in line and "install g++" in line


def test_flags_for_cuda_are_refused_for_other_backends(tmp_path):
    for flag in ("--qlinear", "--draft-qlinear"):
        _, line = fails(tmp_path, "--backend", "xnnpack", flag, "default")
        assert f"{flag} default: --backend xnnpack has no kernels for it; it has them for none, 8da4w, 8da8w" in line
