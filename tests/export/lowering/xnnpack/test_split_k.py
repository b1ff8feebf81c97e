"""4-bit products are computed as sums over ranges of their inputs: with the same weights, independent rows, and ranges
that fit into the cache."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from xnnpack_lowered import lowered

from eagle3.export.lowering.xnnpack import lowering, split_k
from eagle3.export.lowering.xnnpack.quantization import Recipe, quantize
from eagle3.export.lowering.xnnpack.split_k import CACHED, KERNEL_ROWS, SplitLinear, split_wide_linears
from eagle3.export.speculator import tensor_files
from eagle3.runner.system.cpu_features import first_level_cache

WIDTH, OUTPUTS = 2592, 48  # 81 groups of 32


class Tied(nn.Module):
    """An embedding and two linears that share one weight, one with a bias. Maps ids [1, T] to [1, T, 48]."""

    def __init__(self, recipe: Recipe):
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(50, WIDTH)
        self.linear, self.again = nn.Linear(WIDTH, OUTPUTS), nn.Linear(WIDTH, OUTPUTS, bias=False)
        self.eval().requires_grad_(False)
        quantize(self, recipe, spare={id(self.again.weight)})
        self.again.weight = self.linear.weight

    def forward(self, ids):
        x = self.embedding(ids)
        return self.linear(x) + 2 * self.again(x)


@pytest.mark.parametrize(("rows", "group"), [(2, 32), (4, 96), (7, 32), (30, 864), (30, 2592)])
def test_ranges_of_k_are_whole_groups_that_fit_into_the_cache(rows, group):
    model = Tied(Recipe("8da4w", "none", group))
    weight = model.linear.weight
    split_wide_linears(model, rows)
    if not isinstance(model.linear, SplitLinear):
        assert group == WIDTH or rows * WIDTH <= CACHED
        return
    widths = [part.in_features for part in model.linear.parts]
    assert sum(widths) == WIDTH and not any(width % group for width in widths)
    assert max(widths) <= max(group, CACHED // min(rows, KERNEL_ROWS))
    assert max(widths) - min(widths) <= group
    parts = [part.weight.dequantize() for part in model.linear.parts]
    assert torch.equal(torch.cat(parts, 1), weight.dequantize())


def test_a_shared_weight_is_split_once_and_a_bias_is_added_once():
    model = Tied(Recipe("8da4w", "none", 32))
    x = torch.randn(3, WIDTH)
    before = model.linear(x), model.again(x)
    split_wide_linears(model, 4)
    assert all(one.weight is other.weight for one, other in zip(model.linear.parts, model.again.parts, strict=True))
    for out, was in zip((model.linear(x), model.again(x)), before, strict=True):
        assert (out - was).std() < 0.02 * was.std()  # the inputs of each range are quantized separately


@pytest.mark.parametrize("in_a_file", [False, True])
def test_the_ranges_of_a_file_backed_weight_are_file_backed(in_a_file, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "LARGE", 4096)
    linear = nn.Linear(WIDTH, OUTPUTS, bias=False).requires_grad_(False)
    quantize(model := nn.Sequential(linear), Recipe("8da4w", "none", 32), spare=set())
    weight = linear.weight
    if in_a_file:
        weight.qdata = tensor_files.empty(weight.qdata.shape, weight.qdata.dtype, tmp_path).copy_(weight.qdata)
    split_wide_linears(model, 4)
    parts = [part.weight.qdata for part in model[0].parts]
    assert [bool(part.untyped_storage().filename) for part in parts] == [in_a_file] * len(parts)
    assert torch.equal(torch.cat(parts, 1), weight.qdata) and all(part.is_contiguous() for part in parts)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("recipe", [Recipe("8da8w", "none", 0), Recipe("none", "none", 0)])
def test_weights_other_than_4_bit_are_not_split(recipe):
    model = Tied(recipe)
    split_wide_linears(model, 8)
    assert type(model.linear) is nn.Linear


def test_split_products_are_closer_to_float32_than_whole_rows():
    """An outlier affects only the quantization steps of its own range."""
    model = Tied(Recipe("8da4w", "none", 32))
    x = torch.randn(64, WIDTH)
    x[:, 7] = 100
    exact = nn.functional.linear(x, model.again.weight.dequantize())
    whole = (model.again(x) - exact).std()
    split_wide_linears(model, 4)
    assert (model.again(x) - exact).std() < 0.8 * whole


def test_a_lowered_split_product_is_one_delegate_with_independent_rows():
    model, ids = Tied(Recipe("8da4w", "none", 32)), torch.randint(50, (1, 12))
    split_wide_linears(model, 4)
    left, program = lowered(model, ids)
    assert not any(name in target for target in left for name in ("linear", "quantize", "slice", "add"))
    method = program.load_method("forward")
    runs = [
        torch.cat([method.execute((part.contiguous(),))[0].clone() for part in ids.split(rows, 1)], 1)
        for rows in (1, 4, 12)
    ]
    assert all(torch.equal(one, other) for one, other in pairwise(runs))
    assert (runs[0] - model(ids)).abs().max() < 0.02 * runs[0].std()


@pytest.mark.parametrize(
    ("avx512", "cache", "pays"),
    [(True, 48 << 10, True), (True, 32 << 10, False), (True, 0, True), (False, 48 << 10, False)],
)
def test_a_processor_with_avx512_and_a_first_level_cache_of_48_kib_splits(avx512, cache, pays, monkeypatch):
    monkeypatch.setattr(split_k, "lacks_avx512", lambda: not avx512)
    monkeypatch.setattr(split_k, "first_level_cache", lambda: cache)
    assert split_k.splits() == pays


def test_the_size_of_the_first_level_cache_is_read_from_linux():
    said = Path("/sys/devices/system/cpu/cpu0/cache/index0/size")
    if said.is_file() and first_level_cache():
        assert first_level_cache() == 1024 * int(said.read_text().strip().removesuffix("K"))


@pytest.mark.parametrize("pays", [True, False])
def test_an_export_splits_k_if_the_processor_gains_by_it(pays, monkeypatch):
    monkeypatch.setattr(lowering, "splits", lambda: pays)
    model = Tied(Recipe("8da4w", "none", 32))
    with lowering.tracing(model, 4):
        assert isinstance(model.linear, SplitLinear) == pays
