"""The small-M kernels equal plain PyTorch in Triton's interpreter, and their compiled code is checked without a GPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from executorch.backends.cuda.coalesced_int4_tensor import CudaCoalescedInt4Tensor
from kernel_usage import SHARED, assert_two_programs_fit, usage
from small_m_weights import INT4_DOWN, INT4_TYPES, activations, int4_weight, int8_weight
from torch import Tensor
from torch.nn import functional as F
from triton_interpreter import interpreted, words_read

from eagle3.export.lowering.cuda.kernels import small_m, sums
from eagle3.export.lowering.cuda.kernels.int4.tiles import kernel as kernel4
from eagle3.export.lowering.cuda.kernels.int4.tiles.tensor import laid_out
from eagle3.export.speculator.merged_linears import concatenated

GEMMA_LINEARS = {  # N x K of Gemma 4 31B over 21, K in whole blocks of 256 (lm_head: N over 1024)
    "sliding_q": (390, 256),
    "sliding_kv": (195, 256),
    "sliding_o": (256, 512),
    "full_q": (780, 256),
    "full_k": (98, 256),
    "full_o": (256, 768),
    "gate_up": (1024, 256),
    "down": (256, 1024),
    "lm_head": (256, 256),
}


def int4(x: Tensor, *weight: Tensor, parts: int | None = None) -> Tensor:
    return tiled_int4(x, [weight[0]], *kernel4.tiled(*weight[1:]), parts=parts)


def tiled_int4(x: Tensor, *weight: Tensor | list[Tensor], parts: int | None = None) -> Tensor:
    with interpreted(sums, small_m, kernel4):
        choice = replace(kernel4.INT4, parts=parts)
        return kernel4._launch_int4(kernel4.int4_small_m_kernel, x, *weight, sums.counters(), choice=choice)


def int8(x: Tensor, *weight: Tensor, parts: int | None = None) -> Tensor:
    with interpreted(sums, small_m):
        choice = replace(small_m.INT8, parts=parts)
        return small_m._launch_int8(small_m._int8_small_m_kernel, x, *weight, sums.counters(), choice=choice)


def int4_reference(x: Tensor, *weight: Tensor) -> Tensor:
    return kernel4.int4_reference(x, [weight[0]], *kernel4.tiled(*weight[1:]))


def assert_right(found: Tensor, x: Tensor, weight: tuple[Tensor, ...]) -> None:
    """Assert that the product is right up to rounding to bf16 and the errors of float32, which are proportional to |x|
    and the full range of a row's codes."""
    if len(weight) == 5:
        expected = int4_reference(x.float(), *weight)
        span = 15 * (weight[1].float().amax(1) * weight[2].float().amax(1))  # [N]
    else:
        expected = small_m.int8_reference(x.float(), *weight)
        span = 255 * weight[1].float().amax(1)
    dtype, atol, rtol = torch.bfloat16, 1e-6, 2**-8
    assert found.dtype == dtype and found.shape == expected.shape
    room = atol * x.float().abs().sum(1)[:, None] * span + rtol * expected.abs()
    worst = ((found.float() - expected).abs() / room.clamp_min(1e-30)).max()
    assert worst <= 1, f"{worst:.3g} times what rounding explains"


@pytest.mark.first(8)
@pytest.mark.parametrize("m", [*range(1, 17), 17, 40])
def test_the_small_m_kernels_are_right_for_every_number_of_rows(m):
    x = activations(m, 512)
    for op, weight in ((int4, int4_weight(33, 512)), (int8, int8_weight(33, 512, 32))):
        assert_right(op(x, *weight), x, weight)


@pytest.mark.parametrize("n", [1, 7, 33, 63, 64, 65, 129])
def test_the_small_m_kernels_are_right_for_any_number_of_outputs(n):
    x = activations(3, 256)
    for op, weight in ((int4, int4_weight(n, 256)), (int8, int8_weight(n, 256, 64))):
        assert_right(op(x, *weight), x, weight)


@pytest.mark.parametrize("shape", GEMMA_LINEARS.values(), ids=GEMMA_LINEARS)
def test_the_small_m_kernels_are_right_for_gemma_linears(shape):
    x, weight = activations(5, shape[1]), int4_weight(*shape)
    assert_right(int4(x, *weight), x, weight)


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_the_small_m_kernels_are_right_for_any_split_of_k(parts):
    x = activations(3, 1280)
    for op, weight in ((int4, int4_weight(20, 1280)), (int8, int8_weight(20, 1280, 32))):
        assert_right(op(x, *weight, parts=parts), x, weight)


@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_the_small_m_int4_kernel_is_right_for_any_group_size(group):
    x, weight = activations(2, 768), int4_weight(40, 768, group)
    assert_right(int4(x, *weight), x, weight)


@pytest.mark.parametrize(
    ("k", "group"), [(256, 32), (512, 512), (768, 256), (384, 128), (288, 96), (96, 48), (80, 16), (5376, 5376)]
)
def test_the_small_m_int8_kernel_is_right_for_any_group_and_k(k, group):
    for m in (3, 12):
        x, weight = activations(m, k), int8_weight(20, k, group)
        assert_right(int8(x, *weight), x, weight)


@pytest.mark.parametrize("q", [0x00, 0xFF, 0x0F, 0xF0])
@pytest.mark.parametrize("zero", [0, 255])
@pytest.mark.parametrize("scale", [0, 255])
def test_the_small_m_int4_kernel_is_right_for_extreme_codes(q, zero, scale):
    x, weight = activations(9, 256), int4_weight(8, 256)
    for tensor, value in zip((weight[0], weight[1], weight[3]), (q, scale, zero), strict=True):
        tensor.fill_(value)
    assert_right(int4(x, *weight), x, weight)
    if not scale:
        assert not int4(x, *weight).any()


@pytest.mark.parametrize("q", [-128, 127])
@pytest.mark.parametrize("zero", [-128, 0, 127])
def test_the_small_m_int8_kernel_is_right_for_extreme_codes(q, zero):
    x, weight = activations(9, 256), int8_weight(8, 256, 32)
    weight[0].fill_(q)
    weight[2].fill_(zero)
    assert_right(int8(x, *weight), x, weight)


def coalesced(weight: tuple[Tensor, ...]) -> CudaCoalescedInt4Tensor:
    n, k = weight[0].shape[0], 2 * weight[0].shape[1]
    return CudaCoalescedInt4Tensor(*weight, [1, k // weight[1].shape[1]], torch.Size((n, k)))


@pytest.mark.parametrize(("n", "k", "group"), [(24, 512, 32), (128, 256, 64), (130, 768, 128), (300, 256, 256)])
def test_the_int4_layout_holds_the_values_of_executorchs_own_weight(n, k, group):
    weight = int4_weight(n, k, group)
    tensor, tiled = coalesced(weight), laid_out(coalesced(weight))
    assert tiled.qdata is weight[0]
    for name in ("scale", "scale_step", "zero_point", "zero_point_step", "block_size", "shape"):
        found, expected = getattr(tiled.coalesced()[0], name), getattr(tensor, name)
        assert torch.equal(found, expected) if isinstance(found, Tensor) else found == expected
    assert torch.equal(tiled.dequantize(), tensor.dequantize())
    x = activations(9, k)
    assert torch.equal(F.linear(x, tiled), F.linear(x, tensor))
    torch.testing.assert_close(int4_reference(torch.eye(k), *weight).T, tensor.dequantize(torch.float32))


def test_several_int4_weights_with_one_input_are_joined(tmp_path):
    weights = [int4_weight(n, 512) for n in (128, 40, 100)]
    both = concatenated([laid_out(coalesced(weight)) for weight in weights], tmp_path)
    assert torch.equal(both.dequantize(), torch.cat([coalesced(weight).dequantize() for weight in weights]))
    assert [each.data_ptr() for each in both.parts[0]] == [weight[0].data_ptr() for weight in weights]
    for m in (5, 9):  # ExecuTorch's own op for up to 4 rows is CUDA's alone
        x = activations(m, 512)
        found = tiled_int4(x, *both.parts, parts=2)
        assert torch.equal(found, torch.cat([int4(x, *weight, parts=2) for weight in weights], 1))
        each = [F.linear(x, coalesced(weight)) for weight in weights]
        assert torch.equal(F.linear(x, both), torch.cat(each, 1))
    with pytest.raises(ValueError, match="4 weights: one launch takes 3"):
        concatenated([both, laid_out(coalesced(weights[0]))], tmp_path)


def test_the_int8_layout_holds_the_values_of_torchaos_own_weight():
    from torchao.quantization import IntxUnpackedToInt8Tensor

    tensor = IntxUnpackedToInt8Tensor.from_hp(torch.randn(24, 512).bfloat16(), (1, 32), torch.int8)
    weight = tensor.qdata, tensor.scale, tensor.zero_point
    found = small_m.int8_reference(torch.eye(512), *weight).T
    torch.testing.assert_close(found.bfloat16(), tensor.dequantize(), atol=1e-2, rtol=2**-8)


class Kept:
    """A kernel that keeps the partial sums of its last launch."""

    def __init__(self, kernel):
        self.kernel, self.parts = kernel, None

    def __getitem__(self, programs):
        def run(*args, **options) -> None:
            self.parts = args[-3]  # before OUT and M
            self.kernel[programs](*args, **options)

        return run


def sums_of(x: Tensor, weight: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return the output [M, N] and the float32 sums [2, M, N] over the halves of K, from which the output is added and
    rounded."""
    with interpreted(sums, small_m, kernel4):
        if len(weight) == 5:
            kernel, arguments = Kept(kernel4.int4_small_m_kernel), ([weight[0]], *kernel4.tiled(*weight[1:]))
            out = kernel4._launch_int4(kernel, x, *arguments, sums.counters(), choice=replace(kernel4.INT4, parts=2))
        else:
            kernel, choice = Kept(small_m._int8_small_m_kernel), replace(small_m.INT8, parts=2)
            out = small_m._launch_int8(kernel, x, *weight, sums.counters(), choice=choice)
        return out, kernel.parts


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "weight",
    [int4_weight(20, 1024), int8_weight(20, 1024, 32), int8_weight(20, 768, 768)],
    ids=["int4", "int8", "int8_per_row"],
)
def test_a_row_of_the_small_m_kernels_has_the_same_bits_in_every_call(weight):
    # Eighths up to 4: sums within a group are exact, so that numpy's order of them says nothing; all others round.
    k = weight[0].shape[1] * (2 if len(weight) == 5 else 1)
    x = torch.randint(-32, 33, (18, k)).bfloat16() / 8
    alone = [torch.cat(rows, dim=-2) for rows in zip(*(sums_of(row[None], weight) for row in x), strict=True)]
    for m in range(2, 19):
        for found, expected in zip(sums_of(x[:m], weight), alone, strict=True):
            assert torch.equal(found, expected[..., :m, :]), f"{m} rows"


@pytest.mark.races(("forward",))  # loads are counted
def test_each_weight_word_is_read_once_for_up_to_16_rows():
    for op, weight, k in ((int4, int4_weight(128, 1024), 1024), (int8, int8_weight(128, 1024, 32), 1024)):
        for m in (1, 8, 9, 16):
            with words_read() as read:
                op(activations(m, k), *weight)
            addresses = np.concatenate(read)
            first = weight[0].data_ptr()
            addresses = addresses[(addresses >= first) & (addresses < first + weight[0].nbytes)]
            assert len(addresses) == len(np.unique(addresses)) == weight[0].numel() // 4


def test_few_outputs_are_split_along_k_and_a_vocabulary_is_not():
    assert sums.division(2048, 21, 128).parts > 1
    assert sums.division(5376, 84, 128) == (0, 6)
    assert sums.division(262144, 21, 128) == (0, 1)


def test_as_many_tiles_as_run_at_a_time_are_whole_and_the_rest_is_split_along_k():
    assert sums.division(2 * 21504, 21, 128) == (264, 3)  # 216 programs share 72 tiles
    with sums.made_for(108, True):
        assert sums.division(2 * 21504, 21, 128) == (216, 3)
    with sums.made_for(132, False):
        assert sums.division(2 * 21504, 21, 128) == (0, 3)
    assert sums.division(2 * 21504, 21, 128).programs(336) == (264 + 3 * 72, 1)


@pytest.mark.parametrize(("outputs", "whole"), [([40960], 264), ([20480] * 2, 264), ([40000], 0), ([13696] * 3, 0)])
def test_weights_whose_programs_need_more_registers_have_no_whole_tiles(outputs, whole):
    """Only one program with three weights, or with a partial tile, fits on a multiprocessor."""
    qdata = [torch.empty(each, 512, dtype=torch.uint8, device="meta") for each in outputs]
    codes = torch.empty(sum(-(-each // 128) for each in outputs), device="meta")
    divided, _ = kernel4.small_m_run(None, torch.empty(4, 1024, device="meta"), qdata, codes, None, None, 32)
    assert divided.whole == whole


class Linears(torch.nn.Module):
    def __init__(self):
        super().__init__()
        four = int4_weight(48, 512)
        four = four[0], *kernel4.tiled(*four[1:])
        self.int4 = torch.nn.ParameterList([torch.nn.Parameter(t, False) for t in four])
        self.int8 = torch.nn.ParameterList([torch.nn.Parameter(t, False) for t in int8_weight(48, 512, 32)])
        self.register_buffer("arrived", sums.counters())

    def forward(self, x: Tensor) -> Tensor:
        return kernel4.int4_small_m(x, [self.int4[0]], *self.int4[1:], self.arrived) + small_m.int8_small_m(
            x, *self.int8, self.arrived
        )


def test_exported_small_m_products_stay_single_ops_with_dynamic_rows():
    model = Linears()
    rows = torch.export.Dim("rows", min=1, max=64)
    program = torch.export.export(model, (activations(4, 512),), dynamic_shapes=({0: rows},))
    for each in (program, program.run_decompositions({})):
        targets = [str(node.target) for node in each.graph.nodes if node.op == "call_function"]
        assert targets.count("eagle3.int4_small_m.default") == targets.count("eagle3.int8_small_m.default") == 1
        assert len(targets) == 3  # and the sum
        for m in (1, 2, 16, 33):
            x = activations(m, 512)
            assert torch.equal(each.module()(x), model(x))


def test_on_the_host_the_small_m_ops_are_the_references():
    x, four, eight, arrived = activations(3, 256), int4_weight(8, 256), int8_weight(8, 256, 256), sums.counters()
    tiled = kernel4.tiled(*four[1:])
    assert torch.equal(kernel4.int4_small_m(x, [four[0]], *tiled, arrived), int4_reference(x, *four))
    assert torch.equal(small_m.int8_small_m(x, *eight, arrived), small_m.int8_reference(x, *eight))


def test_mismatched_shapes_of_the_small_m_kernels_are_refused_by_name():
    x, four, eight, arrived = activations(3, 256), int4_weight(8, 256), int8_weight(8, 256, 32), sums.counters()
    codes, steps = kernel4.tiled(*four[1:])
    with pytest.raises(ValueError, match="x has K = 128, qdata 256"):
        kernel4.int4_small_m(x[:, :128], [four[0]], codes, steps, arrived)
    with pytest.raises(ValueError, match=r"codes are \(1, 1, 7, 128, 2\).* have 1 x 1 x 8 x 128 x 2"):
        kernel4.int4_small_m(x, [four[0]], codes[:, :, :7], steps, arrived)
    with pytest.raises(ValueError, match=r"steps are \(1, 1, 127, 2\).* have 1 x 1 x 128 x 2"):
        kernel4.int4_small_m(x, [four[0]], codes, steps[:, :, :127], arrived)
    with pytest.raises(ValueError, match=r"scale is \(8, 3\)"):
        small_m.int8_small_m(x, eight[0], eight[1][:, :3], eight[2][:, :3], arrived)
    with pytest.raises(ValueError, match="torch.float32: the kernel takes torch.bfloat16"):
        int4(x.float(), *four)
    with pytest.raises(ValueError, match="group size is 8: the kernel takes multiples of 16"):
        int8(x, *int8_weight(8, 256, 8))
    with pytest.raises(ValueError, match=r"strides \(1, 8\): not contiguous"):
        int8(x, eight[0], eight[1].T.contiguous().T, eight[2])


ARCHITECTURES = [80, 90, 100, 120]  # code for sm_86 and sm_89 is that for sm_80, in less shared memory
INT8_TYPES = ["*bf16", "*i8", "*bf16", "*i8", "*i32", "*fp32", "*bf16", "i32"]
INT8_HEAD = {"N": 262144, "K": 5376, "G": 5376, "BLOCK_K": 256, "WHOLE": 0, "SPLITS": 1}
INT8_HEAD |= {"BLOCK_N": small_m.INT8.n, "STAGES": small_m.INT8.stages}


@pytest.mark.first(1)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_small_m_int4_kernel_takes_2_7_instructions_per_weight_and_two_programs_fit(arch, tmp_path):
    kernel, constants = kernel4.int4_small_m_kernel, INT4_DOWN | {"BLOCK_M": 8}
    found = assert_two_programs_fit(kernel, INT4_TYPES, constants, arch, tmp_path)
    assert found.stack == 0
    assert found.a_weight(kernel4.TILE * kernel4.BLOCK, small_m.WARPS) <= 2.7
    assert found.loop.count("BAR") == 2
    assert found.loop.count("LDG") == 2  # codes and steps; the rest is copied ahead


@pytest.mark.first(1)
@pytest.mark.parametrize("arch", [80, 90, 120])
def test_the_small_m_int4_kernel_does_not_spill_with_16_rows(arch, tmp_path):
    outputs = kernel4.OUTPUTS[16]
    constants = INT4_DOWN | {"BLOCK_M": 16, "BLOCK_N": outputs}
    found = usage(kernel4.int4_small_m_kernel, INT4_TYPES, constants, arch, tmp_path, small_m.WARPS)
    assert found.shared <= SHARED and found.stack == 0 and found.registers <= 128
    assert found.a_weight(outputs * kernel4.BLOCK, small_m.WARPS) <= 4.1


@pytest.mark.first(1)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_two_programs_of_the_small_m_int8_kernel_fit_on_a_multiprocessor(arch, tmp_path):
    kernel = small_m._int8_small_m_kernel
    assert_two_programs_fit(kernel, INT8_TYPES, INT8_HEAD | {"BLOCK_M": 8}, arch, tmp_path)
    if arch == 80:
        found = usage(kernel, INT8_TYPES, INT8_HEAD | {"BLOCK_M": 16}, arch, tmp_path, small_m.WARPS)
        assert found.shared <= SHARED and found.stack == 0
