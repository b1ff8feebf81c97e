"""Matmuls over records and bfloat16 ask L2 for the weights of the next one, without another bit in any result."""

import re
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import triton.language as tl
from cuda_lowered import lowered
from kernel_inputs import activations, int4_weight, int8_weight
from records_models import Mlp, linear, tiles, traced
from torch import Tensor, nn
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor.codecache import CudaKernelParamCache
from triton_interpreter import asked_of_l2, interpreted

from eagle3.export.lowering.cuda.graph.dispatch import small_m_dispatch
from eagle3.export.lowering.cuda.graph.gates import gate_in_products
from eagle3.export.lowering.cuda.graph.prefetches import PART, prefetch_weights
from eagle3.export.lowering.cuda.graph.shortcuts import ANALYSIS, counters_unchanged, prefetches_unseen
from eagle3.export.lowering.cuda.inductor.early_launches import early_launches
from eagle3.export.lowering.cuda.kernels import bf16, small_m, sums
from eagle3.export.lowering.cuda.kernels.int4.records import kernel as int4_records
from eagle3.export.lowering.cuda.kernels.int4.records.kernel import LEVERS, shares
from eagle3.export.lowering.cuda.kernels.int4.records.layout import RECORD, records
from eagle3.export.lowering.cuda.kernels.int4.records.tensor import pack_records
from eagle3.export.lowering.cuda.kernels.l2 import NEXT_BYTES, of_next

WAITS, ASKS, WRITES = "griddepcontrol.wait;", "cp.async.bulk.prefetch.L2", ("st.global", "atom.")
PRODUCTS = torch.ops.eagle3.int4_records_small_m.default, torch.ops.eagle3.bf16_small_m.default


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
    return [node for node in program.graph.nodes if node.target in PRODUCTS]


def home_of(node: torch.fx.Node) -> str:
    """Return the parameter that a node is a part of."""
    while node.target is PART:
        node = node.args[0]
    assert node.op == "placeholder"
    return node.name


def test_each_matmul_asks_for_the_weight_of_the_next_one(tmp_path):
    model = Layers(tmp_path)
    with small_m_dispatch(8):
        program = traced(model, 1, 8)
    x = torch.randn(1, 5, 256).bfloat16()
    expected = program.module()(x)
    gate_in_products(program)
    for node in program.graph.find_nodes(op="call_function", target=PART):
        min(node.users).prepend(node)  # as late as can be
    assert prefetch_weights(program) == 4
    program.graph.lint()  # each node is behind those that it takes
    found = products(program)
    own = [home_of(node.args[1]) for node in found]
    assert len(own) == 5 and len(set(own)) == 4 and own[1] == own[4]
    assert [home_of(node.kwargs["following"]) for node in found[:-1]] == own[1:]
    assert "following" not in found[-1].kwargs
    assert [node.kwargs.get("early", False) for node in found] == [True] * 5
    assert torch.equal(program.module()(x), expected)


class Mixed(nn.Module):
    """Products over records, bfloat16, tiles, an embedding's table and records."""

    def __init__(self, folder: Path):
        super().__init__()
        self.table = nn.Embedding(256, 256, dtype=torch.bfloat16)
        weights = tiles(256, 256), torch.randn(256, 256).bfloat16() / 16, tiles(256, 256, 64), None, tiles(64, 256)
        self.layers = nn.ModuleList(linear(self.table.weight if each is None else each) for each in weights)
        self.layers[3].weight = self.table.weight
        pack_records(self, folder)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table(torch.ones(1, dtype=torch.long, device=x.device))
        for layer in self.layers:
            x = layer(x)
        return x


def test_matmuls_over_records_and_bfloat16_ask_for_each_others_weights(tmp_path):
    """A weight in tiles is not asked for, and neither is the one behind it. A weight that is also an embedding is."""
    model = Mixed(tmp_path).requires_grad_(False)
    with small_m_dispatch(8):
        program = traced(model, 1, 8)
    x = torch.randn(1, 5, 256).bfloat16()
    expected = program.module()(x)
    assert prefetch_weights(program) == 2
    program.graph.lint()
    found = [node for node in program.graph.nodes if str(node.target).endswith("_small_m.default")]
    assert [node.target in PRODUCTS for node in found] == [True, True, False, True, True]
    asked = [home_of(node.kwargs["following"]) if "following" in node.kwargs else "" for node in found]
    own = [home_of(found[at].args[1]) for at in (1, 4)]
    assert asked == [own[0], "", "", own[1], ""]
    assert any(node.target is torch.ops.aten.embedding.default for node in found[3].args[1].users)
    assert [node.kwargs.get("early", False) for node in found] == [True, True, False, True, True]
    assert torch.equal(program.module()(x), expected)


class BeforeInt8(nn.Module):
    """A product over bfloat16 and one over INT8."""

    def __init__(self):
        super().__init__()
        weights = weight_of(256, 256, False), *int8_weight(64, 256, 32)
        self.weights = nn.ParameterList(nn.Parameter(each, requires_grad=False) for each in weights)
        self.register_buffer("arrived", sums.counters())

    def forward(self, x: Tensor) -> Tensor:
        dense, *int8 = self.weights
        return small_m.int8_small_m(bf16.bf16_small_m(x, dense, self.arrived), *int8, self.arrived)


def test_a_weight_of_another_kind_is_not_asked_for():
    program = torch.export.export(BeforeInt8(), (activations(3, 256),), strict=False)
    assert prefetch_weights(program) == 0
    assert [node.kwargs.get("early", False) for node in program.graph.nodes if "small_m" in node.name] == [True, False]


class Round(nn.Module):
    """A matmul whose result the next two read, and another matmul beside these two, as a target and a draft do in a
    round; then two more."""

    def __init__(self, folder: Path):
        super().__init__()
        weights = [tiles(256, 256), tiles(256, 256), tiles(256, 256), *torch.randn(3, 256, 256).bfloat16()]
        self.tapped, self.last, self.head, self.fc, self.first, self.second = map(linear, weights)
        pack_records(self, folder)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tapped(x)
        return self.second(self.first(self.head(self.last(x)) + self.fc(x)))


def test_a_matmul_asks_for_nothing_where_two_could_be_the_next(tmp_path):
    with small_m_dispatch(8):
        program = traced(Round(tmp_path), 1, 8)
    assert prefetch_weights(program) == 1
    found = products(program)
    assert ["following" in node.kwargs for node in found] == [False, False, False, False, True, False]
    assert home_of(found[4].kwargs["following"]) == home_of(found[5].args[1])
    assert all(node.kwargs["early"] for node in found)


def test_a_method_of_many_rows_asks_for_nothing(tmp_path):
    with small_m_dispatch(8):
        program = traced(Layers(tmp_path), 9, 64)
    assert prefetch_weights(program) == 0
    assert not any(node.kwargs.get("following") or node.kwargs.get("early") for node in program.graph.nodes)


class Written(nn.Module):
    """Four products: with a parameter, a buffer that the call writes, a computed weight and a parameter."""

    def __init__(self, in_records: bool):
        super().__init__()
        for name in ("first", "last"):
            self.register_parameter(name, nn.Parameter(weight_of(256, 256, in_records), requires_grad=False))
        self.register_buffer("written", weight_of(256, 256, in_records))
        self.register_buffer("arrived", sums.counters())
        self.in_records = in_records

    def forward(self, x: Tensor) -> Tensor:
        for weight in (self.first, self.written, self.first + 1, self.last):
            if self.in_records:
                x = int4_records.int4_records_small_m(x, weight, self.arrived, 8)
            else:
                x = bf16.bf16_small_m(x, weight, self.arrived)
        self.written.copy_(self.first)
        return x


def weight_of(n: int, k: int, in_records: bool) -> Tensor:
    return records(*int4_weight(n, k)) if in_records else torch.randn(n, k).bfloat16() / 16


@pytest.mark.parametrize("in_records", [True, False])
def test_a_weight_that_may_be_written_is_neither_asked_for_nor_read_before_the_wait(in_records):
    program = torch.export.export(Written(in_records), (activations(3, 256),), strict=False)
    assert prefetch_weights(program) == 1
    found = products(program)
    assert [node.kwargs.get("early", False) for node in found] == [True, False, False, True]
    assert [node.kwargs.get("following") is not None for node in found] == [False, False, True, False]


@pytest.mark.parametrize(
    ("following", "says"),
    [
        (
            torch.zeros(2, 1, RECORD, dtype=torch.int8),
            "is torch.int8 (2, 1, 4736): it must be records or a matrix in bf",
        ),
        (torch.zeros(64, 128, dtype=torch.uint8), "the next weight is torch.uint8 (64, 128): it must be records or a"),
        (torch.zeros(2, 1, RECORD, dtype=torch.bfloat16), "the next weight is torch.bfloat16 (2, 1, 4736): it must be"),
        (
            torch.zeros(64, 128, dtype=torch.float16),
            "the next weight is torch.float16 (64, 128): it must be records or",
        ),
        (torch.zeros(2, 2, RECORD, dtype=torch.uint8)[:, ::2], "contiguous"),
        (torch.zeros(64, 128, dtype=torch.bfloat16).T, "contiguous"),
    ],
)
def test_a_next_weight_of_another_kind_is_refused(following, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        run(activations(2, 256), records(*int4_weight(64, 256)), following=following)
    with pytest.raises(ValueError, match=re.escape(says)):
        run_bf16(activations(2, 256), torch.zeros(64, 256).bfloat16(), following=following)


def test_programs_ask_for_the_next_weight_up_to_a_limit_and_not_beyond_its_end():
    for n, k in ((43008, 5376), (5376, 21504), (16384, 5376), (64, 256), (128, 768)):
        packed = torch.empty(n // 32, k // 256, RECORD, dtype=torch.uint8, device="meta")
        dense = torch.empty(n, k, dtype=torch.bfloat16, device="meta")
        for weight, programs in product((packed, dense), (1, 5, 264, 396)):
            size = of_next(weight, programs)
            most = min(weight.nbytes, NEXT_BYTES)
            assert size % 16 == 0 and most - 16 * programs < size * programs <= most
    assert of_next(None, 5) == 0


def waits_at_once():
    return patch.multiple(tl.extra.cuda, gdc_wait=lambda: None, gdc_launch_dependents=lambda: None)


def run_bf16(x: Tensor, weight: Tensor, activation: str = "", multiprocessors: int = 1, **asked) -> Tensor:
    with waits_at_once(), interpreted(sums, bf16), sums.made_for(multiprocessors, True):
        return bf16._launch_bf16(bf16._bf16_small_m_kernel, x, weight, sums.counters(), activation, **asked)


def run(x: Tensor, packed: Tensor, activation: str = "", most_rows: int = 8, **asked) -> Tensor:
    with waits_at_once(), interpreted(sums, small_m, int4_records), sums.made_for(1, False):
        return int4_records._launch_records(
            int4_records.int4_records_small_m_kernel, x, packed, sums.counters(), activation, most_rows, **asked
        )


@pytest.mark.first(2)
@pytest.mark.parametrize("most_rows", [8, 16])
@pytest.mark.parametrize(("m", "activation"), [(3, ""), (8, sums.SILU), (1, sums.GELU_TANH), (16, "")])
def test_prefetches_change_no_bit_and_each_byte_is_asked_for_once(m, activation, most_rows):
    x, packed, following = activations(m, 2048), records(*int4_weight(128, 2048)), records(*int4_weight(192, 512))
    with asked_of_l2() as asked:
        found = run(x, packed, activation, most_rows, following=following, **LEVERS)
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
    assert {b - a for a, b in of_own} == {LEVERS["FIRST"] * RECORD}


DIVISIONS = {
    (320, 1280, "", 1): (4, 2), (130, 1096, "", 1): (2, 2), (70, 136, "", 1): (0, 1), (128, 1096, "", 3): (0, 3),
    (384, 1280, sums.SILU, 2): (4, 2),
}  # fmt: skip
"""Weights [N, K], an activation and a number of multiprocessors, to the whole tiles and the parts of every other
tile."""


@pytest.mark.parametrize("m", [1, 17, 40])
@pytest.mark.parametrize("case", DIVISIONS)
def test_prefetches_of_bfloat16_change_no_bit_and_each_byte_is_asked_for_once(case, m):
    """Each program asks for the first blocks of its run of K, whole ones, as many as it has in flight."""
    (n, k, activation, multiprocessors), (whole, parts) = case, DIVISIONS[case]
    x, weight, following = activations(m, k), weight_of(n, k, False), weight_of(128, 512, m < 17)
    with asked_of_l2() as asked:
        found = run_bf16(x, weight, activation, multiprocessors, following=following, early=True)
    assert torch.equal(found, run_bf16(x, weight, activation, multiprocessors))
    tiles, row_tiles, blocks = -(-n // 64), -(-m // 32), -(-k // 128)
    shortest = blocks // parts - (k % 128 > 0)
    length = 128 * min(4 if m <= 16 else 3, shortest)
    wanted, counts = torch.zeros(n, k, dtype=torch.int32), torch.zeros(weight.nbytes, dtype=torch.int32)
    for tile, part in product(range(tiles), range(parts)):
        if part == 0 or tile >= whole:
            rows = torch.arange(64 * tile, 64 * tile + 64).clamp(max=n - 1)  # the last one for those behind
            run = wanted[:, 128 * (part * blocks // parts) :][:, :length]
            run.index_add_(0, rows, torch.full((64, length), row_tiles, dtype=torch.int32))
    own, next_ = weight.data_ptr(), following.data_ptr()
    of_next_weight = sorted((a - next_, b - next_) for a, b in asked if next_ <= a < next_ + following.nbytes)
    of_own = [(a - own, b - own) for a, b in asked if own <= a < own + weight.nbytes]
    assert len(of_own) + len(of_next_weight) == len(asked)
    for a, b in of_own:
        assert b <= weight.nbytes
        counts[a:b] += 1
    assert length and torch.equal(counts.view(n, k, 2), wanted[..., None].expand(n, k, 2))
    programs = whole + (tiles - whole) * parts
    size = of_next(following, programs)
    assert size and of_next_weight == sorted([(at * size, (at + 1) * size) for at in range(programs)] * row_tiles)
    assert of_next_weight[-1][1] <= following.nbytes


def test_only_the_kernels_with_prefetches_are_analyzed_without_them(monkeypatch):
    """Another kernel has a constant of the same name."""
    seen = []
    module, _, name = ANALYSIS.rpartition(".")
    monkeypatch.setattr(f"{module}.{name}", lambda _kernel, kwargs, _descriptors: seen.append(kwargs))
    given = {"AHEAD": 4, "FIRST": 3, "EARLY": True, "N": 64}
    with prefetches_unseen():
        for more in ({}, {"OF_NEXT": 128}):
            getattr(triton_kernel_wrap, name)(None, given | more, {})
        getattr(triton_kernel_wrap, name)(None, {"FIRST": 4, "EARLY": True, "OF_NEXT": 128}, {})  # of bfloat16
    assert seen == [
        given,
        {"AHEAD": 0, "FIRST": 0, "EARLY": 0, "N": 64, "OF_NEXT": 0},
        {"FIRST": 0, "EARLY": 0, "OF_NEXT": 0},
    ]


class Three(nn.Module):
    """A product over records with a gate, and products with its result over bfloat16 and records."""

    def __init__(self):
        super().__init__()
        for name, n in (("first", 1024), ("second", 256), ("third", 1024)):
            self.register_parameter(name, nn.Parameter(weight_of(n, 512, name != "second"), requires_grad=False))
        self.register_buffer("arrived", sums.counters())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        over_records = int4_records.int4_records_small_m
        x = over_records(x * 2, self.first, self.arrived, 8, sums.SILU, following=self.second, early=True)
        y = bf16.bf16_small_m(x, self.second, self.arrived, following=self.third, early=True)
        return y, over_records(x, self.third, self.arrived, 8, early=True) * 2


@pytest.mark.whole
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing is substituted")
def test_compiled_matmuls_ask_for_the_next_weight_and_begin_with_their_own():
    """The bytes that a launch is counted to read are those of its own weight."""
    with (
        early_launches(),
        counters_unchanged(),
        prefetches_unseen(),
        sums.made_for(4, False),
    ):  # all products share tiles
        called, graph = lowered(Three(), (activations(3, 512),))
    assert len(called) == 5  # nothing is copied
    calls = [(name, arguments) for name, arguments in called if "small_m" in name]
    texts = (Path(CudaKernelParamCache.get(name)["asm"]).read_text() for name, _ in calls)
    named = "first", "second", "third", "arrived"
    given = [[each for each in arguments if each in named] for _, arguments in calls]
    prefetched = [text.split(WAITS) for text in texts]
    assert given == [["first", "second", "arrived"], ["second", "arrived", "third"], ["third", "third", "arrived"]]
    read = [entry["weight_bytes"] for entry in graph.launches if "small_m" in entry["kernel"]]
    assert read == [32 * 2 * RECORD, 2 * 256 * 512, 32 * 2 * RECORD]
    for of_own, asked, (before, after) in zip((2, 1, 2), (1, 1, 0), prefetched, strict=True):
        assert "griddepcontrol.launch_dependents" in before and ("ld.global" in before) == (of_own == 2)
        assert (before.count(ASKS), after.count(ASKS)) == (of_own, asked) and "cp.async.cg" not in before
        assert not any(each in before for each in WRITES) and all(each in after for each in WRITES)
