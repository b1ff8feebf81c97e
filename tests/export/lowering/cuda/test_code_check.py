"""The code of a real artifact has no fault that a GPU or a runtime would show only when it runs: barriers, blocks,
constants, symbols. Each check finds the fault that is put into it."""

import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from built_libraries import build, launched
from executorch.backends.cuda.cuda_backend import CudaBackend
from machine_code import check as code_check
from machine_code.check import check_code
from machine_code.constant_devices import RELA, constant_devices, constant_faults
from machine_code.libraries import cuda_delegates
from machine_code.runtime_symbols import CUDA_DRIVER, CUDA_RUNTIME, DRIVER, EXECUTORCH, lacking, of_pytorch
from machine_code.sass import Usage, read_usages

from eagle3.export.lowering.cuda.inductor.toolchain import cuda_home, driver_functions
from eagle3.runner.artifact.cuda_library import read_library
from eagle3.runner.artifact.cuda_weights import WeightTable
from eagle3.runner.artifact.elf import DYNSYM, Elf
from eagle3.runner.artifact.gpu_needs import recorded_launches
from eagle3.runner.contract import DRAFT_DECODE, METHODS, MODEL_FILE, SPECULATE
from eagle3.runner.hosts import torch_host_checks
from eagle3.runner.system.gpus import GPUS, excesses, gpus_of, lacking_on_later

KB = 1 << 10
ARCH = "sm_90"


@pytest.fixture(scope="module")
def delegates(cuda_artifact):
    return {name: part for name, (part,) in cuda_delegates(cuda_artifact / MODEL_FILE).items()}


@pytest.fixture
def quickly(monkeypatch):
    """Give every kernel the same small resources and no PTX, since the code of all kernels is read once below."""
    usage = Usage(64, 0, 0, 0, ())
    monkeypatch.setattr(code_check, "read_usages", lambda fatbins: dict.fromkeys(fatbins, usage))


def of_draft(delegates, library=None, launches=(), arch=ARCH):
    """Return the lines of the faults of ``draft_decode``, or of another ``library`` of it."""
    table, own = delegates[DRAFT_DECODE]
    found = check_code({DRAFT_DECODE: [(table, library or own)]}, {DRAFT_DECODE: list(launches)}, arch)
    return "\n".join(fault["what"] for fault in found["faults"])


def changed(library, old, new):
    assert old in library and len(old) == len(new)
    return library.replace(old, new)


def test_the_code_of_a_correct_artifact_has_no_faults(cuda_artifact, delegates):
    model = cuda_artifact / MODEL_FILE
    code = check_code({name: [part] for name, part in delegates.items()}, recorded_launches(model), ARCH)
    assert code["faults"] == []
    for name, (table, library) in delegates.items():
        counts = code["methods"][name]
        assert counts["kernels"] == counts["kernels_with_ptx"] == len(read_library(library).kernels) > 0
        assert counts["constants"] == len(table.weights) and counts["spill_bytes"] == {}
    assert {*METHODS, SPECULATE} <= code["methods"].keys()
    later = {f"sm_{gpu.arch}" for gpu in GPUS.values() if gpu.arch >= gpus_of(ARCH)[0].arch}
    assert code["runs_on"] == dict.fromkeys(later)


def test_no_constant_of_a_cuda_library_is_on_the_cpu(delegates):
    """A container refuses a weight whose constant is on the CPU, so that nothing loads."""
    for name, (table, library) in delegates.items():
        assert constant_devices(library) == {weight.name: "cuda" for weight in table.weights}, name


def test_constants_of_a_library_for_the_cpu_are_on_the_cpu_and_fit_no_gpu_weight(host_artifact):
    for name, ((table, library),) in cuda_delegates(host_artifact / MODEL_FILE).items():
        devices = constant_devices(library)
        assert devices == {weight.name: "cpu" for weight in table.weights}
        on_gpu = WeightTable(table.library_key, tuple(replace(weight, device="cuda") for weight in table.weights))
        (line,) = constant_faults(name, on_gpu, devices)
        first, count = table.weights[0].name, len(table.weights) - 1
        assert f"{name} has the constant {first} on the CPU, and {count} others; its weight is on the GPU" in line


def with_devices_swapped(library):
    """Return a library in which CUDA's device type is the CPU's."""
    elf, slots = Elf(library), {}
    (table,) = (section for section in elf.sections if section.type == DYNSYM)
    for section in elf.sections:
        for at in range(section.offset, section.offset + section.size, 24) if section.type == RELA else ():
            symbol = int.from_bytes(library[at + 12 : at + 16], "little")
            if elf.symbols[symbol].name in ("aoti_torch_device_type_cpu", "aoti_torch_device_type_cuda"):
                slots[elf.symbols[symbol].name] = at
    data, (cpu, cuda) = bytearray(library), slots.values()
    data[cpu : cpu + 8], data[cuda : cuda + 8] = library[cuda : cuda + 8], library[cpu : cpu + 8]
    return bytes(data)


def test_a_library_whose_device_variable_is_the_cpu_is_found(delegates, quickly):
    table, library = delegates[DRAFT_DECODE]
    line = of_draft(delegates, with_devices_swapped(library))
    assert f"library of draft_decode has the constant {table.weights[0].name} on the CPU" in line


CONSTRUCTOR = """
extern "C" int aoti_torch_device_type_cpu();
extern "C" int aoti_torch_device_type_cuda();
static auto cpu = aoti_torch_device_type_cpu();
static auto cuda = aoti_torch_device_type_cuda();
struct Info { const char* name; int device; const char* original; };
Info infos[9];
__attribute__((noinline)) Info& info(int index) { return infos[index]; }
namespace torch { namespace aot_inductor {
struct AOTInductorModel { AOTInductorModel(int); };
AOTInductorModel::AOTInductorModel(int) {
%s
}
}}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize("flags", [(), ("-fcf-protection=full", "-fno-plt", "-s")], ids=str)
def test_a_single_constant_on_the_cpu_is_named(tmp_path, flags):
    lines = (
        f'info({i}).name = "w{i}"; info({i}).device = {device}; info({i}).original = "weight.{i}";'
        for i, device in enumerate(["cuda", "cpu", "cuda"])
    )
    source, built = tmp_path / "model.cpp", tmp_path / "model.so"
    source.write_text(CONSTRUCTOR % "\n".join(lines))
    subprocess.run(["g++", "-shared", "-fPIC", *flags, source, "-o", built], check=True)
    devices = constant_devices(built.read_bytes())
    assert devices == {"weight.0": "cuda", "weight.1": "cpu", "weight.2": "cuda"}


def test_a_symbol_that_no_runtime_has_is_named(delegates, quickly):
    library = changed(delegates[DRAFT_DECODE][1], b"\0aoti_torch_empty_strided\0", b"\0aoti_torch_empty_striped\0")
    found = of_draft(delegates, library)
    assert "library of draft_decode needs aoti_torch_empty_striped, which PyTorch's libraries lack" in found


def test_a_library_that_needs_driver_functions_must_list_libcuda_as_needed(delegates, quickly):
    """ExecuTorch's runtime does not load libcuda, so the symbols of a library would be missing."""
    assert all(DRIVER in read_library(library).asks_for for _, library in delegates.values())
    library = changed(delegates[DRAFT_DECODE][1], b"\0libcuda.so.1\0", b"\0libcadu.so.1\0")
    found = of_draft(delegates, library)
    assert re.search(r"needs cuFuncSetAttribute, .* does not ask for libcuda.so.1, which ExecuTorch's", found)


def test_missing_symbols_are_reported_for_each_runtime():
    assert lacking(["aoti_torch_empty_strided", "cudaMalloc"], []) == []
    (line,) = lacking(["aoti_torch_cuda_int4_plain_mm"], [])
    assert line == "aoti_torch_cuda_int4_plain_mm, which PyTorch's libraries lack"
    (line,) = lacking(["aoti_torch_cuda_addmm_out", "aoti_torch_check"], [])
    assert line == "aoti_torch_cuda_addmm_out, which ExecuTorch's CUDA libraries lack"
    assert [line.split(",")[0] for line in lacking(["cuNoSuchThing"], [DRIVER])] == ["cuNoSuchThing"] * 2


def test_the_table_of_executorchs_symbols_has_those_that_its_exporter_uses():
    """These are the kernels that Inductor may call by name, and the runtime's copy between tensors."""
    named = {name for name in CudaBackend.get_supported_fallback_kernels() if name.startswith("aoti_torch_")}
    assert named and named <= EXECUTORCH
    assert lacking(["aoti_torch_copy_"], []) == []


def test_the_tables_of_symbols_equal_those_of_cuda_and_pytorch():
    home = cuda_home()
    assert set(driver_functions(home)) >= CUDA_DRIVER
    header = (home / "include" / "cuda_runtime_api.h").read_text()
    assert set(re.findall(r"\bCUDARTAPI\s+(cuda\w+)\s*\(", header)) >= CUDA_RUNTIME
    own = {name for name in EXECUTORCH if not of_pytorch(name)}
    assert all(re.search(r"plain_mm$", name) for name in own), own  # PyTorch has all others


def test_blocks_that_do_not_fit_or_are_of_another_export_are_named(delegates, quickly):
    kernel = next(iter(read_library(delegates[DRAFT_DECODE][1]).kernels))
    large = {"kernel": kernel, "threads": 128, "shared_bytes": 240 * KB}
    found = of_draft(delegates, launches=[large, large | {"kernel": "_other_kernel_0"}])
    assert (
        f"kernel {kernel} of draft_decode takes 245,760 bytes of shared memory a block, sm_90 allows 232,448" in found
    )
    assert "draft_decode has no kernel _other_kernel_0, which export.json has" in found
    assert "a kernel has no code for sm_80, the artifact's architecture" in of_draft(delegates, arch="sm_80")


def test_blocks_that_are_too_large_are_named():
    def lines(**taken):
        return list(
            excesses({"prefill": [{"kernel": "k", "threads": 128, "shared_bytes": 0} | taken]}, "sm_86", 99 * KB)
        )

    assert lines() == lines(shared_bytes=99 * KB) == lines(threads=1024, registers=64) == []
    assert lines(threads=2048) == ["kernel k of prefill takes 2,048 threads a block, sm_86 allows 1,024"]
    assert "73,728 registers a block, sm_86 allows 65,536" in lines(threads=1024, registers=72)[0]
    assert "takes 101,377 bytes of shared memory a block, sm_86 allows 101,376" in lines(shared_bytes=99 * KB + 1)[0]


@pytest.mark.parametrize(
    ("arch", "later"), [("sm_80", ["sm_86", "sm_89", "sm_120"]), ("sm_90", ["sm_120"]), ("sm_86", [])]
)
def test_an_export_reports_later_architectures_that_its_blocks_do_not_fit(arch, later):
    """PTX runs on later architectures, which have 99 KB of the 163 KB of sm_80."""
    taken = {"prefill": [{"kernel": "k", "threads": 128, "shared_bytes": (98 if arch == "sm_86" else 120) * KB}]}
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


def test_spills_exclude_a_kernels_local_tables(tmp_path):
    _, kernel, types, constants, warps = launched("int8", 8)
    found = [build(kernel, types, constants, warps, registers=limit).asm["cubin"] for limit in (None, 32)]
    roomy, narrow = (read_usages([cubin])[cubin] for cubin in found)
    assert roomy.spill_bytes == 0 < narrow.spill_bytes and narrow.registers <= 32 < roomy.registers
