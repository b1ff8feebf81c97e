"""The small-M kernel of INT4 experts equals plain PyTorch in Triton's interpreter, and its compiled code is checked
without a GPU."""

import numpy as np
import pytest
import torch
from int4_expert_weights import Weights, choices, weights_of
from kernel_faults import fault, noticed
from kernel_usage import SHARED, usage
from torch import Tensor
from triton_interpreter import interpreted, words_read

from eagle3.export.lowering.cuda.kernels import choices as kernel_choices
from eagle3.export.lowering.cuda.kernels import int4_experts, small_m, sums
from eagle3.export.lowering.cuda.kernels.int4.tiles import kernel as int4
from eagle3.export.lowering.cuda.kernels.sums import GELU_TANH, SILU

KERNELS = sums, small_m, int4, kernel_choices, int4_experts


def computed(x: Tensor, weights: Weights, chosen: Tensor, factors: Tensor, activation: str = SILU) -> Tensor:
    with interpreted(*KERNELS):
        kernel = int4_experts.int4_experts_small_m_kernel
        inner = int4_experts._launch_experts(kernel, x, *weights[:2], chosen, factors, activation)
        return int4_experts._launch_experts(kernel, inner, *weights[2:], chosen, factors)


def assert_right(found: Tensor, x: Tensor, weights: Weights, *given) -> None:
    """Assert equality up to rounding: the reference rounds at the same places but sums in another order."""
    expected = int4_experts.experts_reference(x, *weights, *given)
    assert found.dtype == expected.dtype == torch.bfloat16 and found.shape == expected.shape
    found, expected = found.float(), expected.float()
    room = 2**-7 * expected.abs() + 2**-8 * expected.square().mean(1, keepdim=True).sqrt()
    assert ((found - expected).abs() <= room).all()


@pytest.mark.first(1)
@pytest.mark.parametrize("activation", [SILU, GELU_TANH])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16])
def test_int4_experts_are_right_for_every_number_of_rows(rows, activation):
    x, weights = torch.randn(rows, 256).bfloat16(), weights_of(6, 256, 64)
    given = *choices(rows, 6, 3), activation
    assert_right(computed(x, weights, *given), x, weights, *given)


@pytest.mark.first(2)
@pytest.mark.parametrize(("hidden", "width"), [(96, 32), (288, 96), (512, 160), (224, 352), (704, 64)])
def test_int4_experts_are_right_for_any_width_in_whole_groups(hidden, width):
    x, weights = torch.randn(3, hidden).bfloat16(), weights_of(4, hidden, width)
    given = *choices(3, 4, 2), SILU
    assert_right(computed(x, weights, *given), x, weights, *given)


@pytest.mark.first(1)
@pytest.mark.parametrize("top_k", [1, 2, 5, 8])
def test_int4_experts_are_right_for_any_number_of_choices(top_k):
    weights, (chosen, factors) = weights_of(8, 64, 32), choices(5, 8, top_k)
    for x in torch.randn(5, 64).bfloat16(), torch.randn(5 * top_k, 64).bfloat16():
        given = chosen, factors, GELU_TANH
        assert_right(computed(x, weights, *given), x, weights, *given)


def test_int4_experts_are_right_for_rows_with_the_same_choices():
    x, weights = torch.randn(6, 64).bfloat16(), weights_of(3, 64, 32)
    chosen = torch.tensor([[2, 0], [2, 1], [0, 2], [2, 0], [1, 0], [0, 1]])
    given = chosen, torch.rand(6, 2), SILU
    assert_right(computed(x, weights, *given), x, weights, *given)


@pytest.mark.parametrize("byte", [0x00, 0x0F, -0x10, -1, -0x78])
def test_int4_experts_are_right_for_extreme_codes(byte):
    x, weights = torch.randn(2, 64).bfloat16(), weights_of(2, 64, 32)
    weights.gate_up.fill_(byte)
    weights.down.fill_(byte)
    given = torch.tensor([[1], [0]]), torch.ones(2, 1), SILU
    assert_right(computed(x, weights, *given), x, weights, *given)
    if byte == -0x78:  # both codes are 8
        assert not computed(x, weights, *given).any()


def test_a_row_of_int4_experts_has_the_same_bits_in_every_call():
    # Eighths up to 4: sums within a group are exact, so that numpy's order of them says nothing; all others round.
    x, weights, (chosen, factors) = (
        torch.randint(-32, 33, (16, 320)).bfloat16() / 8,
        weights_of(5, 320, 32),
        choices(16, 5, 2),
    )
    with interpreted(*KERNELS):
        given = int4_experts.int4_experts_small_m_kernel, x, *weights[:2]
        alone = [
            int4_experts._launch_experts(given[0], x[row], *given[2:], chosen[row], factors[row], SILU)
            for row in (slice(i, i + 1) for i in range(16))
        ]
        for rows in (2, 8, 9, 16):
            found = int4_experts._launch_experts(given[0], x[:rows], *given[2:], chosen[:rows], factors[:rows], SILU)
            assert torch.equal(found, torch.cat(alone[:rows]))


@pytest.mark.races(("forward",))  # loads are counted
def test_only_chosen_int4_experts_are_read_and_each_word_once():
    weights = weights_of(6, 512, 128)
    chosen = torch.tensor([[4, 1], [1, 3], [4, 3]])
    with words_read() as read:
        computed(torch.randn(3, 512).bfloat16(), weights, chosen, torch.ones(3, 2))
    addresses = np.sort(np.concatenate(read))
    expected = [
        np.arange(weight[expert].data_ptr(), weight[expert].data_ptr() + weight[expert].nbytes, 4)
        for weight in (weights.gate_up, weights.down)
        for expert in (1, 3, 4)
    ]
    assert np.array_equal(addresses, np.sort(np.concatenate(expected)))


def test_int4_experts_with_an_unsupported_activation_are_refused():
    x, weights = torch.randn(1, 64).bfloat16(), weights_of(2, 64, 32)
    with pytest.raises(Exception, match="there is no such activation"):
        computed(x, weights, torch.tensor([[1]]), torch.ones(1, 1), "relu")


FAULTS = {
    "experts of other rows": ("(mine // EACH)", "tl.arange(0, BLOCK_M)"),
    "choices for rows": ("(mine // EACH)", "mine"),
    "another code of zero": ("0xC308000000000000", "0xC300000000000000"),
    "outputs as they lie": ("    row = (row % 8) * 8 + row // 8\n", ""),
    "scales as they lie": ("tl.permute(tl.reshape(both, (8, 8, 8)), (0, 2, 1))", "both"),
    "rows past K's end": ("mask=there & (block * BLOCK_K + k < K)", "mask=there"),
    "codes past K's end": ("inside = block * 32 + word < K // 8", "inside = word < 32"),
    "scales of the block before": ("block * 8 + 8 + group", "block * 8 + group"),
    "gate for what it gates": ("tile * 64 + OUTPUTS", "tile * 64"),
    "a half without its factor": ("(total1 * factor)", "total1"),
    "the other without": ("        total0 *= factor\n", ""),
    "rows that chose otherwise": ("mask=there & (n0 + row < OUTPUTS)[:, None])", "mask=(n0 + row < OUTPUTS)[:, None])"),
    "outputs past the last": ("mask=there & (n1 + row < N)[:, None])", "mask=there)"),
    "codes past the last": ("tl.minimum(n1 + row, N - 1)", "(n1 + row)"),
    "scales past the last": ("tl.minimum(n1 + n, N - 1)", "n1 + n"),
    "the last choice's program": ("if first < choice:", "if first > choice:"),
    "the first expert's codes": ("+ expert * (N * (K // 8))", ""),
    "the first expert's scales": ("    SCALE += expert * (GROUPS * N)\n", ""),
}


def is_noticed(hidden: int, width: int, count: int, top_k: int) -> bool:
    """Return True if a fault is found for the choices of four rows."""
    x, weights, chosen = torch.randn(4, hidden).bfloat16(), weights_of(count, hidden, width), choices(4, count, top_k)
    given = x, weights, *chosen
    return noticed(lambda: computed(*given), lambda found: assert_right(found, *given, SILU))


CASES = {"one block": (96, 32, 4, 2), "blocks": (512, 160, 4, 2), "part of a block": (288, 96, 5, 3)}


@pytest.mark.races(())  # they watch for themselves
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_correct_int4_experts_have_no_findings(case):
    assert not is_noticed(*case)


@pytest.mark.first(3)
@pytest.mark.races(())
@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_put_into_int4_experts_is_found(name, tmp_path):
    with fault(tmp_path, int4_experts, *FAULTS[name]):
        assert any(is_noticed(*case) for case in CASES.values())


def test_int4_experts_with_mismatched_shapes_are_refused_by_name():
    x, weights, (chosen, factors) = torch.randn(3, 64).bfloat16(), weights_of(4, 64, 32), choices(3, 4, 2)
    given = *weights, chosen, factors, SILU
    with pytest.raises(ValueError, match="x has K = 32, codes 64"):
        int4_experts.int4_experts_small_m(x[:, :32], *given)
    with pytest.raises(ValueError, match=r"scales are \(4, 1, 64\): experts of 64 x 64 have 4 x 2 x 64"):
        int4_experts.int4_experts_small_m(x, weights[0], weights[1][:, :1], *given[2:])
    with pytest.raises(ValueError, match=r"factors are \(3, 1\), choices \(3, 2\)"):
        int4_experts.int4_experts_small_m(x, *weights, chosen, factors[:, :1], SILU)
    with pytest.raises(ValueError, match=r"factors are \(3, 1\), choices \(3, 2\)"):
        computed(x, weights, chosen, factors[:, :1])
    with pytest.raises(ValueError, match="x has 2 rows; expected 3 .one a token. or 6 .one a chosen expert."):
        computed(x[:2], weights, chosen, factors)
    with pytest.raises(ValueError, match="torch.float32: the kernel takes torch.bfloat16"):
        computed(x.float(), *(weights, chosen, factors))
    with pytest.raises(ValueError, match="17 rows of choices: the kernel takes 16"):
        computed(torch.randn(17, 64).bfloat16(), weights, *choices(17, 4, 2))


TYPES = ["*bf16", "*i8", "*bf16", "*i64", "*fp32", "*bf16", "i32", "i32"]
GEMMA4 = {"BLOCK_N": int4.TILE, "BLOCK_K": int4.BLOCK, "STAGES": int4_experts.STAGES, "TOP_K": 8, "BLOCK_T": 8}
GEMMA4 |= {"EXPERTS": 128}
LAUNCHES = {
    "gate and up": {"N": 1408, "K": 2816, "EACH": 8, "ACTIVATION": GELU_TANH},
    "down": {"N": 2816, "K": 704, "EACH": 1, "ACTIVATION": ""},
}
"""Those of Gemma 4 26B-A4B."""


@pytest.mark.first(1)
@pytest.mark.parametrize("arch", [80, 90, 100, 120])
@pytest.mark.parametrize("name", LAUNCHES)
def test_int4_experts_take_2_7_instructions_per_weight_without_spills(name, arch, tmp_path):
    kernel, constants = int4_experts.int4_experts_small_m_kernel, GEMMA4 | LAUNCHES[name]
    eight, sixteen = (
        usage(kernel, TYPES, constants | {"BLOCK_M": rows}, arch, tmp_path, small_m.WARPS) for rows in small_m.ROWS
    )
    assert eight.a_weight(int4.TILE * int4.BLOCK, small_m.WARPS) <= 2.7
    assert sixteen.a_weight(int4.TILE * int4.BLOCK, small_m.WARPS) <= 3.4
    assert eight.stack <= 8 and not sixteen.stack
    assert eight.shared <= 64 * 1024 and sixteen.shared <= SHARED
