"""Bounds of ``scripts/gpu/gpu_cost.py`` are compared with sums by hand, its estimate with a measured round."""

import json
import math
from dataclasses import replace

import gpu_cost
import pytest
from built_libraries import launch
from click.testing import CliRunner
from gpu_estimate import estimate, read_times, seconds_of, variant_of
from gpu_run import Record
from gpu_variants import GEMMA, VARIANTS
from machine_code import bounds
from machine_code.bounds import (
    LATENCY_SECONDS,
    LAUNCH_SECONDS,
    NO_CONTEXT,
    SUMS_AHEAD,
    Context,
    chunks,
    cost,
    main_loop,
)
from machine_code.sass import Code, Loop
from machine_code.work import Products, products

from eagle3.export.lowering.cuda.kernels.attention_sums import division
from eagle3.runner.contract import DRAFT_DECODE, TARGET_VERIFY
from eagle3.runner.system.gpus import GPUS

EIGHT, SIXTEEN = (Loop(100 * m, 2048 * m, 16, 64, 3, 40 * m) for m in (1, 2))
CODE = Code(100, 0, 900, 4, (SIXTEEN, EIGHT, Loop(9, 0, 0, 0, 0, 0)), "", 300)


def everywhere(code: Code):
    """Return a stand-in for ``read_codes_for`` that finds ``code`` in every fatbin, for every GPU."""
    return lambda fatbins, capabilities: {fatbin: dict.fromkeys(capabilities, code) for fatbin in fatbins}


def test_the_main_loop_fits_the_number_of_rows_and_may_be_unrolled():
    assert main_loop(CODE, Products(0, 4 * 2048, 1), 4) == (EIGHT, 1)
    assert main_loop(CODE, Products(0, 4 * 4096, 1), 4) == (SIXTEEN, 1)
    assert main_loop(CODE, Products(0, 4 * 512, 1), 4) == (EIGHT, 4)
    assert main_loop(CODE, Products(0, 4 * 8192, 1), 4) == (None, 1)


def test_blocks_per_multiprocessor_are_limited_by_the_scarcest_resource():
    gpu = GPUS["A100"]
    assert gpu.resident(32, 0, 64) == gpu.blocks_per_multiprocessor
    assert gpu.resident(32, 0, 1024) == 2048 // 1024
    assert gpu.resident(121, 0, 128) == 65536 // (128 * 128)
    assert gpu.resident(32, 40 << 10, 128) == 164 // 41


def test_cost_names_a_kernel_that_does_not_fit_on_a_gpu(counted):
    with pytest.raises(ValueError, match="int4_small_m_kernel_0 does not fit on RTX 4090"):
        counted(launch(shared_bytes=150 << 10), gpu="RTX 4090")


@pytest.fixture
def counted(monkeypatch):
    """A function that returns ``cost`` for launches of a method whose kernels all have the code ``CODE``."""
    monkeypatch.setattr(bounds, "read_codes_for", everywhere(CODE))

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
    seconds = kernel["seconds"]["H200"]
    assert seconds["memory"] == 1e9 / 4.8e12
    assert seconds["issue"] == pytest.approx(100 * 4 * 1000 / (132 * 4 * gpu.clock))
    assert seconds["latency"] == pytest.approx(LATENCY_SECONDS * 1e9 / (400 * kernel["bytes_in_flight"]))
    bound = found["bounds"]["H200"]
    assert bound["bound"] == 2 * max(seconds.values())
    assert bound["bound_with_launches"] == pytest.approx(bound["bound"] + 2 * LAUNCH_SECONDS)
    assert bound["share_of_limit"] == pytest.approx(1e9 / 4.8e12 / bound["bound"])


@pytest.mark.parametrize(("gpu", "slots"), [("H200", 2), ("B200", 1)])
def test_half_rate_instructions_take_two_issue_slots_up_to_sm_90(counted, monkeypatch, gpu, slots):
    half = replace(CODE, loops=(replace(EIGHT, alu=80),))
    monkeypatch.setattr(bounds, "read_codes_for", everywhere(half))
    (kernel,) = counted(launch(), gpu=gpu)["methods"][TARGET_VERIFY]["kernels"]
    issue = max(100, slots * 80) * 4 * 1000 / (GPUS[gpu].multiprocessors * 4 * GPUS[gpu].clock)
    assert kernel["seconds"][gpu]["issue"] == pytest.approx(issue)


# 8 key heads of 256 dimensions in bfloat16: 8,192 bytes a position
ATTENTION = {"SLOTS": 4096, "KV_HEADS": 8, "GROUPS": 2, "D": 256, "BLOCK_D": 4, "CODES": 0, "BLOCK_M": 16}
ATTENTION |= {"BLOCK_N": 64, "CHUNK": 128, "MOST": 64, "DOUBLINGS": -1, "DIRECT": 0, "COLUMNS": 2}


def attention(**changed):
    return launch(kernel="_attention_kernel_0", grid=[1, 8, 32], weight_bytes=0, count=1, constants=ATTENTION | changed)


@pytest.mark.parametrize(("slots", "positions"), [(4096, 1000), (800, 400)])
def test_attention_reads_the_positions_of_the_context_or_of_a_rings_window(counted, slots, positions):
    gpu, found = GPUS["H200"], counted(attention(SLOTS=slots), launch(), context=Context(1000, 4096))
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


@pytest.mark.parametrize(
    ("positions", "count"), [(1, 1), (128, 1), (129, 2), (8192, 64), (8193, 65), (16384, 96), (16385, 97), (32768, 128)]
)
def test_the_chunks_of_a_context_double_like_those_of_the_kernels(positions, count):
    assert chunks(positions, 128, 64) == count
    assert division(positions, positions, 2).parts == count
    assert chunks(positions, 128, 0) == math.ceil(positions / 128)


def test_a_round_is_a_verify_and_its_draft_steps(counted):
    found = counted(launch(), launch(kernel="triton_poi_fused_add_1", constants={}))
    one, whole = found["methods"][TARGET_VERIFY], found["round"]
    assert one["launches"] | {"all": 0} == dict.fromkeys(one["launches"], 0) | {"small_m": 2, "fused": 2}
    assert whole["launches"] == 4 * one["launches"]["all"] == 16
    for key in ("limit", "bound", "bound_with_launches"):
        assert whole["bounds"]["H200"][key] == pytest.approx(4 * one["bounds"]["H200"][key])


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


# A round of Gemma 4 31B on an H200 (lowering/cuda/measured.md): its kernels took 9.68 ms, in these shares.

INT4 = {"N0": 1, "N1": 0, "N2": 0}
PARTS = {
    "gate and up": (0.30, [("int4_small_m_kernel_0", 43008 * 5376, 60)]),
    "down and o": (0.25, [
        ("int4_small_m_kernel_1", 5376 * 21504, 60), ("int4_small_m_kernel_2", 5376 * 8192, 50),
        ("int4_small_m_kernel_3", 5376 * 16384, 10),
    ]),
    "queries, keys and values": (0.14, [
        ("int4_small_m_kernel_4", 16384 * 5376, 50), ("int4_small_m_kernel_5", 18432 * 5376, 10)
    ]),
    "LM head": (0.025, [("int4_small_m_kernel_6", 262144 * 5376, 1)]),
    "draft head": (0.13, [
        (f"_bf16_small_m_kernel_{at}", size, 3 if at else 1)
        for at, size in enumerate((5376 * 16128, 16384 * 5376, 5376 * 8192, 43008 * 5376, 5376 * 21504, 32000 * 5376))
    ]),
}  # fmt: skip


def matmul(kernel: str, weights: int, count: int = 1, **constants: int) -> dict:
    size = weights * (2 if "bf16" in kernel else 37 / 64)
    given = {} if "bf16" in kernel else INT4
    return launch(kernel=kernel, weight_bytes=int(size), count=count, constants=given | constants, kind="small_m")


@pytest.mark.parametrize("part", PARTS)
def test_the_parts_of_a_measured_round_are_predicted_from_kernels_alone(part):
    share, matmuls = PARTS[part]
    times = read_times()
    predicted = sum(count * seconds_of(times, matmul(*given), 4) for *given, count in matmuls)
    assert 1e3 * predicted == pytest.approx(9.68 * share, rel=0.1)


def test_a_weight_takes_the_measured_time_of_its_size_or_else_the_fit_of_its_variant():
    times = read_times()
    assert seconds_of(times, matmul("int4_small_m_kernel_0", 5376 * 21504), 8) == 27.2 / 1e6
    assert seconds_of(times, matmul("int4_small_m_kernel_0", 5376 * 21504), 9) == 41.9 / 1e6
    assert seconds_of(times, matmul("int4_small_m_kernel_0", 5376 * 21504), 17) is None
    for rows, small, large in ((4, 68.9, 128), (16, 67.6, 129)):  # of one and of twice the size: on a line
        entry = matmul("_bf16_small_m_kernel_0", 3 * 5376 * 21504)
        assert seconds_of(times, entry, rows) == pytest.approx(1e-6 * (2 * large - small))


def test_what_was_not_timed_alone_has_no_number(counted):
    """Nor has a lever, until its tournament has run."""
    times, records = read_times(), "int4_records_small_m_kernel_0"
    for entry in (
        matmul(records, 43008 * 5376),
        matmul(records, 1, EARLY=1),
        matmul("_bf16_small_m_kernel_0", 1, EARLY=1),
    ):
        assert seconds_of(times, entry, 4) is None
    by_triton, by_bulk_copies = matmul(records, 1), matmul(records, 1) | {"cards": [{"first": 90}, {"first": 91}]}
    assert variant_of(by_triton) == "records"
    assert variant_of(by_bulk_copies) == "records by bulk copies"
    one_size = matmul("_k_quant_small_m_kernel_0", 5376 * 5376, BITS=4)
    assert variant_of(one_size) == "q4_k" and seconds_of(times, one_size, 4) is None
    entries = attention(), launch(kernel="triton_red_fused_0", constants={}), launch()
    found = estimate(counted(*entries), times)["parts"]
    assert found["attention"]["seconds"] is found["fused"]["seconds"] is None and found["fused"]["launches"] == 8
    assert found["tiled"]["seconds"] > found["tiled"]["bound"] > 0
    assert estimate(counted(launch(), gpu="H100"), times) is None


def test_the_times_are_those_of_the_last_tournament(tmp_path):
    """Each variant has its own, and one that is wrong has none."""
    record = Record(tmp_path / "A.json", tmp_path / "copy.json")
    record.begin({"gpu": "NVIDIA H100 80GB HBM3, 580.1", "torch": "2.11", "triton": "3.6"})
    for at, variant in enumerate(VARIANTS):
        status = "ok" if at else "not run: it is not right"
        facts = {f"{linear}, 4 rows, {variant.name}": [at + n / 1e6, at] for linear, (n, _, _) in GEMMA.items()}
        record.set("tournament", f"alone, {variant.name}", status, 1.0, facts)
    times = read_times(tmp_path / "A.json")
    assert times.gpu == "H100" and "PyTorch 2.11, Triton 3.6; 20" in times.about
    entry = matmul("int4_records_small_m_kernel_0", 43008 * 5376)
    for at, levers in ((1, {}), (2, {"AHEAD": 4}), (4, {"EARLY": 1, "OF_NEXT": 0}), (5, {"EARLY": 1, "OF_NEXT": 9})):
        assert seconds_of(times, entry | {"constants": levers}, 4) == pytest.approx(1e-6 * (at + 0.043008))
    assert seconds_of(times, matmul("int4_small_m_kernel_0", 43008 * 5376), 4) is None
    record.begin({"gpu": "a card of tomorrow"})
    with pytest.raises(ValueError, match="its GPU, a card of tomorrow, is not in the table"):
        read_times(tmp_path / "A.json")


def test_the_command_prints_tables_and_json(cuda_artifact, monkeypatch):
    monkeypatch.setattr(bounds, "read_codes_for", everywhere(replace(CODE, spill_bytes=48)))
    done = CliRunner().invoke(gpu_cost.main, [str(cuda_artifact), "--gpu", "RTX 4090", "--json"])
    assert list(json.loads(done.stdout)["round"]["bounds"]) == ["RTX 4090"], done.output
    text = CliRunner().invoke(gpu_cost.main, [str(cuda_artifact), "--gpu", "RTX 4090"]).stdout
    assert all(word in text for word in ("memory's limit", "RTX 4090", "round: 1 speculate"))
    assert "No estimate: kernels were timed on an H200" in text and "not measured" not in text
    text = CliRunner().invoke(gpu_cost.main, [str(cuda_artifact), "--gpu", "H200"]).stdout
    assert all(word in text for word in ("2026-11-26", "tiled", "attention", "not measured", "none to a round"))


def test_an_artifact_without_recorded_launches_is_refused_in_one_line(artifact):
    done = CliRunner().invoke(gpu_cost.main, [str(artifact)])
    assert done.exit_code == 1 and "export it again for CUDA" in done.output
