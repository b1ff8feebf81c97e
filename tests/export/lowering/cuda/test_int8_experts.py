"""The kernel of INT8 experts equals plain PyTorch in Triton's interpreter, and each fault put into it is found."""

import pytest
import torch
from kernel_faults import fault, noticed
from kernel_inputs import choices
from kernel_inputs import int8_experts_weights as weights_of
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


@pytest.mark.parametrize(
    ("rows", "n", "k", "top_k"), [(1, 64, 256, 3), (8, 32, 96, 2), (9, 130, 512, 2), (16, 65, 160, 1)]
)
def test_int8_experts_are_right_for_any_rows_outputs_and_groups(rows, n, k, top_k):
    weights, (chosen, _) = weights_of(4, n, k), choices(rows, 4, top_k)
    for x in torch.randn(rows, k).bfloat16(), torch.randn(rows * top_k, k).bfloat16():  # of rows, of choices
        assert_right(computed(x, weights, chosen), x, weights, chosen)


def test_a_row_of_int8_experts_has_the_same_bits_in_every_call():
    # Eighths up to 4: sums within a group are exact, so that numpy's order of them says nothing; all others round.
    x, weights = torch.randint(-32, 33, (16, 320)).bfloat16() / 8, weights_of(5, 70, 320)
    chosen, _ = choices(16, 5, 2)
    alone = [computed(x[i : i + 1], weights, chosen[i : i + 1]) for i in range(9)]
    for rows in (2, 8, 9, 16):
        assert torch.equal(computed(x[:rows], weights, chosen[:rows])[:18], torch.cat(alone)[: 2 * rows])


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


CASES = (130, 512, 4), (96, 288, 8), (32, 96, 8)


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
