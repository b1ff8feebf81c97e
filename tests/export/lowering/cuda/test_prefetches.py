"""Matmuls over records ask L2 for the weights of the next one, without another bit in any result."""

import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import triton.language as tl
from commands import fail_command
from cuda_lowered import lowered
from records_models import Mlp, linear, tiles, traced
from small_m_weights import activations, int4_weight
from torch import Tensor, nn
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor.codecache import CudaKernelParamCache
from triton_interpreter import asked_of_l2, interpreted

from eagle3.export.cli import main as export_main
from eagle3.export.lowering.cuda.graph.dispatch import small_m_dispatch
from eagle3.export.lowering.cuda.graph.gates import gate_in_products
from eagle3.export.lowering.cuda.graph.prefetches import PART, prefetch_weights
from eagle3.export.lowering.cuda.graph.shortcuts import ANALYSIS, counters_unchanged, prefetches_unseen
from eagle3.export.lowering.cuda.inductor.early_launches import early_launches
from eagle3.export.lowering.cuda.kernels import int4_records, small_m, sums
from eagle3.export.lowering.cuda.kernels.int4_records import BEFORE_THE_WAIT, NEXT_BYTES, of_next, shares
from eagle3.export.lowering.cuda.kernels.record_layout import RECORD, records
from eagle3.export.lowering.cuda.weights.int4_records_tensor import pack_records

WAITS, ASKS, WRITES = "griddepcontrol.wait;", "cp.async.bulk.prefetch.L2", ("st.global", "atom.")
PRODUCT = torch.ops.eagle3.int4_records_small_m.default


class Layers(nn.Module):
    """Two MLPs, and a linear whose weight the first of them also has."""

    def __init__(self, folder: Path):
        super().__init__()
        self.mlps = nn.ModuleList([Mlp(folder), Mlp(folder)])
        self.tied = linear(tiles(64, 256))
        self.tied.weight = self.mlps[0].down.weight
        pack_records(self, folder)

    def forward(self, x: Tensor) -> Tensor:
        for mlp in self.mlps:
            x = x + mlp(x).repeat(1, 1, 2)
        return self.tied(x)


def products(program) -> list[torch.fx.Node]:
    return list(program.graph.find_nodes(op="call_function", target=PRODUCT))


def home_of(node: torch.fx.Node) -> str:
    """Return the parameter that a node is a part of."""
    while node.target is PART:
        node = node.args[0]
    assert node.op == "placeholder"
    return node.name


@pytest.mark.parametrize("early", [False, True])
def test_each_matmul_asks_for_the_weight_of_the_next_one(early, tmp_path):
    model = Layers(tmp_path)
    with small_m_dispatch(8):
        program = traced(model, 1, 8)
    x = torch.randn(1, 5, 256).bfloat16()
    expected = program.module()(x)
    gate_in_products(program)
    for node in program.graph.find_nodes(op="call_function", target=PART):
        min(node.users).prepend(node)  # as late as can be
    assert prefetch_weights(program, early) == 4
    program.graph.lint()  # each node is behind those that it takes
    found = products(program)
    own = [home_of(node.args[1]) for node in found]
    assert len(own) == 5 and len(set(own)) == 4 and own[1] == own[4]
    assert [home_of(node.kwargs["following"]) for node in found[:-1]] == own[1:]
    assert "following" not in found[-1].kwargs
    assert [node.kwargs.get("early", False) for node in found] == [early] * 5
    assert torch.equal(program.module()(x), expected)


def test_a_method_of_many_rows_asks_for_nothing(tmp_path):
    with small_m_dispatch(8):
        program = traced(Layers(tmp_path), 9, 64)
    assert prefetch_weights(program, True) == 0
    assert not any(node.kwargs.get("following") or node.kwargs.get("early") for node in program.graph.nodes)


class Written(nn.Module):
    """Four products: with a parameter, a buffer that the call writes, a computed weight and a parameter."""

    def __init__(self):
        super().__init__()
        for name in ("first", "last"):
            self.register_parameter(name, nn.Parameter(records(*int4_weight(256, 256)), requires_grad=False))
        self.register_buffer("written", records(*int4_weight(256, 256)))
        self.register_buffer("arrived", sums.counters())

    def forward(self, x: Tensor) -> Tensor:
        for weight in (self.first, self.written, self.first + 1, self.last):
            x = int4_records.int4_records_small_m(x, weight, self.arrived, 8)
        self.written.copy_(self.first)
        return x


def test_a_weight_that_may_be_written_is_neither_asked_for_nor_read_before_the_wait():
    program = torch.export.export(Written(), (activations(3, 256),), strict=False)
    assert prefetch_weights(program, True) == 1
    found = products(program)
    assert [node.kwargs.get("early", False) for node in found] == [True, False, False, True]
    assert [node.kwargs.get("following") is not None for node in found] == [False, False, True, False]


@pytest.mark.parametrize(
    ("following", "says"),
    [
        (torch.zeros(2, 1, RECORD, dtype=torch.int8), "the next weight is torch.int8 (2, 1, 4736): it must be records"),
        (torch.zeros(64, 128, dtype=torch.uint8), "the next weight is torch.uint8 (64, 128): it must be records"),
        (torch.zeros(2, 2, RECORD, dtype=torch.uint8)[:, ::2], "contiguous"),
    ],
)
def test_a_next_weight_that_is_no_records_is_refused(following, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        run(activations(2, 256), records(*int4_weight(64, 256)), following=following)


def test_programs_ask_for_the_next_weight_up_to_a_limit_and_not_beyond_its_end():
    for n, k in ((43008, 5376), (5376, 21504), (16384, 5376), (64, 256), (128, 768)):
        weight = torch.empty(n // 32, k // 256, RECORD, dtype=torch.uint8, device="meta")
        for programs in (1, 5, 264, 396):
            size = of_next(weight, programs)
            most = min(weight.nbytes, NEXT_BYTES)
            assert size % 16 == 0 and most - 16 * programs < size * programs <= most
    assert of_next(None, 5) == 0


def run(x: Tensor, packed: Tensor, activation: str = "", most_rows: int = 8, **asked) -> Tensor:
    waits = patch.multiple(tl.extra.cuda, gdc_wait=lambda: None, gdc_launch_dependents=lambda: None)
    with waits, interpreted(sums, small_m, int4_records), sums.made_for(1, False):
        return int4_records._launch_records(
            int4_records.int4_records_small_m_kernel, x, packed, sums.counters(), activation, most_rows, **asked
        )


@pytest.mark.first(2)
@pytest.mark.parametrize("most_rows", [8, 16])
@pytest.mark.parametrize(("m", "activation"), [(3, ""), (8, sums.SILU), (1, sums.GELU_TANH), (16, "")])
def test_prefetches_change_no_bit_and_each_byte_is_asked_for_once(m, activation, most_rows):
    x, packed, following = activations(m, 2048), records(*int4_weight(128, 2048)), records(*int4_weight(192, 512))
    with asked_of_l2() as asked:
        found = run(x, packed, activation, most_rows, following=following, **BEFORE_THE_WAIT)
    assert torch.equal(found, run(x, packed, activation, most_rows))
    own, next_ = packed.data_ptr(), following.data_ptr()
    of_own = [(a - own, b - own) for a, b in asked if own <= a < own + packed.nbytes]
    ranges = sorted((a - next_, b - next_) for a, b in asked if next_ <= a < next_ + following.nbytes)
    tiles = -(-m // most_rows)
    programs = shares(128, 2048, int4_records.TOGETHER[most_rows]).count
    assert len(asked) == len(of_own) + len(ranges) and len(ranges) == programs * tiles
    size = of_next(following, programs)
    assert ranges == sorted([(each * size, (each + 1) * size) for each in range(programs)] * tiles)
    assert ranges[-1][1] <= following.nbytes < ranges[-1][1] + 16 * programs
    assert len(of_own) == 2 * programs * tiles
    assert {b - a for a, b in of_own} == {BEFORE_THE_WAIT["FIRST"] * RECORD}


def test_only_the_kernel_with_prefetches_is_analyzed_without_them(monkeypatch):
    """Another kernel has a constant of the same name."""
    seen = []
    module, _, name = ANALYSIS.rpartition(".")
    monkeypatch.setattr(f"{module}.{name}", lambda _kernel, kwargs, _descriptors: seen.append(kwargs))
    given = {"AHEAD": 4, "FIRST": 3, "EARLY": True, "N": 64}
    with prefetches_unseen():
        for more in ({}, {"OF_NEXT": 128}):
            getattr(triton_kernel_wrap, name)(None, given | more, {})
    assert seen == [given, {"AHEAD": 0, "FIRST": 0, "EARLY": 0, "N": 64, "OF_NEXT": 0}]


class Two(nn.Module):
    """Two products over records, one after the other, the first of them gated."""

    def __init__(self, prefetched: bool):
        super().__init__()
        for name, n in (("first", 1024), ("second", 256)):
            self.register_parameter(name, nn.Parameter(records(*int4_weight(n, 512)), requires_grad=False))
        self.register_buffer("arrived", sums.counters())
        self.prefetched = prefetched

    def forward(self, x: Tensor) -> Tensor:
        product, asked = int4_records.int4_records_small_m, {}
        if self.prefetched:
            asked = {"following": self.second, "early": True}
        x = product(x * 2, self.first, self.arrived, 8, sums.SILU, **asked)
        return product(x, self.second, self.arrived, 8, **asked | {"following": None} if asked else {}) * 2


def compiled(prefetched: bool):
    """Return the calls of the two products, the record of all launches, and the PTX of the products before and after
    their wait."""
    with early_launches(), counters_unchanged(), prefetches_unseen(), sums.made_for(2, False):
        called, graph = lowered(Two(prefetched), (activations(3, 512),))
    assert len(called) == 4  # nothing is copied
    calls = [(name, arguments) for name, arguments in called if name.startswith("int4_records")]
    texts = (Path(CudaKernelParamCache.get(name)["asm"]).read_text() for name, _ in calls)
    return [arguments[1:4] for _, arguments in calls], graph.launches, [text.split(WAITS) for text in texts]


@pytest.mark.whole
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing is substituted")
def test_compiled_matmuls_ask_for_the_next_weight_and_begin_with_their_own():
    """The launches, and the bytes that they are counted to read, are those without prefetches."""
    (calls, launches, prefetched), (_, without, plain) = compiled(True), compiled(False)
    assert calls == [["first", "second", "arrived"], ["second", "second", "arrived"]]
    assert launches == without
    for asked, (before, after) in zip((1, 0), prefetched, strict=True):
        assert "griddepcontrol.launch_dependents" in before and "ld.global" in before
        assert (before.count(ASKS), after.count(ASKS)) == (2, asked)
        assert not any(each in before for each in WRITES) and all(each in after for each in WRITES)
    for before, after in plain:
        assert "ld.global" not in before and ASKS not in before + after


def test_prefetches_for_an_architecture_without_them_are_refused(tmp_path):
    given = ("--target-model", "gemma4-tiny", "--int4-layout", "records-prefetched", "--cuda-arch", "sm_89")
    code, line = fail_command(export_main, *given, "--output-dir", tmp_path / "out")
    assert code == 1 and "--int4-layout records-prefetched is for sm_90 and later, not sm_89: leave it out" in line
