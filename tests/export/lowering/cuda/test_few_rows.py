"""The kernels of few rows, for each format of weights, give the products of the dequantized weights in Triton's
interpreter, and each row has the same bits in every call."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from executorch.backends.cuda.coalesced_int4_tensor import CudaCoalescedInt4Tensor
from gguf_files import q4_k, q5_k, q6_k
from kernel_inputs import (
    KINDS,
    activations,
    assert_product,
    int4_weight,
    int8_weight,
    k_quant_weight,
    parts,
)
from torch import Tensor
from torch.export import Dim, export
from torch.nn import functional as F
from torchao.quantization import IntxUnpackedToInt8Tensor
from triton.runtime.interpreter import InterpreterBuilder
from triton_interpreter import asked_of_l2, interpreted, loaded_before_waits, within, words_read

from eagle3.export.lowering.cuda.kernels import bf16, k_quants, small_m, sums
from eagle3.export.lowering.cuda.kernels.int4.tiles import kernel as int4
from eagle3.export.lowering.cuda.kernels.int4.tiles.tensor import laid_out
from eagle3.export.speculator.merged_linears import concatenated


class Kept:
    """A kernel that keeps the partial sums of its last launch."""

    def __init__(self, kernel: Any):
        self.kernel, self.parts = kernel, None

    def __getitem__(self, programs: Any) -> Callable:
        def run(*args, **options) -> None:
            self.parts = args[-3]  # before OUT and M
            self.kernel[programs](*args, **options)

        return run


class Format(NamedTuple):
    """``made(n, k)`` returns a random weight, ``launch(kernel, x, weight, arrived, parts)`` runs its kernel with K
    split into parts, ``dense`` returns the weight in float32 [N, K], ``magnitude`` the sum of the absolute values that
    the kernel adds, for x = 1, None for those of the products; ``words`` are the tensors of which a word is read
    once."""

    made: Callable[[int, int], Any]
    kernel: Callable[[], Any]
    launch: Callable[..., Tensor]
    dense: Callable[[Any], Tensor]
    magnitude: Callable[[Any], Tensor | None]
    words: Callable[[Any], list[Tensor]]

    def product(self, x: Tensor, weight: Any, count: int | None = None, arrived: Tensor | None = None) -> Tensor:
        return self.sums_of(x, weight, count, arrived)[0]

    def sums_of(self, x: Tensor, weight: Any, count: int | None = 2, arrived: Tensor | None = None) -> list[Tensor]:
        """Return the output [M, N], and the float32 sums of the parts of K, from which it is added and rounded."""
        with interpreted(sums, small_m, int4, bf16, k_quants):
            kernel = Kept(self.kernel())
            return [
                self.launch(kernel, x, weight, sums.counters() if arrived is None else arrived, count),
                kernel.parts,
            ]

    def assert_right(self, x: Tensor, weight: Any, count: int | None = None, arrived: Tensor | None = None) -> None:
        span = self.magnitude(weight)
        magnitude = None if span is None else x.double().abs().sum(1)[:, None] * span
        assert_product(self.product(x, weight, count, arrived), x, self.dense(weight), magnitude)


def _int4(kernel, x, weight, arrived, count):
    return int4._launch_int4(kernel, x, *parts(weight), arrived, choice=replace(int4.INT4, parts=count))


def _int8(kernel, x, weight, arrived, count):
    return small_m._launch_int8(kernel, x, *weight, arrived, choice=replace(small_m.INT8, parts=count))


def _bf16(kernel, x, weight, arrived, count):
    return bf16._launch_bf16(kernel, x, weight, arrived, choice=replace(bf16.BF16, parts=count))


def _k_quant(kernel, x, weight, arrived, count):
    packed, _ = weight
    choice = replace(k_quants.CHOICES[k_quants.code_bits(*packed.parts)], parts=count)
    return k_quants._launch_k_quant(kernel, x, *packed.parts, arrived, choice=choice)


def int8_format(group: int) -> Format:
    return Format(
        lambda n, k: int8_weight(n, k, min(group, k)),
        lambda: small_m._int8_small_m_kernel,
        _int8,
        lambda weight: small_m.int8_dequantized(*weight),
        lambda weight: 255 * weight[1].double().amax(1),
        lambda weight: [weight[0]],
    )


def k_quant_format(kind: str) -> Format:
    return Format(
        lambda n, k: k_quant_weight(kind, n, k),
        lambda: k_quants._k_quant_small_m_kernel,
        _k_quant,
        lambda weight: weight[1],
        lambda weight: 20 * weight[1].double().abs().amax(1),
        lambda weight: [part for part in weight[0].parts[:2] if part is not None],
    )


FORMATS = {
    "int4": Format(
        int4_weight,
        lambda: int4.int4_small_m_kernel,
        _int4,
        lambda weight: int4.dequantized(*parts(weight))[0],
        lambda weight: 15 * (weight[1].double().amax(1) * weight[2].double().amax(1)),
        lambda weight: [weight[0]],
    ),
    "int8": int8_format(32),
    "int8 by row": int8_format(1 << 20),
    "bf16": Format(
        lambda n, k: torch.randn(n, k).bfloat16(),
        lambda: bf16._bf16_small_m_kernel,
        _bf16,
        lambda weight: weight,
        lambda weight: None,
        lambda weight: [weight],
    ),
} | {kind: k_quant_format(kind) for kind in KINDS}


@pytest.fixture(params=FORMATS)
def format(request) -> Format:
    return FORMATS[request.param]


@pytest.mark.parametrize("m", [1, 8, 9, 17, 40])
def test_products_are_right_for_every_number_of_rows(format, m):
    format.assert_right(activations(m, 512), format.made(33, 512))


@pytest.mark.parametrize(("n", "count"), [(1, 1), (64, 2), (129, 3)])
def test_products_are_right_for_any_outputs_and_parts_of_k_and_leave_no_counter(format, n, count):
    x, weight, arrived = activations(3, 768), format.made(n, 768), sums.counters()
    for _ in range(2):  # the second call finds what the first one left
        format.assert_right(x, weight, count, arrived)
        assert not arrived.any()


@pytest.mark.parametrize(
    ("name", "n", "k", "group"),
    [("int4", 40, 768, 64), ("int4", 40, 768, 256)]
    + [("int8", 20, k, group) for k, group in ((512, 512), (384, 128), (288, 96), (96, 48), (80, 16), (5376, 5376))]
    + [("bf16", n, k, 0) for n, k in ((1, 8), (63, 200), (65, 136), (129, 392))],
)
def test_products_are_right_for_any_group_and_k(name, n, k, group):
    weight = {"int4": int4_weight, "int8": int8_weight, "bf16": lambda *_: torch.randn(n, k).bfloat16()}[name](
        n, k, group
    )
    FORMATS[name].assert_right(activations(12, k), weight)


@pytest.mark.first(4)
def test_a_row_has_the_same_bits_in_every_call(format):
    # Eighths up to 4: sums within a group are exact, so that numpy's order of them says nothing; all others round.
    weight, x = format.made(20, 1024), torch.randint(-32, 33, (17, 1024)).bfloat16() / 8
    alone = [torch.cat(rows, -2) for rows in zip(*(format.sums_of(row[None], weight) for row in x[:9]), strict=True)]
    for m in (2, 8, 9, 17):
        for found, expected in zip(format.sums_of(x[:m], weight), alone, strict=True):
            assert torch.equal(found[..., :9, :], expected[..., :m, :]), f"{m} rows"


@pytest.mark.races(("forward",))  # loads are counted
def test_each_word_of_a_weight_is_read_once_for_up_to_16_rows(format):
    weight = format.made(128, 1024)
    for m in (1, 16):
        with words_read(None) as read:
            format.product(activations(m, 1024), weight)
        for words in format.words(weight):
            here = within(read, words)
            size = 2 if words.dtype == torch.bfloat16 else 4
            assert len(here) == len(np.unique(here)) == words.nbytes // size


EXTREMES = [("int4", q, scale, zero) for q in (0x00, 0xFF, 0x0F) for scale in (0, 255) for zero in (0, 255)]
EXTREMES += [("int8", q, 0, zero) for q in (-128, 127) for zero in (-128, 127)]


@pytest.mark.first(8)
@pytest.mark.parametrize(("name", "q", "scale", "zero"), EXTREMES)
def test_products_are_right_for_extreme_codes(name, q, scale, zero):
    format = FORMATS[name]
    weight = int4_weight(8, 256) if name == "int4" else int8_weight(8, 256, 32)
    weight[0].fill_(q)
    weight[3 if name == "int4" else 2].fill_(zero)
    if name == "int4":
        weight[1].fill_(scale)
    format.assert_right(activations(9, 256), weight)
    assert name != "int4" or scale or not format.product(activations(9, 256), weight).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("code", "scale"), [(0, 0), (1, 1), (0, 1)])
def test_products_are_right_for_extreme_k_quants(kind, code, scale):
    most, *ends = {"Q4_K": (15, 0, 63), "Q5_K": (31, 0, 63), "Q6_K": (63, -128, 127)}[kind]
    codes, d = np.full((8, 256), code * most, np.uint8), np.full(8, 0.01)
    scales = np.full((8, 16 if kind == "Q6_K" else 8), ends[scale])
    if kind == "Q6_K":
        weight = k_quant_weight(kind, 8, 256, q6_k(codes, scales.astype(np.int8), d))
    else:
        minima, blocks = np.arange(64, dtype=np.uint8).reshape(8, 8), {"Q4_K": q4_k, "Q5_K": q5_k}[kind]
        weight = k_quant_weight(kind, 8, 256, blocks(codes, scales.astype(np.uint8), minima, d, d))
        if not scale:  # nothing but minima, which a zero point cannot say
            assert weight[1].any() and not (weight[1] > 0).any()
    FORMATS[kind].assert_right(activations(9, 256), weight)


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 2, 0), (0, 2, 1)])
def test_sums_do_not_depend_on_which_program_arrives_last(order, monkeypatch):
    x, weight = torch.zeros(3, 1280).bfloat16(), torch.ones(70, 1280).bfloat16()
    for k, value in ((0, 2**26), (500, 1), (1000, -(2**26))):  # of three programs: 0 in the order of K, else 1
        x[:, k] = value
    numbered, asked = InterpreterBuilder.create_get_program_id, []

    def renumbered(self, axis):
        handle = numbered(self, axis)
        if axis == 2:
            asked.append(order[int(handle.data[0])])
            handle.data = np.array([asked[-1]], dtype=np.int32)
        return handle

    monkeypatch.setattr(InterpreterBuilder, "create_get_program_id", renumbered)
    assert not FORMATS["bf16"].product(x, weight, 3).any()
    assert tuple(dict.fromkeys(asked)) == order


def test_an_early_launch_of_the_bfloat16_kernel_loads_nothing_before_its_wait():
    x, weight = activations(3, 512), torch.randn(130, 512).bfloat16()
    with loaded_before_waits() as loaded, asked_of_l2() as asked, interpreted(sums, bf16):
        given = x, weight, sums.counters(), "", replace(bf16.BF16, parts=2)
        found = bf16._launch_bf16(bf16._bf16_small_m_kernel, *given, following=weight, early=True)
    assert asked and not loaded
    assert torch.equal(found, FORMATS["bf16"].product(x, weight, 2))


# --- Layouts


def coalesced(weight: tuple[Tensor, ...]) -> CudaCoalescedInt4Tensor:
    n, k = weight[0].shape[0], 2 * weight[0].shape[1]
    return CudaCoalescedInt4Tensor(*weight, [1, k // weight[1].shape[1]], torch.Size((n, k)))


@pytest.mark.parametrize(("n", "k", "group"), [(24, 512, 32), (130, 768, 128), (300, 256, 256)])
def test_the_int4_layout_holds_the_values_of_executorchs_own_weight(n, k, group):
    weight = int4_weight(n, k, group)
    tensor, tiled = coalesced(weight), laid_out(coalesced(weight))
    assert tiled.qdata is weight[0]
    for name in ("scale", "scale_step", "zero_point", "zero_point_step", "block_size", "shape"):
        found, expected = getattr(tiled.coalesced()[0], name), getattr(tensor, name)
        assert torch.equal(found, expected) if isinstance(found, Tensor) else found == expected
    x = activations(9, k)
    assert torch.equal(tiled.dequantize(), tensor.dequantize()) and torch.equal(F.linear(x, tiled), F.linear(x, tensor))
    found = int4.int4_reference(torch.eye(k), *parts(weight)).T
    torch.testing.assert_close(found, tensor.dequantize(torch.float32))


def test_several_int4_weights_with_one_input_are_joined(tmp_path):
    weights = [int4_weight(n, 512) for n in (128, 40, 100)]
    both = concatenated([laid_out(coalesced(weight)) for weight in weights], tmp_path)
    assert torch.equal(both.dequantize(), torch.cat([coalesced(weight).dequantize() for weight in weights]))
    assert [each.data_ptr() for each in both.parts[0]] == [weight[0].data_ptr() for weight in weights]
    for m in (5, 9):  # ExecuTorch's own op for up to 4 rows is CUDA's alone
        x = activations(m, 512)
        with interpreted(sums, small_m, int4):
            choice = replace(int4.INT4, parts=2)
            given = x, *both.parts, sums.counters()
            found = int4._launch_int4(int4.int4_small_m_kernel, *given, choice=choice)
        assert torch.equal(found, torch.cat([FORMATS["int4"].product(x, weight, 2) for weight in weights], 1))
        assert torch.equal(F.linear(x, both), torch.cat([F.linear(x, coalesced(weight)) for weight in weights], 1))
    with pytest.raises(ValueError, match="4 weights: one launch takes 3"):
        concatenated([both, laid_out(coalesced(weights[0]))], tmp_path)


def test_the_int8_layout_holds_the_values_of_torchaos_own_weight():
    tensor = IntxUnpackedToInt8Tensor.from_hp(torch.randn(24, 512).bfloat16(), (1, 32), torch.int8)
    found = small_m.int8_reference(torch.eye(512), tensor.qdata, tensor.scale, tensor.zero_point).T
    torch.testing.assert_close(found.bfloat16(), tensor.dequantize(), atol=1e-2, rtol=2**-8)


@pytest.mark.parametrize("kind", KINDS)
def test_the_k_quant_layout_for_cuda_keeps_every_value_bit_for_bit(kind):
    for n in (37, 256):
        packed, w = k_quant_weight(kind, n, 1024)
        assert torch.equal(packed.dequantize(torch.float32), w)
        assert torch.equal(k_quants.k_quant_reference(torch.eye(1024), *packed.parts).T, w)
        ids = torch.tensor([[3, n - 1], [0, 3]])
        assert torch.equal(F.embedding(ids, packed), w[ids].bfloat16())
    stored = sum(part.nbytes for part in packed.parts if part is not None)
    assert stored * 8 / w.numel() == {"Q4_K": 4.625, "Q5_K": 5.625, "Q6_K": 6.5625}[kind]


@pytest.mark.parametrize("bits", KINDS.values())
def test_k_quant_codes_are_where_the_kernel_reads_them(bits):
    for code in range(1 << bits):
        row, at = code % 7, code % 32
        q = torch.zeros(7, 32, dtype=torch.uint8)
        q[row, at] = code
        qdata, high = k_quants.packed(q, bits)
        per_row = None if high is None else high.repeat_interleave(k_quants.OF_WORD[bits], 0)[:7]
        assert torch.equal(k_quants.unpacked(qdata, per_row, torch.arange(7), bits), q)
        c, w, i, h = at // 16, at % 16 // 4, at % 4 // 2, at % 2
        assert qdata.view(torch.int32)[row, w].item() & 0xFFFFFFFF == (code & 15) << (4 * c + 8 * i + 16 * h)
        if high is not None:
            outputs = k_quants.OF_WORD[bits]
            place = (row % outputs) * (bits - 4) + (8 * (i + 2 * h + 1) % 32 if c else 4 + 8 * i + 16 * h)
            assert high.view(torch.int32)[row // outputs, w].item() & 0xFFFFFFFF == code >> 4 << place


# --- Division among programs


def test_tiles_are_whole_as_far_as_they_run_at_a_time_and_the_rest_is_split_along_k():
    assert sums.division(2048, 21, 128).parts > 1
    assert sums.division(5376, 84, 128) == (0, 6) and sums.division(262144, 21, 128) == (0, 1)
    for count, whole_tiles, expected in ((132, True, 264), (108, True, 216), (132, False, 0)):
        with sums.made_for(count, whole_tiles):
            assert sums.division(2 * 21504, 21, 128) == (expected, 3)
    assert sums.division(2 * 21504, 21, 128).programs(336) == (264 + 3 * 72, 1)  # 216 programs share 72 tiles


class Fewer(Kept):
    """A kernel as one of several GPUs has it: with fewer parts than there is memory for."""

    def __getitem__(self, programs: Any) -> Callable:
        return lambda *args, **options: self.kernel[(*programs[:2], 2)](*args, **options | {"SPLITS": 2})


@pytest.mark.parametrize("name", ["int4", "bf16"])
def test_a_gpu_may_have_fewer_parts_of_k_than_there_is_memory_for(name):
    format, x = FORMATS[name], activations(5, 2048)
    weight = format.made(256, 2048)
    with interpreted(sums, small_m, int4, bf16):
        found = format.launch(Fewer(format.kernel()), x, weight, sums.counters(), 3)
    assert torch.equal(found, format.product(x, weight, 2))


@pytest.mark.parametrize(("outputs", "whole"), [([40960], 264), ([20480] * 2, 264), ([40000], 0), ([13696] * 3, 0)])
def test_weights_whose_programs_need_more_registers_have_no_whole_tiles(outputs, whole):
    """Only one program with three weights, or with a partial tile, fits on a multiprocessor."""
    qdata = [torch.empty(each, 512, dtype=torch.uint8, device="meta") for each in outputs]
    codes = torch.empty(sum(-(-each // 128) for each in outputs), device="meta")
    divided, _ = int4.small_m_run(None, torch.empty(4, 1024, device="meta"), qdata, codes, None, None, 32)
    assert divided.whole == whole


def test_a_call_launches_a_single_size_of_row_tiles():
    for sizes in ((8, 16), (16, 32), (8, 16, 32)):
        for m in range(1, 100):
            tiles = {size: count for size, count in sums.row_tiles(m, sizes) if count}
            size = next((size for size in sizes if m <= size), sizes[-1])
            assert tiles == {size: -(-m // size)}


def test_row_tile_sizes_that_no_call_uses_are_left_out_of_a_trace():
    class Sizes(torch.nn.Module):
        def forward(self, x):
            self.found = [size for size, _ in sums.row_tiles(x.shape[0], (8, 16))]
            return x + 1

    for least, most, expected in ((2, 8, [8]), (2, 9, [8, 16]), (9, 40, [16]), (1, 40, [8, 16])):
        model = Sizes()
        export(model, (torch.zeros(most - 1, 2),), dynamic_shapes=({0: Dim("rows", min=least, max=most)},))
        assert model.found == expected


def test_mismatched_arguments_are_refused_by_name():
    x, arrived = activations(3, 256), sums.counters()
    four, eight, five = int4_weight(8, 256), int8_weight(8, 256, 32), k_quant_weight("Q5_K", 8, 256)
    (qdata,), codes, steps = parts(four)
    q5, high, q5_codes, q5_steps = five[0].parts
    weight = torch.randn(8, 256).bfloat16()
    run = {name: FORMATS[name].product for name in ("int4", "int8", "bf16", "Q5_K")}
    for says, refused in {
        "x has K = 128, qdata 256": lambda: int4.int4_small_m(x[:, :128], [qdata], codes, steps, arrived),
        "codes are (1, 1, 7, 128, 2)": lambda: int4.int4_small_m(x, [qdata], codes[:, :, :7], steps, arrived),
        "steps are (1, 1, 127, 2)": lambda: int4.int4_small_m(x, [qdata], codes, steps[:, :, :127], arrived),
        "scale is (8, 3)": lambda: small_m.int8_small_m(x, eight[0], eight[1][:, :3], eight[2][:, :3], arrived),
        "torch.float32: the kernel takes torch.bfloat16": lambda: run["int4"](x.float(), four),
        "group size is 8: the kernel takes multiples of 16": lambda: run["int8"](x, int8_weight(8, 256, 8)),
        "strides (1, 8): not contiguous": lambda: run["int8"](x, (eight[0], eight[1].T.contiguous().T, eight[2])),
        "x has K = 56, the weight 256": lambda: bf16.bf16_small_m(x[:, :56], weight, arrived),
        "the weight of (8, 256) has strides (1, 8)": lambda: run["bf16"](x, weight.T.contiguous().T),
        "torch.float32: the kernel": lambda: run["bf16"](x.float(), weight),
        "x has K = 128, qdata": lambda: k_quants.k_quant_small_m(x[:, :128], *five[0].parts, arrived),
        "(1, 1, 7, 128, 2)": lambda: k_quants.k_quant_small_m(x, q5, high, q5_codes[:, :, :7], q5_steps, arrived),
        "a weight of 6 bits": lambda: k_quants.k_quant_small_m(x, q5, high, q5_codes, q5_steps[..., :1], arrived),
        "40000 rows of 5376 outputs: the kernel takes 24960 rows": lambda: sums.launch(
            torch.empty(40000, 8).bfloat16(), 5376, 64, 84, sums.Division(0, 2), (16, 32), arrived, lambda *_: None
        ),
    }.items():
        with pytest.raises(ValueError) as raised:
            refused()
        assert says in str(raised.value)
