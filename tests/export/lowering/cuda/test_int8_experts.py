"""The small-M kernel of INT8 experts equals plain PyTorch in Triton's interpreter, and its compiled code is checked
without a GPU."""

import pytest
import torch
from int4_expert_weights import choices
from int8_expert_weights import weights_of
from kernel_faults import fault, noticed
from kernel_usage import SHARED, usage
from torch import Tensor
from triton_interpreter import interpreted

from eagle3.export.lowering.cuda.kernels import choices as kernel_choices
from eagle3.export.lowering.cuda.kernels import int8_experts, small_m, sums

KERNELS = sums, small_m, kernel_choices, int8_experts


def computed(x: Tensor, weights: tuple[Tensor, ...], chosen: Tensor) -> Tensor:
    with interpreted(*KERNELS):
        kernel = int8_experts._int8_experts_small_m_kernel
        return int8_experts._launch_experts(kernel, x, *weights, chosen)


def assert_right(found: Tensor, x: Tensor, weights: tuple[Tensor, ...], *given) -> None:
    """Assert that the outputs are right up to rounding to bfloat16 and the errors of float32."""
    expected = int8_experts.experts_reference(x.float(), *weights, *given)
    assert found.dtype == torch.bfloat16 and found.shape == expected.shape
    room = 2**-8 * expected.abs() + 2**-14 * expected.square().mean(1, keepdim=True).sqrt()
    assert ((found.float() - expected).abs() <= room).all()


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16])
def test_int8_experts_are_right_for_every_number_of_rows(rows):
    x, weights, (chosen, _) = torch.randn(rows, 256).bfloat16(), weights_of(6, 64, 256), choices(rows, 6, 3)
    assert_right(computed(x, weights, chosen), x, weights, chosen)


@pytest.mark.parametrize(("n", "k"), [(32, 96), (96, 288), (130, 512), (65, 160)])
def test_int8_experts_are_right_for_any_outputs_and_groups(n, k):
    weights, (chosen, _) = weights_of(4, n, k), choices(3, 4, 2)
    for x in torch.randn(3, k).bfloat16(), torch.randn(6, k).bfloat16():  # of rows, of choices
        assert_right(computed(x, weights, chosen), x, weights, chosen)


def test_a_row_of_int8_experts_has_the_same_bits_in_every_call():
    # Eighths up to 4: sums within a group are exact, so that numpy's order of them says nothing; all others round.
    x, weights = torch.randint(-32, 33, (16, 320)).bfloat16() / 8, weights_of(5, 70, 320)
    chosen, _ = choices(16, 5, 2)
    alone = [computed(x[i : i + 1], weights, chosen[i : i + 1]) for i in range(16)]
    for rows in (2, 8, 9, 16):
        assert torch.equal(computed(x[:rows], weights, chosen[:rows]), torch.cat(alone[:rows]))


FAULTS = {
    "rows of x": ("(mine // EACH)", "tl.arange(0, BLOCK_M)"),
    "the first expert's codes": ("+ expert * (N * (K // 4))", ""),
    "the first expert's scales": ("    SCALE += expert * (N * GROUPS)\n", ""),
    "the first expert's zeros": ("    ZERO += expert * (N * GROUPS)\n", ""),
    "the first expert's bias": ("BIAS + expert * N + n", "BIAS + n"),
    "no bias": ("    total += tl.load(BIAS + expert * N + n, mask=within, other=0).to(tl.float32)[:, None]\n", ""),
    "scales of the block before": ("block * 8 + 8 + chunk", "block * 8 + chunk"),
    "rows past K's end": ("mask=there & (block * BLOCK_K + k < K)", "mask=there"),
    "codes past K's end": ("block * 64 + word < K // 4", "word < 64"),
    "outputs past the last": ("    within = n < N\n", "    within = n < N + 64\n"),
    "codes past the last": ("tl.minimum(n0 + tile_row, N - 1)", "(n0 + tile_row)"),
    "scales past the last": ("tl.minimum(n0 + row, N - 1)", "(n0 + row)"),
    "rows that chose otherwise": ("mask=(mine[None, :] >= 0) & within", "mask=within"),
    "the last choice's program": ("if first < choice:", "if first > choice:"),
}


def is_noticed(n: int, k: int, rows: int) -> bool:
    """Return True if a fault is found. ``rows`` is the number of rows of x, for 4 tokens that chose two experts
    each."""
    x, weights, (chosen, _) = torch.randn(rows, k).bfloat16(), weights_of(4, n, k), choices(4, 4, 2)
    given = x, weights, chosen
    return noticed(lambda: computed(*given), lambda found: assert_right(found, *given))


CASES = [(n, k, rows) for n, k in ((32, 96), (130, 512), (96, 288)) for rows in (4, 8)]


@pytest.mark.races(())  # they watch for themselves
@pytest.mark.parametrize("case", CASES)
def test_correct_int8_experts_have_no_findings(case):
    assert not is_noticed(*case)


@pytest.mark.first(6)
@pytest.mark.races(())
@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_put_into_int8_experts_is_found(name, tmp_path):
    with fault(tmp_path, int8_experts, *FAULTS[name]):
        assert any(is_noticed(*case) for case in CASES)


def test_int8_experts_with_mismatched_shapes_are_refused_by_name():
    x, weights, (chosen, _) = torch.randn(3, 64).bfloat16(), weights_of(4, 96, 64), choices(3, 4, 2)
    with pytest.raises(ValueError, match="the weight is 384 x 64: 4 experts of 96 x 32 have 384 x 32"):
        int8_experts.int8_experts_small_m(x[:, :32], *weights, chosen)
    with pytest.raises(ValueError, match=r"scale is \(384, 1\) and zero \(384, 2\): .* has 384 x 2"):
        int8_experts.int8_experts_small_m(x, weights[0], weights[1][:, :1], *weights[2:], chosen)


TYPES = ["*bf16", "*i8", "*bf16", "*i8", "*bf16", "*i64", "*bf16", "i32", "i32"]
GPT_OSS = {"EXPERTS": 32, "N": 5760, "K": 2880, "TOP_K": 4, "EACH": 4, "BLOCK_T": 4}
GPT_OSS |= {"BLOCK_N": small_m.INT8.n, "BLOCK_K": 256, "STAGES": small_m.INT8.stages}


@pytest.mark.first(1)
@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_int8_experts_take_5_instructions_per_weight_without_spills(arch, tmp_path):
    kernel, constants = int8_experts._int8_experts_small_m_kernel, GPT_OSS
    for rows, most in zip(small_m.ROWS, (5.0, 6.4), strict=True):
        found = usage(kernel, TYPES, constants | {"BLOCK_M": rows}, arch, tmp_path, small_m.WARPS)
        assert found.a_weight(small_m.INT8.n * 256, small_m.WARPS) <= most
        assert found.stack <= 8 and found.shared <= SHARED
