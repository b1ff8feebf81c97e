"""The search for scales gives torchao's own codes and scales, bit for bit."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torchao.quantization.quant_primitives import _choose_qparams_and_quantize_scale_only_hqq as theirs

from eagle3.export.lowering.xnnpack import hqq, quantization
from eagle3.export.lowering.xnnpack.quantization import ELEMENTS, Recipe

BOUNDS = {4: (-8, 7), 8: (-128, 127)}


def assert_same(weight, group, bits):
    wanted, found = (search(weight, [1, group], *BOUNDS[bits]) for search in (theirs, hqq.search_scales))
    assert found[0].dtype == torch.int8 and found[0].shape == weight.shape
    assert torch.equal(found[0], wanted[0].to(torch.int8))
    assert found[1].dtype == wanted[1].dtype == weight.dtype
    assert torch.equal(found[1].view(torch.uint8), wanted[1].view(torch.uint8))


@pytest.mark.parametrize(
    "rows, width, group, dtype, bits",
    [
        (1, 32, 32, torch.float32, 4), (3, 96, 32, torch.float16, 8), (97, 2560, 32, torch.bfloat16, 4),
        (13, 2560, 2560, torch.float32, 8), (102, 2560, 64, torch.float16, 4), (26, 9728, 9728, torch.bfloat16, 8),
        (7, 65536, 65536, torch.float32, 8),
    ],
)  # fmt: skip
def test_hqq_codes_and_scales_equal_torchaos(rows, width, group, dtype, bits):
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, width, generator=generator) * 0.02
    weight[: rows // 2] *= torch.rand(rows // 2, 1, generator=generator) ** 8
    assert_same(weight.to(dtype), group, bits)


@pytest.mark.parametrize("bits", BOUNDS)
def test_hqq_of_degenerate_groups_equals_torchaos(bits):
    """The groups are zeros, a single outlier, two values, subnormal and huge values, and NaN, among ordinary groups."""
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    weight[0], weight[1, 1:], weight[2] = 0, 0, 1e-42
    weight[3], weight[4, 64:], weight[5] = 3.0, -3.0, torch.tensor([1.0, -1.0]).repeat(64)
    weight[6, 5], weight[7] = 1e6, weight[7] * 1e37
    assert_same(weight, 32, bits)
    assert_same(weight[:1], 128, bits)
    weight[8, 3], weight[9, 70] = float("inf"), float("nan")
    found = hqq.search_scales(weight, [1, 32], *BOUNDS[bits])[1]
    wanted = theirs(weight, [1, 32], *BOUNDS[bits])[1]
    assert torch.equal(found.nan_to_num(-1), wanted.nan_to_num(-1)) and found.isnan().any()


@pytest.mark.parametrize("recipe, group", [("8da4w", 32), ("8da8w", 0)])
def test_hqq_of_a_weight_in_several_chunks_equals_torchaos(monkeypatch, recipe, group):
    linear = nn.Linear(2560, 2 * ELEMENTS // 2560 + 5, bias=False)
    asked, threads, search = [], torch.get_num_threads(), hqq.search_scales
    monkeypatch.setattr(hqq, "search_scales", lambda *given: asked.append(torch.get_num_threads()) or search(*given))
    found = quantization.quantized(Recipe(recipe, "none", group), linear, linear.weight.data)
    with ThreadPoolExecutor(1) as pool:
        assert asked == [1, 1, 1] and pool.submit(torch.get_num_threads).result() == threads
    monkeypatch.setattr(hqq, "search_scales", theirs)
    wanted = quantization.quantized(Recipe(recipe, "none", group), linear, linear.weight.data)
    assert torch.equal(found.qdata, wanted.qdata) and torch.equal(found.scale, wanted.scale)
