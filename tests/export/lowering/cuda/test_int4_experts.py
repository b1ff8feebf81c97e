"""The kernel of INT4 experts equals plain PyTorch in Triton's interpreter, and each fault put into it is found."""

import numpy as np
import pytest
import torch
from kernel_faults import fault, noticed
from kernel_inputs import Int4Experts, choices
from kernel_inputs import int4_experts_weights as weights_of
from torch import Tensor
from triton_interpreter import interpreted, words_read

from eagle3.export.lowering.cuda.kernels import choices as kernel_choices
from eagle3.export.lowering.cuda.kernels import int4_experts, small_m, sums
from eagle3.export.lowering.cuda.kernels.int4.tiles import kernel as int4
from eagle3.export.lowering.cuda.kernels.sums import GELU_TANH, SILU

KERNELS = sums, small_m, int4, kernel_choices, int4_experts


def computed(x: Tensor, weights: Int4Experts, chosen: Tensor, factors: Tensor, activation: str = SILU) -> Tensor:
    with interpreted(*KERNELS):
        kernel = int4_experts.int4_experts_small_m_kernel
        inner = int4_experts._launch_experts(kernel, x, *weights[:2], chosen, factors, activation)
        return int4_experts._launch_experts(kernel, inner, *weights[2:], chosen, factors)


def assert_right(found: Tensor, x: Tensor, weights: Int4Experts, *given) -> None:
    """Assert equality up to rounding: the reference rounds at the same places but sums in another order."""
    expected = int4_experts.experts_reference(x, *weights, *given)
    assert found.dtype == expected.dtype == torch.bfloat16 and found.shape == expected.shape
    found, expected = found.float(), expected.float()
    room = 2**-7 * expected.abs() + 2**-8 * expected.square().mean(1, keepdim=True).sqrt()
    assert ((found - expected).abs() <= room).all()


@pytest.mark.first(3)
@pytest.mark.parametrize(
    ("rows", "hidden", "width", "count", "top_k", "activation"),
    [
        (1, 256, 64, 6, 3, SILU), (8, 96, 32, 4, 2, GELU_TANH), (9, 288, 96, 4, 2, SILU),
        (16, 224, 352, 4, 1, GELU_TANH), (3, 704, 64, 8, 8, GELU_TANH), (2, 512, 160, 8, 5, SILU),
    ],
)  # fmt: skip
def test_int4_experts_are_right_for_any_rows_widths_and_choices(rows, hidden, width, count, top_k, activation):
    weights, given = weights_of(count, hidden, width), (*choices(rows, count, top_k), activation)
    for x in torch.randn(rows, hidden).bfloat16(), torch.randn(rows * top_k, hidden).bfloat16():
        assert_right(computed(x, weights, *given), x, weights, *given)


def test_int4_experts_are_right_for_rows_with_the_same_choices():
    x, weights = torch.randn(6, 64).bfloat16(), weights_of(3, 64, 32)
    chosen = torch.tensor([[2, 0], [2, 1], [0, 2], [2, 0], [1, 0], [0, 1]])
    given = chosen, torch.rand(6, 2), SILU
    assert_right(computed(x, weights, *given), x, weights, *given)


@pytest.mark.parametrize("byte", [0x00, -0x10, -1, -0x78])
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
    x, weights = torch.randint(-32, 33, (16, 320)).bfloat16() / 8, weights_of(5, 320, 32)
    chosen, factors = choices(16, 5, 2)

    def of(rows: slice) -> Tensor:
        kernel = int4_experts.int4_experts_small_m_kernel
        return int4_experts._launch_experts(kernel, x[rows], *weights[:2], chosen[rows], factors[rows], SILU)

    with interpreted(*KERNELS):
        alone = torch.cat([of(slice(at, at + 1)) for at in range(9)])
        for rows in (2, 8, 9, 16):
            assert torch.equal(of(slice(rows))[:18], alone[: 2 * rows])  # two choices a row


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
    op, given, few = int4_experts.int4_experts_small_m, (*weights, chosen, factors, SILU), factors[:, :1]
    for says, refused in {
        "x has K = 32, codes 64": lambda: op(x[:, :32], *given),
        "scales are (4, 1, 64): experts of 64 x": lambda: op(x, weights[0], weights[1][:, :1], *given[2:]),
        "factors are (3, 1), choices (3, 2)": lambda: op(x, *weights, chosen, few, SILU),
        "factors are (3, 1), choices": lambda: computed(x, weights, chosen, few),
        "x has 2 rows; expected 3 (one a token) or 6": lambda: computed(x[:2], weights, chosen, factors),
        "torch.float32: the kernel takes torch.bfloat16": lambda: computed(x.float(), weights, chosen, factors),
        "17 rows of choices: the kernel takes 16": lambda: computed(x.repeat(6, 1)[:17], weights, *choices(17, 4, 2)),
    }.items():
        with pytest.raises(ValueError) as raised:
            refused()
        assert says in str(raised.value)
