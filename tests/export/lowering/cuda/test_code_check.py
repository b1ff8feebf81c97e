"""The code of a real artifact has no fault that a GPU or a runtime would show only when it runs: barriers, blocks,
symbols. Each check finds the fault that is put into it."""

import re

import pytest
from cuda_artifact import ARCHS, sources_of
from executorch.backends.cuda.cuda_backend import CudaBackend
from machine_code import check as code_check
from machine_code.barriers import faults as barrier_faults
from machine_code.check import check_code
from machine_code.libraries import cuda_delegates, without_images
from machine_code.runtime_symbols import CUDA_DRIVER, CUDA_RUNTIME, DRIVER, EXECUTORCH, lacking, of_pytorch
from machine_code.sass import Usage

from eagle3.export.patching.toolchain import cuda_home, driver_functions
from eagle3.runner.artifact.cuda_library import read_library
from eagle3.runner.artifact.gpu_needs import recorded_launches
from eagle3.runner.contract import DRAFT_DECODE, METHODS, MODEL_FILE, SPECULATE
from eagle3.runner.hosts import torch_host_checks
from eagle3.runner.system.gpus import BY_ARCH, GPUS, excesses, gpus_of, lacking_on_later

KB = 1 << 10
ARCH = ",".join(ARCHS)


@pytest.fixture(scope="module")
def libraries(cuda_artifact):
    return {name: library for name, ((_, library),) in cuda_delegates(cuda_artifact / MODEL_FILE).items()}


def test_the_code_of_a_correct_artifact_has_no_faults(cuda_artifact, libraries):
    faults, runs_on = check_code(libraries, recorded_launches(cuda_artifact / MODEL_FILE), ARCH)
    assert faults == [] and {*METHODS, SPECULATE} <= libraries.keys()
    assert all(read_library(library).kernels for library in libraries.values())
    later = {f"sm_{gpu.arch}" for gpu in GPUS.values() if gpu.arch >= gpus_of(ARCH)[0].arch}
    assert runs_on == dict.fromkeys(later)
    second = [file.read_text() for file in sources_of(cuda_artifact).glob("*.ptx")]
    assert second and [list(barrier_faults(ptx)) for ptx in second] == [[]] * len(second)


@pytest.fixture
def of_draft(libraries, monkeypatch):
    """A function that returns the faults of ``draft_decode``, after a change of the bytes of its library. Every kernel
    gets the same small resources and no PTX, since the code of all kernels is read above."""
    small = Usage(64, 0, 0, 0, ())
    monkeypatch.setattr(code_check, "read_usages", lambda fatbins: dict.fromkeys(fatbins, small))

    def found(old=b"", new=b"", launches=(), arch=ARCH):
        assert old in libraries[DRAFT_DECODE] and len(old) == len(new)
        library = libraries[DRAFT_DECODE].replace(old, new) if old else libraries[DRAFT_DECODE]
        return "\n".join(check_code({DRAFT_DECODE: library}, {DRAFT_DECODE: list(launches)}, arch)[0])

    return found


def test_symbols_that_no_runtime_has_or_loads_are_named(of_draft, libraries):
    """ExecuTorch's runtime does not load libcuda, so the symbols of a library that does not ask for it would lack."""
    found = of_draft(b"\0aoti_torch_empty_strided\0", b"\0aoti_torch_empty_striped\0")
    assert "library of draft_decode needs aoti_torch_empty_striped, which PyTorch's libraries lack" in found
    assert all(DRIVER in read_library(library).asks_for for library in libraries.values())
    found = of_draft(b"\0libcuda.so.1\0", b"\0libcadu.so.1\0")
    assert re.search(r"needs cuFuncSetAttribute, .* does not ask for libcuda.so.1, which ExecuTorch's", found)


def test_missing_symbols_are_reported_for_each_runtime():
    assert lacking(["aoti_torch_empty_strided", "cudaMalloc", "aoti_torch_copy_"], []) == []
    (line,) = lacking(["aoti_torch_cuda_int4_plain_mm"], [])
    assert line == "aoti_torch_cuda_int4_plain_mm, which PyTorch's libraries lack"
    (line,) = lacking(["aoti_torch_cuda_addmm_out", "aoti_torch_check"], [])
    assert line == "aoti_torch_cuda_addmm_out, which ExecuTorch's CUDA libraries lack"
    assert [line.split(",")[0] for line in lacking(["cuNoSuchThing"], [DRIVER])] == ["cuNoSuchThing"] * 2


def test_the_tables_of_symbols_equal_those_of_cuda_pytorch_and_executorchs_exporter():
    home = cuda_home()
    assert set(driver_functions(home)) >= CUDA_DRIVER
    header = (home / "include" / "cuda_runtime_api.h").read_text()
    assert set(re.findall(r"\bCUDARTAPI\s+(cuda\w+)\s*\(", header)) >= CUDA_RUNTIME
    own = {name for name in EXECUTORCH if not of_pytorch(name)}
    assert all(re.search(r"plain_mm$", name) for name in own), own  # PyTorch has all others
    named = {name for name in CudaBackend.get_supported_fallback_kernels() if name.startswith("aoti_torch_")}
    assert named and named <= EXECUTORCH


def test_blocks_that_do_not_fit_or_are_of_another_export_are_named(of_draft, libraries):
    kernel = next(iter(read_library(libraries[DRAFT_DECODE]).kernels))
    large = {"kernel": kernel, "threads": 128, "shared_bytes": 240 * KB}
    found = of_draft(launches=[large, large | {"kernel": "_other_kernel_0"}])
    said = f"kernel {kernel} of draft_decode takes 245,760 bytes of shared memory a block, sm_90 allows 232,448"
    assert said in found and "draft_decode has no kernel _other_kernel_0, which export.json has" in found
    fatbin = read_library(libraries[DRAFT_DECODE]).kernels[kernel]
    missing = of_draft(fatbin, without_images(fatbin, BY_ARCH["sm_80"].arch))
    assert "a kernel has no code for sm_80, the artifact's architecture" in missing


def test_blocks_that_are_too_large_are_named():
    def lines(**taken):
        entry = {"kernel": "k", "threads": 128, "shared_bytes": 0} | taken
        return list(excesses({"prefill": [entry]}, "sm_86", 99 * KB))

    assert lines() == lines(shared_bytes=99 * KB) == lines(threads=1024, registers=64) == []
    assert lines(threads=2048) == ["kernel k of prefill takes 2,048 threads a block, sm_86 allows 1,024"]
    assert "73,728 registers a block, sm_86 allows 65,536" in lines(threads=1024, registers=72)[0]
    assert "takes 101,377 bytes of shared memory a block, sm_86 allows 101,376" in lines(shared_bytes=99 * KB + 1)[0]


def test_an_export_reports_later_architectures_that_its_blocks_do_not_fit():
    """PTX runs on later architectures, which have 99 KB of the 163 KB of sm_80."""
    for arch, size, later in (
        ("sm_80", 120, ["sm_86", "sm_89", "sm_120", "sm_121"]), ("sm_90", 120, ["sm_120", "sm_121"]), ("sm_86", 98, []),
    ):  # fmt: skip
        taken = {"prefill": [{"kernel": "k", "threads": 128, "shared_bytes": size * KB}]}
        assert list(lacking_on_later(arch, taken)) == later


def test_the_host_refuses_launches_that_do_not_fit_on_its_gpu():
    taken = {"prefill": [{"kernel": "_attention_kernel_2", "threads": 128, "shared_bytes": 144 * KB}]}
    torch_host_checks.check_launches(taken, (8, 0), 163 * KB)
    torch_host_checks.check_launches({}, (8, 6), 99 * KB)
    words = (
        r"_attention_kernel_2 of prefill takes 147,456 bytes .* the GPU \(sm_86\) allows 101,376: .*--cuda-arch sm_86"
    )
    with pytest.raises(ValueError, match=words):
        torch_host_checks.check_launches(taken, (8, 6), 99 * KB)
