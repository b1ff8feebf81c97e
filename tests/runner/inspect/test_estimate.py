"""Estimates are close to the measured times of single kernels, of the parts of a round, and of a round."""

import pytest

from eagle3.runner.hardware.gpus import GPUS
from eagle3.runner.inspect.cost.estimate import GAP_SECONDS, MEASURED_ON, estimate, kernel_seconds

H200 = GPUS["H200"]
INT4 = 0.578125
"""The bytes of an INT4 weight with its share of scales and zero points."""
ALONE = {  # export/lowering/cuda/README.md: bytes, us at 4 rows, us at 16 rows
    "gate and up": ("int4_small_m_kernel_0", 43008 * 5376 * INT4, 52.0, 81.2),
    "down": ("int4_small_m_kernel_1", 5376 * 21504 * INT4, 27.2, 41.9),
    "queries, keys and values": ("int4_small_m_kernel_2", 16384 * 5376 * INT4, 22.6, 36.0),
    "LM head": ("int4_small_m_kernel_3", 262144 * 5376 * INT4, 242, 357),
    "INT8, down": ("_int8_small_m_kernel_0", 5376 * 21504, 40.0, 65.0),
    "INT8, LM head": ("_int8_small_m_kernel_1", 262144 * 5376, 401, 696),
    "Q4_K, down": ("_k_quant_small_m_kernel_0", 5376 * 21504 * INT4, 28.1, 49.8),
    "Q5_K, down": ("_k_quant_small_m_kernel_1", 5376 * 21504 * (INT4 + 1 / 8), 34.1, 46.7),
    "bfloat16, gate and up": ("_bf16_small_m_kernel_0", 2 * 43008 * 5376, 128, 129),
    "bfloat16, down": ("_bf16_small_m_kernel_1", 2 * 5376 * 21504, 68.9, 67.6),
}


def entry(kernel: str, weight_bytes: float = 0, count: int = 1, cache: bool = False) -> dict:
    cached = {"slots": 4096} if cache else None
    return {"kernel": kernel, "weight_bytes": int(weight_bytes), "cache_bytes": 0, "count": count, "cache": cached}


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("rows", [4, 16])
def test_estimates_of_single_kernels_are_within_a_fifth_of_their_times(name, rows):
    kernel, size, *us = ALONE[name]
    found = 1e6 * kernel_seconds(entry(kernel, size), rows, H200, 0.0)
    assert found == pytest.approx(us[rows == 16], rel=0.2)


def round_of(gpu: str = "H200") -> tuple[dict[str, float], dict]:
    """Return the parts of a round of Gemma 4 31B with three draft steps in ms, and its estimate."""
    draft = [2 * 5376 * 16128, 2 * 16384 * 5376, 2 * 5376 * 8192, 2 * 43008 * 5376, 2 * 5376 * 21504, 2 * 32000 * 5376]
    parts = {
        "gate and up": [entry("int4_small_m_kernel_0", 43008 * 5376 * INT4, 60)],
        "down and o": [
            entry("int4_small_m_kernel_1", 5376 * 21504 * INT4, 60),
            entry("int4_small_m_kernel_2", 5376 * 8192 * INT4, 50),
            entry("int4_small_m_kernel_3", 5376 * 16384 * INT4, 10),
        ],
        "queries, keys and values": [
            entry("int4_small_m_kernel_4", 16384 * 5376 * INT4, 50),
            entry("int4_small_m_kernel_5", 18432 * 5376 * INT4, 10),
        ],
        "attention": [entry("_attention_kernel_0", count=60, cache=True), entry("attention_sum_kernel_1", count=10)],
        "draft": [entry(f"_bf16_small_m_kernel_{at}", size, 3 if at else 1) for at, size in enumerate(draft)],
        "LM head": [entry("int4_small_m_kernel_6", 262144 * 5376 * INT4)],
        "norms": [entry("triton_red_fused_0", count=120)],
    }
    for kernels in parts.values():
        for each in kernels:
            each["estimates"] = {gpu: kernel_seconds(each, 4, GPUS[gpu], 0.0)}
    everything = [each for kernels in parts.values() for each in kernels]
    spent = {
        name: 1e3 * sum(each["count"] * each["estimates"][gpu] for each in kernels) for name, kernels in parts.items()
    }
    return spent, estimate(everything, GPUS[gpu])


def test_the_estimate_of_a_round_is_within_a_tenth_and_of_its_parts_within_a_fifth():
    spent, whole = round_of()
    shares = {  # of 9.68 ms, in the same README
        "gate and up": 0.30, "down and o": 0.25, "queries, keys and values": 0.14, "attention": 0.09, "draft": 0.13,
        "LM head": 0.025, "norms": 0.05,
    }  # fmt: skip
    for name, share in shares.items():
        assert spent[name] == pytest.approx(9.68 * share, rel=0.2), name
    assert 1e3 * whole["seconds"] == pytest.approx(10.06, rel=0.1)
    assert whole["measured_on"] == MEASURED_ON == "H200" and whole["scaled"] is False


def test_an_estimate_counts_the_gaps_between_kernels_of_a_graph():
    kernels = [entry("triton_poi_fused_0", count=474) | {"estimates": {"H200": 0.0}}]
    assert estimate(kernels, H200)["seconds"] == pytest.approx(474 * GAP_SECONDS) == pytest.approx(0.38e-3, rel=0.01)


def test_an_estimate_for_another_gpu_is_scaled_and_marked():
    """INT4 is scaled by multiprocessors and clock, bfloat16 by memory bandwidth; fixed times are those of the measured
    GPU."""
    h100 = GPUS["H100"]
    for kernel, ratio in (("int4_small_m_kernel_0", h100.clock / H200.clock), ("_bf16_small_m_kernel_0", 3.35 / 4.8)):
        fixed, here, there = (
            kernel_seconds(entry(kernel, size), 4, gpu, 0.0) for size, gpu in ((0, H200), (10**9, H200), (10**9, h100))
        )
        assert kernel_seconds(entry(kernel), 4, h100, 0.0) == fixed
        assert (here - fixed) / (there - fixed) == pytest.approx(ratio)
    assert round_of("H100")[1]["scaled"] is True


def test_no_estimate_is_below_its_bound_and_many_rows_take_a_multiple_of_it():
    assert kernel_seconds(entry("int4_small_m_kernel_0", 1000), 4, H200, 1.0) == 1.0
    assert kernel_seconds(entry("_int4_matmul_kernel_0", 1000), 1024, H200, 1e-3) == pytest.approx(2.7e-3)
