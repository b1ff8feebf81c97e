"""The report of eagle3-inspect on CUDA delegates is correct, for tables and fatbins made here and for an artifact."""

import json
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import fail_command, run_command
from executorch.backends.cuda import cuda_weight_collector
from executorch.backends.cuda.cuda_weight_collector import CudaWeightEntry, encode_cuda_weight_metadata
from executorch.exir._serialize.data_serializer import DataEntry, DataPayload
from executorch.exir.tensor import scalar_type_enum
from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer

from eagle3.export.lowering.cuda.kernels.sums import COUNTERS
from eagle3.export.lowering.cuda.weight_table import table_by_gpu, tables_by_gpu
from eagle3.runner.artifact.cuda_library import cuda_details, fatbin_entries, kind_of, read_library
from eagle3.runner.artifact.cuda_weights import (
    TABLE_MAGIC,
    WEIGHTS_FILE,
    check_stored,
    decode_weight_table,
    read_ptd_index,
)
from eagle3.runner.artifact.pte import read_pte
from eagle3.runner.commands.inspect import main
from eagle3.runner.contract import METHODS, MODEL_FILE, PREFILL, TARGET_VERIFY
from eagle3.runner.hosts.torch_host import read_methods
from eagle3.runner.system.gpus import BY_ARCH

KEY = "0f_so_blob"


def entry(name, dtype=torch.bfloat16, sizes=(4, 8), strides=(8, 1), offset=0, storage_bytes=64, device=1):
    number = dtype if isinstance(dtype, int) else int(scalar_type_enum(dtype))
    return CudaWeightEntry(name, f"cuda_fqn_weight:cuda:{name}", storage_bytes, number, device, offset, sizes, strides)


def table(*entries):
    return decode_weight_table(encode_cuda_weight_metadata(KEY, list(entries)))


# Weight tables


def test_a_weight_table_reads_as_executorch_wrote_it():
    entries = [
        entry("head.weight"),
        entry("layers.0.q", torch.uint8, (64,), (1,)),
        entry("scale", torch.float32, (), (), offset=3, device=0),
        entry("ключ", torch.int64, (2, 0), (1, 1), storage_bytes=0),
    ]
    read = table(*entries)
    assert read.library_key == KEY
    assert [
        CudaWeightEntry(
            weight.name,
            weight.storage_key,
            weight.storage_bytes,
            int(scalar_type_enum(weight.dtype)),
            ["cpu", "cuda"].index(weight.device),
            weight.offset,
            weight.shape,
            weight.stride,
        )
        for weight in read.weights
    ] == entries


def test_the_weight_tables_magic_is_that_of_the_installed_executorch():
    assert TABLE_MAGIC == cuda_weight_collector.CUDA_WEIGHT_CACHE_MAGIC


def test_a_weight_table_by_gpu_names_one_library_for_all_and_a_fallback():
    """The bytes are those of ExecuTorch's pull request 22198."""
    plain = encode_cuda_weight_metadata(KEY, [entry("head.weight")])
    with tables_by_gpu(("sm_80", "sm_120"), ptx=True):
        by_gpu = cuda_weight_collector.encode_cuda_weight_metadata(KEY, [entry("head.weight")])
    key, weights = struct.pack("<I", len(KEY)) + KEY.encode(), plain[14 + len(KEY) :]
    entries = (80, 0, 0), (120, 0, 0), (120, 80, 1)
    assert by_gpu == b"ETCUDAFQN0\3\0\0\0" + b"".join(struct.pack("<III", *each) + key for each in entries) + weights
    assert decode_weight_table(by_gpu) == decode_weight_table(plain)
    assert table_by_gpu(plain, (90,), ptx=False)[10:26] == struct.pack("<IIII", 1, 90, 0, 0)
    with pytest.raises(ValueError, match="weight table has 2 libraries"):
        decode_weight_table(by_gpu.replace(key, key[:-1] + b"?", 1))


@pytest.mark.parametrize(
    ("head", "words"), [(b"ETCUDAFQN2", "another version"), (b"0f_so_blob\n0f_weights_blob", "no such table")]
)
def test_a_weight_table_of_another_version_is_refused(head, words):
    with pytest.raises(ValueError, match=words):
        decode_weight_table(head + encode_cuda_weight_metadata(KEY, [])[10:])


def test_every_truncation_of_a_weight_table_is_a_one_line_error():
    whole = encode_cuda_weight_metadata(KEY, [entry("a"), entry("b")])
    for length in range(len(whole)):
        with pytest.raises(ValueError, match="weight table") as caught:
            decode_weight_table(whole[:length])
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="ends at byte"):
        decode_weight_table(whole + b"\0")


def test_a_weight_outside_its_storage_or_of_an_unknown_type_is_refused_by_name():
    bad = [{"sizes": (5, 8)}, {"offset": 1}, {"offset": -1}, {"strides": (9, 1)}, {"strides": (8, -1)}]
    for each in (*bad, {"storage_bytes": 63}, {"dtype": 99}, {"dtype": -1}, {"device": 2}, {"device": -1}):
        with pytest.raises(ValueError, match="'head.weight'"):
            table(entry("norm"), entry("head.weight", **each))


# The index of the .ptd


@pytest.fixture
def ptd(tmp_path):
    buffers = [b"a" * 64, b"b" * 200]
    named = {f"cuda_fqn_weight:cuda:{name}": DataEntry(at, 1, None) for name, at in (("a", 0), ("b", 1), ("tied", 1))}
    path = tmp_path / WEIGHTS_FILE
    path.write_bytes(bytes(FlatTensorSerializer().serialize(DataPayload(buffers, named))))
    return path


def test_the_ptd_index_has_the_place_of_each_storage(ptd):
    data = ptd.read_bytes()
    found = {key.split(":")[-1]: data[at.offset :][: at.size] for key, at in read_ptd_index(ptd).items()}
    assert found == {"a": b"a" * 64, "b": b"b" * 200, "tied": b"b" * 200}


def test_the_ptd_index_is_read_from_the_head_of_the_file_only(ptd):
    """The rest of the file may be larger than memory; here it is a hole of 64 GB."""
    index = read_ptd_index(ptd)
    with ptd.open("r+b") as file:
        file.truncate(min(extent.offset for extent in index.values()))
        file.truncate(64 << 30)
    assert read_ptd_index(ptd) == index


def test_every_truncation_of_a_ptd_is_a_one_line_error(ptd):
    data = ptd.read_bytes()
    for length in (*range(0, 64, 9), *range(64, len(data), 90), len(data) - 1):
        ptd.write_bytes(data[:length])
        with pytest.raises(ValueError, match=re.escape(str(ptd))) as caught:
            read_ptd_index(ptd)
        assert "\n" not in str(caught.value)


def test_a_ptd_of_another_export_is_refused_by_the_weight(ptd):
    index = read_ptd_index(ptd)
    check_stored([table(entry("a"), entry("b", storage_bytes=200))], index)
    with pytest.raises(ValueError, match="'b' takes 64 bytes, aoti_cuda_blob.ptd has 200"):
        check_stored([table(entry("b"))], index)
    with pytest.raises(ValueError, match="'c' .* lacks it"):
        check_stored([table(entry("a")), table(entry("c"))], index)


# Fatbins

MAGIC = 0xBA55ED50


def image(kind, architecture, flags=0x11, payload=b"\x7fELF" + bytes(44)):
    return struct.pack("<HHIQ12xIQQ16x", kind, 0x101, 64, len(payload), architecture, 0, flags) + payload


def fatbin(*images):
    body = b"".join(images)
    return struct.pack("<IHHQ", MAGIC, 1, 16, len(body)) + body


SM_90A = fatbin(image(2, 90, 0x100011), image(1, 90, 0x108011))
BOTH_90A = {("sass", "sm_90a"), ("ptx", "sm_90a")}


def test_the_architectures_of_a_fatbin_are_read():
    assert set(fatbin_entries(SM_90A)) == BOTH_90A
    images = image(2, 80), image(2, 86), image(1, 100, 0x208011), image(8, 70)
    assert list(fatbin_entries(fatbin(*images))) == [("sass", "sm_80"), ("sass", "sm_86"), ("ptx", "sm_100f")]


def test_a_truncated_fatbin_is_an_error():
    for length in (0, 3, 15, 16, 60, 100, len(SM_90A) - 1):
        with pytest.raises((ValueError, struct.error)):
            list(fatbin_entries(SM_90A[:length]))


def on_path(name):
    return next((file for place in sys.path if (file := Path(place) / name).is_file()), None)


NVCC, CUOBJDUMP = on_path("nvidia/cu13/bin/nvcc"), on_path("triton/backends/nvidia/bin/cuobjdump")


@pytest.mark.skipif(not (NVCC and CUOBJDUMP), reason="needs the tools of the cuda extra")
def test_fatbin_architectures_equal_those_of_nvidias_own_tools(tmp_path):
    source, built = tmp_path / "kernel.cu", tmp_path / "kernel.fatbin"
    source.write_text('extern "C" __global__ void kernel(int *out) { *out = 1; }')
    pairs = (("90a", "sm_90a,compute_90a"), ("80", "sm_80,sm_86"))
    flags = [flag for arch, code in pairs for flag in ("-gencode", f"arch=compute_{arch},code=[{code}]")]
    subprocess.run([NVCC, "-fatbin", *flags, "-o", built, source], check=True, timeout=100)
    listed = subprocess.run([CUOBJDUMP, "--list-elf", "--list-ptx", built], capture_output=True, text=True, timeout=100)
    seen = re.findall(r"(ELF|PTX) file.*\.(sm_\w+)\.", listed.stdout)
    assert sorted(fatbin_entries(built.read_bytes())) == sorted(
        ({"ELF": "sass", "PTX": "ptx"}[form], architecture) for form, architecture in seen
    )


# A real artifact


@pytest.fixture(scope="module")
def found(cuda_artifact):
    return json.loads(run_command(main, cuda_artifact, "--json").stdout)


@pytest.fixture(scope="module")
def cuda(found):
    return {name: method["delegates"]["CudaBackend"] for name, method in found["methods"].items()}


@pytest.fixture(scope="module")
def verify(cuda_artifact):
    """The verification's table and library."""
    methods = read_methods(read_pte(cuda_artifact / MODEL_FILE))
    return next((method.table, method.library) for method in methods if method.name == TARGET_VERIFY)


def test_truncated_and_flipped_libraries_read_or_are_one_line_errors(verify):
    """Sections are listed at the end of a library, so a truncated one cannot be read."""
    library = verify[1]
    for length in (0, 5, 63, 64, 1000, len(library) // 2, len(library) - 1):
        with pytest.raises(ValueError, match="library") as caught:
            read_library(library[:length])
        assert "\n" not in str(caught.value)
    (sections,) = struct.unpack_from("<Q", library, 0x28)
    for at in (*range(0, 64, 3), *range(sections, len(library), 61)):
        try:
            read_library(library[:at] + bytes([library[at] ^ 0xFF]) + library[at + 1 :])
        except ValueError as error:
            assert "library" in str(error) and "\n" not in str(error)


def test_a_kernel_that_is_no_fatbin_is_named(verify):
    weights, library = verify
    damaged = library.replace(struct.pack("<I", MAGIC), b"\x7fELF", 1)
    with pytest.raises(ValueError, match="kernel .* is no fatbin"):
        cuda_details(TARGET_VERIFY, {TARGET_VERIFY: [weights]}, {weights.library_key: damaged}.__getitem__)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("_small_m_sum_kernel_1", "small_m_sum"),
        ("_int4_small_m_kernel_0", "small_m"),
        ("_int4_matmul_kernel_2", "large_m"),
        ("triton_tem_fused_mm_t_view_3", "template_matmul"),
        ("_tq4_sdpa_prefill_kernel_1", "attention"),
        ("triton_per_fused_small_m_sdpa_4", "fused"),
        ("_topk_kernel_0", "other"),
    ],
)
def test_a_kernel_is_counted_by_the_kind_in_its_name(kernel, kind):
    assert kind_of(kernel) == kind


def test_every_method_is_one_delegate_with_only_copies_to_the_gpu_and_back_outside(found):
    assert set(METHODS) <= set(found["methods"])
    for method in found["methods"].values():
        assert {backend: facts["count"] for backend, facts in method["delegates"].items()} == {"CudaBackend": 1}
        assert {name.split(".")[0] for name in method["operators"]} <= {"et_copy::_h2d_copy", "et_copy::_d2h_copy"}


def test_every_kernel_has_code_for_the_named_gpu(found, cuda):
    architectures = found["metadata"]["get_manifest"]["cuda_arch"].split(",")
    for facts in cuda.values():
        kernels = sum(kind["count"] for kind in facts["kernels"].values())
        assert kernels > 0
        for counts in facts["architectures"].values():
            assert max(counts.values()) == kernels
        named = facts["architectures"]["sass"]
        assert {name.rstrip("af") for name in named} == set(architectures)
        for name in architectures:  # on sm_90 some kernels have code with wgmma, beside the plain code or in its place
            assert named[name] + named.get(f"{name}a", 0) >= kernels
        served = list(BY_ARCH)[list(BY_ARCH).index(architectures[0]) :]  # later GPUs compile the PTX
        assert facts["serves"] == served


def test_verification_has_the_small_m_kernels_and_no_method_a_plain_product(cuda):
    assert cuda[TARGET_VERIFY]["kernels"]["small_m"]["count"] > 0
    for facts in cuda.values():
        assert "aoti_torch_empty_strided" in facts["symbols"]["aoti"]
        assert "cuLaunchKernel" in facts["symbols"]["cuda"]
        assert facts["symbols"]["other"] == []
        assert not [name for family in facts["symbols"].values() for name in family if name.endswith("_plain_mm")]


def test_prefill_and_verification_share_their_weights(cuda):
    for name, other in ((PREFILL, TARGET_VERIFY), (TARGET_VERIFY, PREFILL)):
        shared, own = cuda[name]["shared_weights"][other], cuda[name]["weights"]
        assert shared["bytes"] > 0.99 * (own["bytes"] - 4 * COUNTERS)  # each library has counters of its own
        assert shared == cuda[other]["shared_weights"][name]


def test_weights_are_in_the_ptd_once(cuda, cuda_artifact):
    index = read_ptd_index(cuda_artifact / WEIGHTS_FILE)
    for facts in cuda.values():
        extents = facts["weights"]["by_dtype"].values()
        assert facts["weights"]["bytes"] == sum(extent["bytes"] for extent in extents) > 0
    assert sum(extent.size for extent in index.values()) < sum(facts["weights"]["bytes"] for facts in cuda.values())


def test_inspect_tables_name_kernels_weights_and_symbols(cuda, cuda_artifact):
    text = run_command(main, cuda_artifact).stdout
    for facts in cuda.values():
        words = {*facts["kernels"], *facts["weights"]["by_dtype"], *facts["symbols"]["aoti"], *facts["symbols"]["cuda"]}
        for word in words | {"CudaBackend", f"{facts['weights']['bytes']:,}"}:
            assert word.replace("_", " ") in text or word in text


def test_inspect_reports_a_truncated_ptd_in_one_line_with_exit_1(cuda_artifact, tmp_path):
    copied = shutil.copytree(cuda_artifact, tmp_path / "copy")
    with (copied / WEIGHTS_FILE).open("r+b") as file:
        file.truncate(file.seek(-4096, 2))
    code, line = fail_command(main, copied)
    assert code == 1
    assert f"{WEIGHTS_FILE} ends early" in line
