"""The gate of an MLP is computed in the launch of its product: the numbers equal those of two launches bit for bit,
gates are found in a traced graph, and the kernels compile without a GPU."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from kernel_inputs import int4_weight
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpreterBuilder
from triton_interpreter import interpreted

from eagle3.export.lowering.cuda.graph.dispatch import small_m_dispatch
from eagle3.export.lowering.cuda.graph.gates import gate_in_products
from eagle3.export.lowering.cuda.kernels import bf16, small_m, sums
from eagle3.export.lowering.cuda.kernels.int4.tiles import kernel as int4
from eagle3.export.lowering.cuda.kernels.sums import GELU_TANH, SILU, gated

ACTIVATIONS = (SILU, GELU_TANH)


def of_bf16(x: Tensor, weight: Tensor, arrived: Tensor, activation: str = "", count: int | None = None) -> Tensor:
    with interpreted(sums, bf16):
        choice = replace(bf16.BF16, parts=count)
        return bf16._launch_bf16(bf16._bf16_small_m_kernel, x, weight, arrived, activation, choice)


def of_int4(x: Tensor, weight: list[tuple[Tensor, ...]], arrived: Tensor, activation: str = "") -> Tensor:
    codes, steps = (torch.cat(parts) for parts in zip(*(int4.tiled(*each[1:]) for each in weight), strict=True))
    with interpreted(sums, small_m, int4):
        given = x, [each[0] for each in weight], codes, steps, arrived, activation
        return int4._launch_int4(int4.int4_small_m_kernel, *given)


PRODUCTS = {
    "bf16": (of_bf16, lambda: torch.randn(256, 512).bfloat16() / 8),
    "int4": (of_int4, lambda: [int4_weight(128, 512), int4_weight(128, 512)]),
    "int4, one weight": (of_int4, lambda: [int4_weight(256, 512)]),
}


@pytest.mark.parametrize("kind", ["bf16", "int4"])
def test_a_gated_product_has_the_same_bits_with_whole_and_split_tiles(kind):
    product, made = PRODUCTS[kind]
    weight, arrived = made(), sums.counters()
    if kind == "bf16":
        weight, tiles = torch.cat([weight, weight[:128]]), 6  # of 64 outputs
    else:
        weight, tiles = [int4_weight(384, 512), int4_weight(384, 512)], 6  # of 128
    blocks, x = (4, 2)[kind == "int4"], torch.randn(16, 512).bfloat16()
    with sums.made_for(2, True):
        assert sums.division(tiles, blocks, 1).whole == 4 and sums.division(tiles, blocks, 1).parts > 1
        plain = product(x, weight, arrived)
        for m in (1, 9, 16):
            assert torch.equal(product(x[:m], weight, arrived), plain[:m])
            assert torch.equal(product(x[:m], weight, arrived, GELU_TANH), gated(plain[:m], GELU_TANH))
    rest = x.float() @ dense(kind, weight).T
    assert (plain.float() - rest).abs().max() < 2**-7 * rest.abs().max() and not arrived.any()


def dense(kind: str, weight: Tensor | list[tuple[Tensor, ...]]) -> Tensor:
    """Return the weight as float32 [N, K]."""
    if kind == "bf16":
        return weight.float()
    return torch.cat([int4.dequantized([each[0]], *int4.tiled(*each[1:]))[0] for each in weight])


@pytest.mark.first(1)
@pytest.mark.parametrize(("kind", "activation"), zip(PRODUCTS, (SILU, GELU_TANH, SILU), strict=True))
def test_a_gated_product_has_the_bits_of_a_product_with_a_separate_gate(kind, activation):
    product, made = PRODUCTS[kind]
    weight, arrived = made(), sums.counters()
    for m in (1, 9, 20):
        x = torch.randn(m, 512).bfloat16()
        found = product(x, weight, arrived, activation)
        assert found.shape == (m, 128) and torch.equal(found, gated(product(x, weight, arrived), activation))
        assert not arrived.any()


def test_a_gated_product_does_not_depend_on_which_program_arrives_last(monkeypatch):
    x, weight, arrived = torch.randn(3, 512).bfloat16(), torch.randn(256, 512).bfloat16() / 8, sums.counters()
    expected = gated(of_bf16(x, weight, arrived, count=2), GELU_TANH)
    numbered = InterpreterBuilder.create_get_program_id

    def renumbered(self, axis):
        handle = numbered(self, axis)
        if axis == 1:
            handle.data = np.array([int(handle.data[0]) ^ 2], dtype=np.int32)  # of two tiles each, up before gate
        return handle

    monkeypatch.setattr(InterpreterBuilder, "create_get_program_id", renumbered)
    assert torch.equal(of_bf16(x, weight, arrived, GELU_TANH, 2), expected)


def test_gate_halves_that_are_not_whole_tiles_are_refused_by_name():
    with pytest.raises(ValueError, match="192 outputs: those of a gate and as many must be multiples of 64"):
        of_bf16(torch.randn(3, 512).bfloat16(), torch.randn(192, 512).bfloat16(), sums.counters(), SILU)


@triton.jit
def _gate(GATE, UP, OUT, ACTIVATION: tl.constexpr):
    at = tl.arange(0, 128)
    tl.store(OUT + at, sums.gate_of(tl.load(GATE + at), tl.load(UP + at), ACTIVATION).to(tl.bfloat16))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gate_kernel_fuses_the_same_operations_as_inductor(activation):
    def operations(fused: bool) -> list[str]:
        types = {"GATE": "*fp32", "UP": "*fp32", "OUT": "*bf16", "ACTIVATION": "constexpr"}
        source = ASTSource(_gate, types, {(3,): activation})
        options = {"num_warps": 4, "enable_fp_fusion": fused}
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
        return [found.replace(".rn", "") for found in re.findall(r"^\s+(\w+[.\w]*f32)\b", ptx, re.MULTILINE)]

    assert operations(True) == operations(False) and operations(True)


class Mlp(nn.Module):
    """An MLP; ``merged`` names the operation that halves its product."""

    def __init__(self, activation=F.silu, merged: str = "slices", bias: bool = False, width: int = 128):
        super().__init__()
        torch.manual_seed(4)
        self.activation, self.merged = activation, merged
        self.gate_up = nn.Linear(64, 2 * width, bias=bias, dtype=torch.bfloat16)
        self.down = nn.Linear(width, 64, bias=False, dtype=torch.bfloat16)
        self.requires_grad_(False)

    def forward(self, x):
        both = self.gate_up(x)
        half = both.shape[-1] // 2
        gate, up = both.chunk(2, -1) if self.merged == "chunks" else (both[..., :half], both[..., half:])
        if self.merged == "swapped":
            return self.down(gate * self.activation(up))
        if self.merged == "read":
            return self.down(self.activation(gate) * up + gate)
        return self.down(up * self.activation(gate) if self.merged == "chunks" else self.activation(gate) * up)


def activations_of(model: nn.Module, shortest: int = 1) -> tuple[ExportedProgram, list[str]]:
    """Return a traced model with gates in its products, after a check that its numbers are unchanged, and the
    activations of the products."""
    x, rows = torch.randn(1, 30, 64).bfloat16(), {1: Dim("rows", min=shortest, max=40)}
    with small_m_dispatch(8), torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=(rows,), strict=False)
    expected = program.module()(x[:, :9])
    gate_in_products(program)
    torch.testing.assert_close(program.module()(x[:, :9]), expected)
    found = program.graph.find_nodes(op="call_function", target=torch.ops.eagle3.bf16_small_m.default)
    return program, [node.kwargs.get("activation", "") for node in found]


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Mlp(), [SILU, ""]),
        (Mlp(merged="chunks"), [SILU, ""]),
        (Mlp(tanh_gelu), [GELU_TANH, ""]),
        (Mlp(F.gelu), ["", ""]),
        (Mlp(merged="swapped"), ["", ""]),
        (Mlp(merged="read"), ["", ""]),
        (Mlp(bias=True), ["", ""]),
        (Mlp(width=64), ["", ""]),
    ],
    ids=["slices", "chunks", "tanh", "erf", "swapped", "read", "bias", "narrow"],
)
def test_gates_of_a_product_in_a_traced_graph_are_fused(model, expected):
    program, found = activations_of(model)
    assert found == expected
    assert bool(program.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)) != any(found)


def test_gates_of_a_prefill_chunk_are_not_fused():
    assert activations_of(Mlp(), shortest=9)[1] == []
