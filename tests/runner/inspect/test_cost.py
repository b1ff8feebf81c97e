"""The counts of --cost are right: machine code is compared with ptxas and nvdisasm, bounds with sums by hand, and a
real artifact with limits on its cost."""

import json
import math
import re
import subprocess
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from built_libraries import (
    build,
    launch,
    launched,
)
from commands import fail_command, run_command
from places import HELPERS
from triton import Config

from eagle3.export.lowering.cuda.inductor.launches import products
from eagle3.export.lowering.cuda.kernels.attention_sums import division
from eagle3.export.lowering.cuda.named_gpu import configurations
from eagle3.export.lowering.cuda.named_gpu.configurations import only
from eagle3.runner.artifact.cuda_delegates import cuda_kernels
from eagle3.runner.artifact.cuda_library import kind_of
from eagle3.runner.contract import DRAFT_DECODE, EXPORT_RECORD, LAUNCHES, MODEL_FILE, SPECULATE, TARGET_VERIFY
from eagle3.runner.hardware.gpus import BY_ARCH, GPUS
from eagle3.runner.inspect.cli import main
from eagle3.runner.inspect.cost import bound as cost_module
from eagle3.runner.inspect.cost.bound import (
    LATENCY_SECONDS,
    LAUNCH_SECONDS,
    NO_CONTEXT,
    SUMS_AHEAD,
    Context,
    chunks,
    cost,
    main_loop,
)
from eagle3.runner.inspect.machine_code.ptx import Load, loads
from eagle3.runner.inspect.machine_code.sass import Code, Loop, disassembler, parse, read_codes

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
    return build(_product, ["*bf16", "*bf16", "*fp32", "i32"], constants, warps).asm


@pytest.fixture(scope="module")
def compiled():
    return build_product()


def assembled(ptx, folder):
    """Return the machine code of ``ptx``, and the registers and spilled bytes that ptxas itself reports."""
    (folder / "kernel.ptx").write_text(ptx)
    command = [disassembler().with_name("ptxas"), "-v", "-arch", "sm_90", "kernel.ptx", "-o", "kernel.cubin"]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=100).stderr
    numbers = [int(re.search(pattern, said)[1]) for pattern in (r"Used (\d+) registers", r"(\d+) bytes stack frame")]
    return (folder / "kernel.cubin").read_bytes(), numbers


@pytest.mark.parametrize("limit", ["", ".maxnreg 32"])
def test_registers_and_spills_are_those_of_the_assembler(compiled, limit, tmp_path):
    ptx = re.sub(r"\.reqntid \d+", rf"\g<0> {limit}", compiled["ptx"])
    cubin, (registers, stack) = assembled(ptx, tmp_path)
    code = read_codes([cubin])[cubin]
    assert code.registers == registers
    assert (stack > 0) == bool(limit)
    assert stack - 8 < code.spill_bytes <= stack  # the frame is aligned


def test_the_counts_of_the_main_loop_equal_its_machine_code(compiled, tmp_path):
    cubin, _ = assembled(compiled["ptx"], tmp_path)
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


# A row of the tile of w or x is 256 bytes.


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


def test_invalid_code_and_a_missing_cuobjdump_are_reported_in_one_line(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="kernel"):
        read_codes([b"no kernel"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("pathlib.Path.is_file", lambda self: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"pip install 'eagle3-export\[cuda\]'"):
        disassembler()


# Bounds

EIGHT, SIXTEEN = (Loop(100 * m, 2048 * m, 16, 64, 3, 40 * m) for m in (1, 2))
CODE = Code(100, 0, 900, 4, (SIXTEEN, EIGHT, Loop(9, 0, 0, 0, 0, 0)), "", 300)


def everywhere(code: Code):
    """Return a stand-in for ``read_codes_for`` that finds ``code`` in every fatbin, for every GPU."""
    return lambda fatbins, capabilities: {fatbin: dict.fromkeys(capabilities, code) for fatbin in fatbins}


def test_the_main_loop_fits_the_number_of_rows_and_may_be_unrolled():
    assert main_loop(CODE, {"multiply_adds": 4 * 2048}, 4) == (EIGHT, 1)
    assert main_loop(CODE, {"multiply_adds": 4 * 4096}, 4) == (SIXTEEN, 1)
    assert main_loop(CODE, {"multiply_adds": 4 * 512}, 4) == (EIGHT, 4)
    assert main_loop(CODE, {"multiply_adds": 4 * 8192}, 4) == (None, 1)


def test_blocks_per_multiprocessor_are_limited_by_the_scarcest_resource():
    gpu = GPUS["A100"]
    assert gpu.resident(32, 0, 64) == gpu.blocks_per_multiprocessor
    assert gpu.resident(32, 0, 1024) == 2048 // 1024
    assert gpu.resident(121, 0, 128) == 65536 // (128 * 128)
    assert gpu.resident(32, 40 << 10, 128) == 164 // 41


def test_cost_names_a_kernel_that_does_not_fit_on_a_gpu(counted):
    with pytest.raises(ValueError, match="_int4_small_m_kernel_0 does not fit on RTX 4090"):
        counted(launch(shared_bytes=150 << 10), gpu="RTX 4090")


@pytest.fixture
def counted(monkeypatch):
    """A function that returns ``cost`` for launches of a method whose kernels all have the code ``CODE``."""
    monkeypatch.setattr(cost_module, "read_codes_for", everywhere(CODE))

    def count(*entries, gpu="H200", steps=3, methods=(TARGET_VERIFY, DRAFT_DECODE), context=NO_CONTEXT):
        recorded = {"rows": 4, "weight_bytes": 10**9, "launches": entries}
        kernels = {entry["kernel"]: b"fatbin" for entry in entries}
        return cost(dict.fromkeys(methods, recorded), dict.fromkeys(methods, kernels), [GPUS[gpu]], steps, context)

    return count


def test_a_launch_takes_the_longest_of_memory_issue_and_latency_time(counted):
    gpu = GPUS["H200"]
    found = counted(launch())["methods"][TARGET_VERIFY]
    (kernel,) = found["kernels"]
    assert kernel["instructions_per_weight"] == 100 * 128 / 8192
    assert kernel["bytes_in_flight"] == (64 * 3 + 16) * 128
    assert kernel["lines"] is None  # without PTX
    seconds = kernel["seconds"]["H200"]
    assert seconds["memory"] == 1e9 / 4.8e12
    assert seconds["issue"] == pytest.approx(100 * 4 * 1000 / (132 * 4 * gpu.clock))
    assert seconds["latency"] == pytest.approx(LATENCY_SECONDS * 1e9 / (400 * kernel["bytes_in_flight"]))
    bound = found["bounds"]["H200"]
    assert bound["bound"] == 2 * max(seconds.values())
    assert bound["bound_with_launches"] == pytest.approx(bound["bound"] + 2 * LAUNCH_SECONDS)
    assert bound["share_of_limit"] == pytest.approx(1e9 / 4.8e12 / bound["bound"])


def test_the_products_of_a_loop_that_ptxas_unrolled_are_counted_too(counted, monkeypatch):
    gpu = GPUS["H200"]
    work = {"weights": 8192, "multiply_adds": 10**6, "iterations": 1000}
    for warp_group, share in ((True, 1.0), (False, 0.63)):
        monkeypatch.setattr(cost_module, "read_codes_for", everywhere(replace(CODE, loops=(), warp_group=warp_group)))
        (kernel,) = counted(launch(products=work))["methods"][TARGET_VERIFY]["kernels"]
        assert kernel["seconds"]["H200"]["tensor"] == pytest.approx(1e9 / (share * 2048 * 132 * gpu.clock))


def test_a_product_that_two_groups_of_warps_repeat_is_no_iteration(counted, monkeypatch):
    """Attention's tiles have powers of 2 rows, so 3 times the products of a tile are 2 tiles, one product repeated."""
    gpu = GPUS["H200"]
    monkeypatch.setattr(cost_module, "read_codes_for", everywhere(replace(CODE, loops=(Loop(100, 6144, 0, 0, 0, 0),))))
    changed = {"multiply_adds": 4 * 2048, "block": 100, "row_tiles": 2}
    (kernel,) = counted(attention(**changed), context=Context(1000, 4096))["methods"][TARGET_VERIFY]["kernels"]
    iterations = 8 * 2 * math.ceil(1000 / 100)
    assert kernel["seconds"]["H200"]["issue"] == pytest.approx(iterations * 4 * 100 / 2 / (132 * 4 * gpu.clock))


@pytest.mark.parametrize(("gpu", "slots"), [("A100", 2), ("RTX 4090", 2), ("H200", 2), ("B200", 1), ("RTX 5090", 1)])
def test_half_rate_instructions_take_two_issue_slots_up_to_sm_90(counted, monkeypatch, gpu, slots):
    half = replace(CODE, loops=(replace(EIGHT, alu=80),))
    monkeypatch.setattr(cost_module, "read_codes_for", everywhere(half))
    (kernel,) = counted(launch(), gpu=gpu)["methods"][TARGET_VERIFY]["kernels"]
    issue = max(100, slots * 80) * 4 * 1000 / (GPUS[gpu].multiprocessors * 4 * GPUS[gpu].clock)
    assert kernel["seconds"][gpu]["issue"] == pytest.approx(issue)


ATTENTION = {"slots": 4096, "position_bytes": 8192, "chunk": 128, "block": 64, "multiply_adds": 8192}
ATTENTION |= {"equal": 64, "sum_bytes": 65536, "sum_steps": 2}


def attention(**changed):
    cache = ATTENTION | changed
    return launch(kernel="_attention_kernel_0", grid=[1, 8, 32], weight_bytes=0, products=None, count=1, cache=cache)


@pytest.mark.parametrize(("slots", "positions"), [(4096, 1000), (800, 400)])
def test_attention_reads_the_positions_of_the_context_or_of_a_rings_window(counted, slots, positions):
    gpu, found = GPUS["H200"], counted(attention(slots=slots), launch(), context=Context(1000, 4096))
    method = found["methods"][TARGET_VERIFY]
    kernel = method["kernels"][0]
    assert kernel["cache_bytes"] == method["cache_bytes"] == positions * 8192
    seconds, blocks = kernel["seconds"]["H200"], 8 * math.ceil(positions / 128)
    assert seconds["memory"] == positions * 8192 / gpu.bandwidth
    assert seconds["issue"] == pytest.approx(100 * 4 * 8 * math.ceil(positions / 64) / (132 * 4 * gpu.clock))
    adding = 1 + 2 * math.ceil(blocks / 8 / SUMS_AHEAD)
    assert seconds["latency"] == pytest.approx(
        LATENCY_SECONDS * (adding + positions * 8192 / (blocks * kernel["bytes_in_flight"]))
    )
    assert kernel["instructions_per_weight"] is None
    assert method["bounds"]["H200"]["limit"] == (10**9 + positions * 8192) / gpu.bandwidth
    assert counted(attention(), launch())["methods"][TARGET_VERIFY]["cache_bytes"] == 0


def test_parts_of_a_whole_context_are_added_by_another_launch(counted):
    """The launch loads some parts together, and reads them from memory if they do not fit into L2."""
    added = launch(kernel="attention_sum_kernel_0", grid=[4, 32, 1], weight_bytes=0, products=None, count=1)
    added |= {"buffer_bytes": [], "sums": {"chunk": 128, "equal": 64, "part_bytes": 1 << 20, "ahead": 8}}
    alone = attention(sum_steps=0, sum_bytes=1 << 20)
    for gpu, read in (("H200", 0), ("RTX 3090", 8 << 20)):
        first, second = counted(alone, added, gpu=gpu, context=Context(1000, 4096))["methods"][TARGET_VERIFY]["kernels"]
        blocks = 8 * math.ceil(1000 / 128)
        assert first["seconds"][gpu]["latency"] == pytest.approx(
            LATENCY_SECONDS * 1000 * 8192 / (min(blocks, GPUS[gpu].multiprocessors) * first["bytes_in_flight"])
        )
        assert second["kind"] == "attention" and second["seconds"][gpu]["memory"] == read / GPUS[gpu].bandwidth
        assert second["seconds"][gpu]["latency"] >= LATENCY_SECONDS * 3
    (far,) = counted(added, context=Context(8192, 8192))["methods"][TARGET_VERIFY]["kernels"]
    assert far["seconds"]["H200"]["latency"] >= LATENCY_SECONDS * (2 + 64 / 8)


def test_no_time_is_counted_for_adding_parts_if_there_are_none(counted):
    """A prefill has none, nor has the record of an earlier export."""
    for changed in ({"sum_bytes": 0}, {"sum_steps": 0}):
        (kernel,) = counted(attention(**changed), context=Context(1000, 4096))["methods"][TARGET_VERIFY]["kernels"]
        blocks = 8 * math.ceil(1000 / 128)
        assert kernel["seconds"]["H200"]["latency"] == pytest.approx(
            LATENCY_SECONDS * 1000 * 8192 / (blocks * kernel["bytes_in_flight"])
        )


@pytest.mark.whole
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing is substituted")
def test_a_cache_that_a_method_only_reads_is_not_counted_as_a_weight():
    """The test runs in a process of its own, since it compiles attention before other tests compute with it."""
    done = subprocess.run([sys.executable, HELPERS / "reads_alone.py"], stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    reads = [entry for entry in found["launches"] if entry["cache"]]
    assert reads and all(entry["cache"]["slots"] == found["slots"] for entry in reads)
    assert sum(entry["weight_bytes"] for entry in reads) < found["bytes"] / 2


@pytest.mark.parametrize(
    ("positions", "count"), [(1, 1), (128, 1), (129, 2), (8192, 64), (8193, 65), (16384, 96), (16385, 97), (32768, 128)]
)
def test_the_chunks_of_a_context_double_like_those_of_the_kernels(positions, count):
    assert chunks(positions, 128, 64) == count
    assert division(positions, positions, 2).parts == count
    assert chunks(positions, 128, 0) == math.ceil(positions / 128)


def test_a_buffer_counts_as_memory_traffic_if_it_exceeds_l2(counted):
    for gpu, read in (("H200", 61 << 20), ("RTX 4090", 0)):
        found = counted(launch(weight_bytes=0, buffer_bytes=[61 << 20, 1 << 20]), gpu=gpu)
        (kernel,) = found["methods"][TARGET_VERIFY]["kernels"]
        assert kernel["seconds"][gpu]["memory"] == read / GPUS[gpu].bandwidth


def test_a_round_is_a_verify_and_its_draft_steps(counted):
    found = counted(launch(), launch(kernel="triton_poi_fused_add_1", products=None))
    one, whole = found["methods"][TARGET_VERIFY], found["round"]
    assert one["launches"] | {"all": 0} == dict.fromkeys(one["launches"], 0) | {"small_m": 2, "fused": 2}
    assert whole["launches"] == 4 * one["launches"]["all"] == 16
    for key in ("limit", "bound", "bound_with_launches"):
        assert whole["bounds"]["H200"][key] == pytest.approx(4 * one["bounds"]["H200"][key])


def test_a_fused_round_has_the_same_memory_limit(counted):
    found = counted(launch(), methods=(TARGET_VERIFY, DRAFT_DECODE, SPECULATE))
    one, whole = found["methods"][SPECULATE], found["round"]
    assert whole["calls"] == {SPECULATE: 1} and whole["launches"] == one["launches"]["all"]
    assert whole["bounds"]["H200"]["bound"] == one["bounds"]["H200"]["bound"]
    assert whole["bounds"]["H200"]["limit"] == pytest.approx(4 * one["bounds"]["H200"]["limit"])


def test_cost_names_a_kernel_of_another_export(counted, monkeypatch):
    with pytest.raises(ValueError, match="target_verify has no kernel _other_0"):
        cost({TARGET_VERIFY: {"launches": [launch(kernel="_other_0")]}}, {TARGET_VERIFY: {}}, [], 1)


def test_the_products_of_a_kernel_follow_from_its_constants():
    tile = {"N": 100, "K": 1024, "BLOCK_N": 64}
    # Tiles of 128 outputs: two of the first weight, one of the second.
    pair = {"N0": 256, "N1": 100, "K": 1024, "BLOCK_N": 128, "BLOCK_K": 256, "SPLITS": 4}
    one = products("int4_small_m_kernel", pair, 3 * 4, 8)
    assert (one.weights, one.multiply_adds, one.iterations) == (128 * 256, 128 * 256 * 8, 3 * 4)
    assert products("int4_small_m_kernel", pair, 3 * 4 * 3, 40).iterations == 3 * one.iterations
    eight = products("_int8_small_m_kernel", tile | {"BLOCK_K": 256}, 2, 9)
    assert (eight.weights, eight.multiply_adds) == (64 * 256, 64 * 256 * 16 * 2)
    large = products("_int8_matmul_kernel", tile | {"BLOCK_K": 64, "BLOCK_M": 64, "DIVIDED": True}, 2 * 3 * 5, 130)
    assert (large.multiply_adds, large.iterations) == (64 * 64 * 64, 2 * 3 * 16)
    template = products("triton_tem_fused_mm_0", tile | {"BLOCK_K": 32, "BLOCK_M": 16}, 2, 1)
    assert (template.weights, template.iterations) == (64 * 32, 2 * 32)
    chosen = {"N": 1408, "K": 704, "BLOCK_N": 128, "BLOCK_K": 256, "BLOCK_M": 8}  # 11 tiles for each of 32 choices
    experts = products("int4_experts_small_m_kernel", chosen, 32 * 11, 4)
    assert (experts.multiply_adds, experts.iterations) == (128 * 256 * 8, 32 * 11 * 3)
    assert products("_int8_experts_small_m_kernel", chosen, 32 * 11, 4).multiply_adds == 128 * 256 * 8 * 2
    for rows, different in ((4, 32), (16, 100)):
        few = products("int4_experts_small_m_kernel", chosen | {"EXPERTS": 100, "TOP_K": 8}, rows * 8 * 11, rows)
        assert few.iterations == different * 11 * 3
    block = {"N": 1408, "K": 2816, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 256, "BLOCK_SIZE_M": 64}
    many = products("_fused_moe_batched_kernel", block, 3 * 44, 1024)
    assert (many.weights, many.multiply_adds, many.iterations) == (32 * 256, 32 * 256 * 64, 3 * 44 * 11)
    assert products("triton_poi_fused_add_0", {"XBLOCK": 128}, 2, 1) is None


# The command


def test_cost_is_refused_in_one_line_without_recorded_launches(artifact):
    code, line = fail_command(main, artifact, "--cost")
    assert code == 1 and "export it again for CUDA" in line
    code, line = fail_command(main, artifact, "--gpu", "H200")
    assert code == 2 and "--cost" in line


def test_inspect_cost_prints_tables_and_json(cuda_artifact, monkeypatch):
    monkeypatch.setattr(cost_module, "read_codes_for", everywhere(replace(CODE, spill_bytes=48)))
    found = json.loads(run_command(main, cuda_artifact, "--cost", "--json").stdout)
    arch = found["metadata"]["get_manifest"]["cuda_arch"]
    gpus = [name for name, gpu in GPUS.items() if f"sm_{gpu.arch}" == arch]
    assert list(found["cost"]["methods"]) == list(found["methods"])
    assert list(found["cost"]["round"]["bounds"]) == gpus
    text = run_command(main, cuda_artifact, "--cost", "--gpu", "RTX 4090").stdout
    for word in ("template matmul", "instr/weight", "lines", "RTX 4090", "48", "round: 1 speculate"):
        assert word in text


# Upper bounds of the present cost, so that no change increases it. A change that reduces the cost lowers them.

LAUNCHES_AT_MOST = {TARGET_VERIFY: 47, DRAFT_DECODE: 11, SPECULATE: 83}
INSTRUCTIONS_PER_WEIGHT_AT_MOST = {
    ("int4", 8): 2.7, ("int4", 16): 4.1, ("int8", 8): 5.0, ("int8", 16): 6.4, ("bf16", 8): 2.0, ("bf16", 16): 3.0,
    ("q4_k", 8): 2.7, ("q4_k", 16): 3.5, ("q5_k", 8): 3.7, ("q5_k", 16): 4.6, ("q6_k", 8): 3.6, ("q6_k", 16): 4.5,
}  # fmt: skip
# The number of tensors that the main loop loads, and its L1 lines divided by the fewest possible. bf16 loads half a
# line at a time: a quarter of a block of one row.
LINES_AT_MOST = {
    "int4": (4, 1.0), "int8": (4, 1.0), "bf16": (2, 2.0), "q4_k": (4, 1.0), "q5_k": (5, 1.0), "q6_k": (5, 1.0)
}  # fmt: skip


def test_a_round_launches_no_more_kernels_than_its_limit(cuda_artifact):
    recorded = json.loads((cuda_artifact / EXPORT_RECORD).read_text())[LAUNCHES]
    for name, most in LAUNCHES_AT_MOST.items():
        counts = {entry["kernel"]: entry["count"] for entry in recorded[name]["launches"]}
        assert sum(entry["count"] for entry in recorded[name]["launches"]) <= most, counts


@pytest.mark.whole
def test_no_matmul_kernel_of_a_round_spills(cuda_artifact):
    """Fused kernels are left out: they take long to disassemble, and hardly spill. ``--cost`` reports them."""
    kernels = cuda_kernels(cuda_artifact / MODEL_FILE)
    fatbins = {
        (method, name): fatbin
        for method in LAUNCHES_AT_MOST
        for name, fatbin in kernels[method].items()
        if kind_of(name) != "fused"
    }
    codes = read_codes(fatbins.values())
    assert {name: codes[fatbin].spill_bytes for name, fatbin in fatbins.items()} == dict.fromkeys(fatbins, 0)
    small = [codes[fatbin] for (_, name), fatbin in fatbins.items() if kind_of(name) == "small_m"]
    assert small and all(loads(code.ptx, (1, 1, 1), 4) for code in small)


@pytest.mark.first(1)
@pytest.mark.parametrize(("weight", "rows"), INSTRUCTIONS_PER_WEIGHT_AT_MOST)
def test_weights_take_no_more_instructions_and_lines_than_their_limits(weight, rows):
    grid, kernel, types, constants, warps = launched(weight, rows)
    asm = build(kernel, types, constants, warps).asm
    cubin = asm["cubin"]
    done = products(kernel.fn.__name__, constants, math.prod(grid), rows)
    loop, passes = main_loop(read_codes([cubin])[cubin], asdict(done), warps)
    assert 32 * loop.instructions * warps / (passes * done.weights) <= INSTRUCTIONS_PER_WEIGHT_AT_MOST[weight, rows]
    found = loads(asm["ptx"], grid, rows)
    tensors, lines = LINES_AT_MOST[weight]
    assert len({load.parameter for load in found}) == tensors
    lines += 0.2 * ((weight, rows) == ("int4", 16))  # two programs share a sector of scales and zero points
    assert sum(load.lines for load in found) <= lines * sum(load.fewest for load in found)


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
