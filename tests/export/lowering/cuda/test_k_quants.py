"""The small-M kernel for GGUF's K-quants equals gguf-py in Triton's interpreter, and its compiled code is checked."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf_files import q4_k, q5_k, q6_k
from k_quant_weights import KINDS, activations, weight
from kernel_usage import SHARED, assert_two_programs_fit, usage
from torch import Tensor
from torch.nn import functional as F
from triton.runtime.interpreter import InterpreterBuilder
from triton_interpreter import interpreted

from eagle3.export.lowering.cuda.kernels import k_quants, small_m, sums
from eagle3.export.lowering.cuda.weights.k_quants import KQuantTensor

GEMMA_LINEARS = {"sliding_kv": (195, 256), "full_o": (256, 768), "down": (256, 1024), "lm_head": (256, 256)}
"""N x K of some linears of Gemma 4 31B over 21, K in whole blocks of 256 (lm_head: N over 1024)."""


def product(x: Tensor, packed: KQuantTensor, parts: int | None = None, wrap=lambda kernel: kernel) -> Tensor:
    with interpreted(sums, small_m, k_quants):
        kernel = wrap(k_quants._k_quant_small_m_kernel)
        choice = replace(k_quants.CHOICES[k_quants.code_bits(*packed.parts)], parts=parts)
        return k_quants._launch_k_quant(kernel, x, *packed.parts, sums.counters(), choice=choice)


def assert_right(found: Tensor, x: Tensor, w: Tensor) -> None:
    """Assert that the product is right up to rounding to bf16 and the errors of float32, which are proportional to |x|
    and the largest code and minima."""
    expected = x.float() @ w.T
    dtype, atol, rtol = torch.bfloat16, 2e-5, 2**-8
    assert found.dtype == dtype and found.shape == expected.shape
    room = atol * x.float().abs().sum(1)[:, None] * w.abs().amax(1) + rtol * expected.abs()
    worst = ((found.float() - expected).abs() / room.clamp_min(1e-30)).max()
    assert worst <= 1, f"{worst:.3g} times what rounding explains"


@pytest.mark.parametrize("kind", KINDS)
def test_the_k_quant_layout_for_cuda_keeps_every_value_bit_for_bit(kind):
    for n in (37, 256):
        packed, w = weight(kind, n, 1024)
        assert torch.equal(packed.dequantize(torch.float32), w)
        assert torch.equal(k_quants.k_quant_reference(torch.eye(1024), *packed.parts).T, w)
        ids = torch.tensor([[3, n - 1], [0, 3]])
        assert torch.equal(F.embedding(ids, packed), w[ids].bfloat16())
    stored = sum(part.nbytes for part in packed.parts if part is not None)
    assert stored * 8 / w.numel() == {"Q4_K": 4.625, "Q5_K": 5.625, "Q6_K": 6.5625}[kind]


@pytest.mark.parametrize("bits", [4, 5, 6])
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 9, 13, 16, 17, 40])
def test_the_small_m_k_quant_kernel_is_right_for_every_number_of_rows(kind, m):
    x, (packed, w) = activations(m, 512), weight(kind, 33, 512)
    assert_right(product(x, packed), x, w)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 7, 63, 64, 65, 129])
def test_the_small_m_k_quant_kernel_is_right_for_any_number_of_outputs(kind, n):
    x, (packed, w) = activations(3, 256), weight(kind, n, 256)
    assert_right(product(x, packed), x, w)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", GEMMA_LINEARS.values(), ids=GEMMA_LINEARS)
def test_the_small_m_k_quant_kernel_is_right_for_gemma_linears(kind, shape):
    x, (packed, w) = activations(5, shape[1]), weight(kind, *shape)
    assert_right(product(x, packed), x, w)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_the_small_m_k_quant_kernel_is_right_for_any_split_of_k(kind, parts):
    x, (packed, w) = activations(3, 1280), weight(kind, 20, 1280)
    assert_right(product(x, packed, parts), x, w)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", ["least", "most"])
@pytest.mark.parametrize("scale", ["least", "most"])
def test_the_small_m_k_quant_kernel_is_right_for_extreme_codes(kind, code, scale):
    ends = {"Q4_K": (15, 0, 63), "Q5_K": (31, 0, 63), "Q6_K": (63, -128, 127)}[kind]
    codes = np.full((8, 256), 0 if code == "least" else ends[0], np.uint8)
    scales = np.full((8, 16 if kind == "Q6_K" else 8), ends[1] if scale == "least" else ends[2])
    d = np.full(8, 0.01)
    if kind == "Q6_K":
        packed, w = weight(kind, 8, 256, q6_k(codes, scales.astype(np.int8), d))
    else:
        minima = np.arange(64, dtype=np.uint8).reshape(8, 8)
        packed, w = weight(
            kind, 8, 256, {"Q4_K": q4_k, "Q5_K": q5_k}[kind](codes, scales.astype(np.uint8), minima, d, d)
        )
        if scale == "least":  # nothing but minima, which a zero point cannot say
            assert w.any() and not (w > 0).any()
    x = activations(9, 256)
    assert_right(product(x, packed), x, w)


def sums_of(x: Tensor, packed: KQuantTensor) -> tuple[Tensor, Tensor]:
    """Return the output [M, N] and the float32 sums [2, M, N] over the halves of K, from which the output is added and
    rounded."""
    written = []

    class Kept:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, programs):
            def run(*args, **options) -> None:
                written.append(args[-3])  # before OUT and M
                self.kernel[programs](*args, **options)

            return run

    return product(x, packed, 2, Kept), written[0]


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_the_k_quant_kernel_has_the_same_bits_in_every_call(kind):
    # Eighths up to 4: sums within a group are exact, so that numpy's order of them says nothing; all others round.
    packed, _ = weight(kind, 20, 1024)
    x = torch.randint(-32, 33, (18, 1024)).bfloat16() / 8
    alone = [torch.cat(rows, dim=-2) for rows in zip(*(sums_of(row[None], packed) for row in x), strict=True)]
    for m in (2, 4, 7, 8, 9, 11, 16, 17, 18):
        for found, expected in zip(sums_of(x[:m], packed), alone, strict=True):
            assert torch.equal(found, expected[..., :m, :]), f"{m} rows"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.races(("forward",))  # loads are counted
def test_each_k_quant_word_is_read_once_for_up_to_16_rows(kind, monkeypatch):
    read = []
    load = InterpreterBuilder.create_masked_load

    def counted(self, ptrs, mask, other, *options):
        read.append(ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)].ravel())
        return load(self, ptrs, mask, other, *options)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted)
    packed, _ = weight(kind, 128, 1024)
    for m in (1, 8, 9, 16):
        read.clear()
        product(activations(m, 1024), packed)
        addresses = np.concatenate(read)
        for part in (packed.qdata, packed.high):
            if part is not None:
                here = addresses[(addresses >= part.data_ptr()) & (addresses < part.data_ptr() + part.nbytes)]
                assert len(here) == len(np.unique(here)) == part.nbytes // 4


class Linears(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for kind in KINDS:
            parts = enumerate(weight(kind, 48, 512)[0].parts)
            named = {str(number): torch.nn.Parameter(part, False) for number, part in parts if part is not None}
            self.add_module(kind, torch.nn.ParameterDict(named))
        self.register_buffer("arrived", sums.counters())

    def forward(self, x: Tensor) -> Tensor:
        parts = ([each.get(str(i)) for i in range(4)] for each in self.children())
        return sum(k_quants.k_quant_small_m(x, *each, self.arrived) for each in parts)


def test_an_exported_small_m_k_quant_product_stays_one_op_with_dynamic_rows():
    model = Linears()
    rows = torch.export.Dim("rows", min=1, max=64)
    program = torch.export.export(model, (activations(4, 512),), dynamic_shapes=({0: rows},), strict=False)
    for each in (program, program.run_decompositions({})):
        targets = [str(node.target) for node in each.graph.nodes if node.op == "call_function"]
        assert targets.count("eagle3.k_quant_small_m.default") == 3
        for m in (1, 2, 16, 33):
            x = activations(m, 512)
            assert torch.equal(each.module()(x), model(x))


def test_mismatched_shapes_of_the_k_quant_kernel_are_refused_by_name():
    x, (packed, _), arrived = activations(3, 256), weight("Q5_K", 8, 256), sums.counters()
    qdata, high, codes, steps = packed.parts
    with pytest.raises(ValueError, match="x has K = 128, qdata 256"):
        k_quants.k_quant_small_m(x[:, :128], *packed.parts, arrived)
    with pytest.raises(ValueError, match=r"'codes': \(1, 1, 7, 128, 2\).*a weight of 5 bits has .*\(1, 1, 8, 128, 2\)"):
        k_quants.k_quant_small_m(x, qdata, high, codes[:, :, :7], steps, arrived)
    with pytest.raises(ValueError, match=r"a weight of 6 bits has .*'high': \(4, 128\)"):
        k_quants.k_quant_small_m(x, qdata, high, codes, steps[..., :1], arrived)
    with pytest.raises(ValueError, match="torch.float32: the kernel takes torch.bfloat16"):
        product(x.float(), packed)
    with pytest.raises(ValueError, match=r"strides \(1, 8\): not contiguous"):
        packed.qdata = qdata.T.contiguous().T
        product(x, packed)


SIGNATURE = ["*bf16", "*u8", "*u8", "*u8", "*fp16", "*i32", "*fp32", "*bf16", "i32"]
INSTRUCTIONS = {"Q4_K": (2.7, 3.5), "Q5_K": (3.7, 4.6), "Q6_K": (3.6, 4.5)}
"""A weight, for up to 8 rows and for up to 16."""


COMPILED = [("Q4_K", 80), ("Q4_K", 90), ("Q5_K", 80), ("Q5_K", 90)]
COMPILED += [("Q6_K", arch) for arch in (80, 90, 100, 120)]


@pytest.mark.first(1)
@pytest.mark.parametrize(("kind", "arch"), COMPILED)
def test_two_programs_of_the_small_m_k_quant_kernel_fit_and_do_not_spill(kind, arch, tmp_path):
    bits = KINDS[kind]
    choice, kernel = k_quants.CHOICES[bits], k_quants._k_quant_small_m_kernel
    constants = {
        "N": 5376,
        "K": 21504,
        "BITS": bits,
        "WHOLE": 0,
        "SPLITS": 6,
        "BLOCK_N": choice.n,
        "STAGES": choice.stages,
    }
    constants |= {"BLOCK_K": 256, "BLOCK_M": 8}
    types = [*SIGNATURE]
    types[3] = "*i8" if bits == 6 else "*u8"
    usages = [assert_two_programs_fit(kernel, types, constants, arch, tmp_path)]
    if arch in (80, 90):
        usages.append(usage(kernel, types, constants | {"BLOCK_M": 16}, arch, tmp_path, small_m.WARPS))
    for found, most in zip(usages, INSTRUCTIONS[kind], strict=False):
        assert found.shared <= SHARED and found.stack == 0
        assert found.a_weight(choice.n * 256, small_m.WARPS) <= most
        assert found.loop.count("BAR") == 2
        assert found.loop.count("LDG") == 2  # codes and steps; the rest is copied ahead
