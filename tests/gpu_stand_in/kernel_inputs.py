"""Makes random weights and activations for kernels, and checks products."""

from typing import NamedTuple

import gguf
import numpy as np
import torch
from executorch.extension.llm.export.gguf import ExportableGGUFTensor
from gguf_files import TYPES, random_blocks
from torch import Tensor

from eagle3.export.lowering.cuda.kernels import sums
from eagle3.export.lowering.cuda.kernels.int4.tiles import kernel as int4
from eagle3.export.lowering.cuda.kernels.int4.tiles import matmul as int4_matmul
from eagle3.export.lowering.cuda.weights.k_quants import KQuantTensor, laid_out


def activations(m: int, k: int) -> Tensor:
    return torch.randn(m, k).bfloat16()


def int4_weight(n: int, k: int, group: int = 32) -> tuple[Tensor, ...]:
    """Return random qdata, scale, scale_step, zero and zero_step, with zero points from 0 to 15."""

    def codes(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8)

    def steps(largest: float) -> Tensor:
        return (torch.rand(n, k // 256) * largest / 255).half()

    return codes(n, k // 2), codes(n, k // group), steps(0.1), codes(n, k // group), steps(15)


def parts(*weights: tuple[Tensor, ...]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return the inputs of the ops over tiles, for weights that ``int4_weight`` made."""
    laid_out = [int4.tiled(*weight[1:]) for weight in weights]
    return [weight[0] for weight in weights], *map(torch.cat, zip(*laid_out, strict=True))


def int8_weight(n: int, k: int, group: int) -> tuple[Tensor, ...]:
    """Return random qdata, scale and zero, with zero points of both signs."""
    q, zero = (torch.randint(-128, 128, (n, size), dtype=torch.int8) for size in (k, k // group))
    return q, torch.rand(n, k // group).bfloat16() / 100, zero


KINDS = {"Q4_K": 4, "Q5_K": 5, "Q6_K": 6}


def k_quant_weight(kind: str, n: int, k: int, blocks: np.ndarray | None = None) -> tuple[KQuantTensor, Tensor]:
    """Return a random weight in the form for CUDA, and its values as dequantized by gguf-py."""
    raw = random_blocks(kind, n, k, seed=n + k) if blocks is None else blocks.reshape(n, -1)
    tensor = ExportableGGUFTensor(torch.from_numpy(raw), kind.lower(), torch.float32)
    return laid_out(tensor), torch.from_numpy(gguf.dequantize(raw, TYPES[kind]))


class Int4Experts(NamedTuple):
    gate_up: Tensor
    gate_up_scale: Tensor
    down: Tensor
    down_scale: Tensor


def int4_experts_weights(count: int, hidden: int, width: int) -> Int4Experts:
    def weight(n: int, k: int) -> tuple[Tensor, Tensor]:
        codes = torch.randint(-128, 128, (count, n, k // 2), dtype=torch.int8)
        return codes, (torch.rand(count, k // 32, n) / 4 / k**0.5).bfloat16()

    return Int4Experts(*weight(2 * width, hidden), *weight(hidden, width))


def int8_experts_weights(count: int, n: int, k: int) -> tuple[Tensor, ...]:
    """Return random qdata, scale, zero and bias of ``count`` experts [n, k]."""
    q = torch.randint(-128, 128, (count * n, k), dtype=torch.int8)
    scale = torch.rand(count * n, k // 32).bfloat16() / 100
    return q, scale, torch.randint(-9, 9, scale.shape, dtype=torch.int8), torch.randn(count, n).bfloat16()


def choices(rows: int, count: int, top_k: int) -> tuple[Tensor, Tensor]:
    chosen = torch.stack([torch.randperm(count)[:top_k] for _ in range(rows)])
    return chosen, torch.rand(rows, top_k) + 0.5


class Int4Linear(torch.nn.Module):
    """A linear of many rows over a random INT4 weight [n, k]."""

    def __init__(self, n: int, k: int):
        super().__init__()
        (qdata,), codes, steps = parts(int4_weight(n, k))
        for name, value in (("qdata", qdata), ("codes", codes), ("steps", steps), ("arrived", sums.counters())):
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return int4_matmul.int4_matmul(x, [self.qdata], self.codes, self.steps, self.arrived)


def assert_product(found: Tensor, x: Tensor, w: Tensor, magnitude: Tensor | None = None) -> None:
    """Assert that ``found`` is the product of ``x`` and ``w``, up to a rounding to bf16 and float32's errors. These are
    proportional to ``magnitude`` [M, N], the sum of the absolute values that a kernel adds: by default those of the
    products."""
    x, w = x.double(), w.double()
    expected = x @ w.T
    assert found.dtype == torch.bfloat16 and found.shape == expected.shape
    room = 1e-6 * (x.abs() @ w.abs().T if magnitude is None else magnitude) + 2**-8 * expected.abs()
    worst = ((found.double() - expected).abs() / room.clamp_min(1e-30)).max()
    assert worst <= 1, f"{worst:.3g} times what rounding explains"
