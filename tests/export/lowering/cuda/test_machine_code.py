"""Reading machine code and PTX: counts are those of ptxas and nvdisasm, and a round keeps to limits on its cost."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from kernel_usage import source_of
from machine_code.ptx import Load, loads
from machine_code.sass import disassembler, parse, read_codes
from machine_code.work import cache_reads
from places import GPU_STAND_IN
from triton import Config
from triton.runtime import driver

from eagle3.export.lowering.cuda.named_gpu import configurations
from eagle3.export.lowering.cuda.named_gpu.compiling import compiling
from eagle3.export.lowering.cuda.named_gpu.configurations import only
from eagle3.runner.contract import DRAFT_DECODE, EXPORT_RECORD, LAUNCHES, SPECULATE, TARGET_VERIFY
from eagle3.runner.system.gpus import BY_ARCH

M, N, K, STAGES, WARPS = 16, 64, 128, 4, 4


@triton.jit
def _product(
    x, w, out, k_size,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr, N_STRIDE: tl.constexpr = 4096,
    K_STRIDE: tl.constexpr = 1,
):  # fmt: skip
    m, n, k = tl.arange(0, M)[:, None] * 4096, tl.arange(0, N), tl.arange(0, K)
    total = tl.full((M, N), 0, tl.float32)
    for at in tl.range(0, k_size, K, num_stages=STAGES):
        left = tl.load(x + m + at + k[None, :])
        right = tl.load(w + n[None, :] * N_STRIDE + (at + k[:, None]) * K_STRIDE)
        total = tl.dot(left, right, total)
    tl.store(out + m + n[None, :] * 4096, total)


def build_product(warps=WARPS, **strides):
    constants = {"M": M, "N": N, "K": K, "STAGES": STAGES, "N_STRIDE": 4096, "K_STRIDE": 1} | strides
    with compiling(BY_ARCH["sm_90"]):
        source = source_of(_product, ["*bf16", "*bf16", "*fp32", "i32"], constants)
        return triton.compile(source, target=driver.active.get_current_target(), options={"num_warps": warps}).asm


@pytest.fixture(scope="module")
def product_code():
    return build_product()


def assembled(ptx, folder):
    """Return the machine code of ``ptx``, and the registers and spilled bytes that ptxas itself reports."""
    (folder / "kernel.ptx").write_text(ptx)
    command = [disassembler().with_name("ptxas"), "-v", "-arch", "sm_90", "kernel.ptx", "-o", "kernel.cubin"]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=100).stderr
    numbers = [int(re.search(pattern, said)[1]) for pattern in (r"Used (\d+) registers", r"(\d+) bytes stack frame")]
    return (folder / "kernel.cubin").read_bytes(), numbers


@pytest.mark.parametrize("limit", ["", ".maxnreg 32"])
def test_registers_and_spills_are_those_of_the_assembler(product_code, limit, tmp_path):
    ptx = re.sub(r"\.reqntid \d+", rf"\g<0> {limit}", product_code["ptx"])
    cubin, (registers, stack) = assembled(ptx, tmp_path)
    code = read_codes([cubin])[cubin]
    assert code.registers == registers
    assert (stack > 0) == bool(limit)
    assert stack - 8 < code.spill_bytes <= stack  # the frame is aligned


def test_the_counts_of_the_main_loop_equal_its_machine_code(product_code, tmp_path):
    cubin, _ = assembled(product_code["ptx"], tmp_path)
    (loop,) = read_codes([cubin])[cubin].loops
    tool = disassembler().with_name("nvdisasm")
    text = subprocess.run([tool, "-c", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True).stdout
    branches = [(text.find(f"\n{found[1]}:"), found.end()) for found in re.finditer(r"BRA `\((\.L_x_\d+)\)", text)]
    (body,) = (text[start:end] for start, end in branches if start < end and "HMMA" in text[start:end])
    assert loop.instructions == len(re.findall(r"/\*[0-9a-f]{4}\*/", body))
    assert loop.multiply_adds * WARPS == M * N * K
    assert loop.copy_bytes * WARPS * 32 == 2 * (M + N) * K
    assert loop.ahead == STAGES - 1


def test_half_rate_instructions_are_integer_comparison_and_bit_instructions():
    lines = ["LOP3.LUT R0, R1, R2, R3", "@!P0 IADD3 R1, R2, R3, RZ", "FFMA R0, R1, R2, R3", "PRMT R0, R1, R2"]
    lines += ["LEA.HI.X R0, R1", "IMAD.WIDE R0, R1", "HMMA.16816.F32.BF16 R0, R4, R8, R0", "BRA 0x10"]
    sass = "\n".join(f"        /*{16 * at:04x}*/  {line} ;" for at, line in enumerate(lines))
    code = parse("REG:8 STACK:0", sass, "")
    assert (code.instructions, code.alu) == (8, 4)
    (loop,) = code.loops
    assert (loop.instructions, loop.alu) == (7, 3)


@pytest.mark.parametrize(
    ("warps", "strides", "of_x", "of_w"),
    [
        (4, {}, (16, 4, 16, 4), (16, 4, 16, 4)),
        (16, {}, (8, 2, 8, 2), (16, 4, 16, 4)),  # x is 8 bytes a thread
        (4, {"N_STRIDE": 1, "K_STRIDE": 4096}, (16, 4, 16, 4), (16, 4, 16, 4)),
        (4, {"N_STRIDE": 128, "K_STRIDE": 64 * 128}, (16, 4, 16, 4), (2, 32, 32, 1)),  # no two elements are adjacent
        (4, {"N_STRIDE": 4096 + 32}, (16, 4, 16, 4), (16, 5, 16, 4)),  # every second row begins in the middle of a line
        (4, {"N_STRIDE": 4096 + 8}, (16, 4, 16, 4), (16, 5.75, 17, 4)),  # rows begin within sectors
    ],
)
def test_the_l1_lines_of_a_load_are_computed_from_its_addresses(warps, strides, of_x, of_w):
    found = loads(build_product(warps, **strides)["ptx"], (1, 1, 1), 4096)
    assert {(load.parameter, load.bytes, load.lines, load.sectors, load.fewest) for load in found} == {
        (0, *of_x), (1, *of_w)
    }  # fmt: skip


GATHER = """
.param .u64 .ptr .global .align 1 k_param_0,
.param .u64 .ptr .global .align 1 k_param_1
.reqntid 32
ld.param.b64 %rd1, [k_param_0];
ld.param.b64 %rd2, [k_param_1];
mov.u32 %r1, %tid.x;
mad.wide.u32 %rd3, %r1, 4, %rd1;
setp.gt.u32 %p1, %r1, 31;
mov.u32 %r2, 0x0;
ld.global.b32 { %r2 }, [ %rd3 + 64 ];
@%p1 ld.global.b32 { %r3 }, [ %rd2 + 0 ];
mad.wide.u32 %rd4, %r2, 4, %rd2;
ld.global.b32 { %r4 }, [ %rd4 + 0 ];
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r5 }, { %r6 };
"""


def test_loads_that_never_execute_or_have_loaded_addresses_are_left_out():
    assert loads(GATHER, (1, 1, 1), 1) == (Load(0, 4, 2, 4, 1),)
    assert loads(GATHER.replace("31", "30"), (1, 1, 1), 1) == (Load(0, 4, 2, 4, 1), Load(1, 4, 1, 1, 1))
    assert loads(GATHER.replace("mma", "fma"), (1, 1, 1), 1) == ()


@pytest.mark.whole
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing is substituted")
def test_a_cache_that_a_method_only_reads_is_not_counted_as_a_weight_nor_are_counters():
    """The test runs in a process of its own, since it compiles attention before other tests compute with it."""
    done = subprocess.run([sys.executable, GPU_STAND_IN / "reads_alone.py"], stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    reads = [entry for entry in found["launches"] if cache_reads(entry["constants"], 1)]
    assert reads and all(entry["constants"]["SLOTS"] == found["slots"] for entry in reads)
    assert not any(entry["weight_bytes"] for entry in reads)


# Upper bounds of the present cost, so that no change increases it. A change that reduces the cost lowers them.

LAUNCHES_AT_MOST = {TARGET_VERIFY: 47, DRAFT_DECODE: 11, SPECULATE: 83}


def test_a_round_launches_no_more_kernels_than_its_limit(cuda_artifact):
    recorded = json.loads((cuda_artifact / EXPORT_RECORD).read_text())[LAUNCHES]
    for name, most in LAUNCHES_AT_MOST.items():
        counts = {entry["kernel"]: entry["count"] for entry in recorded[name]["launches"]}
        assert sum(entry["count"] for entry in recorded[name]["launches"]) <= most, counts


def test_counters_that_all_matmuls_share_are_counted_with_no_launch(cuda_artifact):
    recorded = json.loads((cuda_artifact / EXPORT_RECORD).read_text())[LAUNCHES]
    entries = [entry for method in (TARGET_VERIFY, DRAFT_DECODE) for entry in recorded[method]["launches"]]
    for kernel, outputs, bits in (("int4_small_m", ("N0", "N1", "N2"), 4.625), ("_bf16_small_m", ("N",), 16)):
        of_kernel = [entry for entry in entries if entry["kernel"].startswith(kernel)]
        sizes = [sum(entry["constants"][name] for name in outputs) * entry["constants"]["K"] for entry in of_kernel]
        assert [entry["weight_bytes"] for entry in of_kernel] == [size * bits / 8 for size in sizes] and sizes


def test_a_kernel_that_spills_is_compiled_again_with_the_free_registers(monkeypatch):
    """The assembler keeps two programs' registers free even where shared memory has room for one."""
    used = {None: (128, 64), 255: (200, 0)}
    monkeypatch.setattr(configurations, "usage", used.get)

    def compiled(config):
        built = SimpleNamespace(metadata=SimpleNamespace(num_warps=8, shared=90 << 10), asm={"cubin": config.maxnreg})
        return SimpleNamespace(kernel=built, config=config)

    assert only(Config({}, 8), compiled, BY_ARCH["sm_120"]).config.maxnreg == 255
    used[None] = (128, 0)
    assert only(Config({}, 8), compiled, BY_ARCH["sm_120"]).config.maxnreg is None
