"""Makes weights and activations for kernels of few rows."""

import torch
from torch import Tensor

from eagle3.export.lowering.cuda.kernels.int4.tiles import kernel as kernel4


def int4_weight(n: int, k: int, group: int = 32) -> tuple[Tensor, ...]:
    """Return random qdata, scale, scale_step, zero and zero_step, with zero points from 0 to 15."""

    def codes(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8)

    def steps(largest: float) -> Tensor:
        return (torch.rand(n, k // 256) * largest / 255).half()

    return codes(n, k // 2), codes(n, k // group), steps(0.1), codes(n, k // group), steps(15)


def int8_weight(n: int, k: int, group: int) -> tuple[Tensor, ...]:
    """Return random qdata, scale and zero, with zero points of both signs."""
    q, zero = (torch.randint(-128, 128, (n, size), dtype=torch.int8) for size in (k, k // group))
    return q, torch.rand(n, k // group).bfloat16() / 100, zero


def activations(m: int, k: int) -> Tensor:
    return torch.randn(m, k).bfloat16()


INT4_TYPES = ["*bf16", "*u8", "*u8", "*u8", "*u8", "*fp16", "*i32", "*fp32", "*bf16", "i32"]


INT4_DOWN = {"N0": 5376, "N1": 0, "N2": 0, "K": 21504, "G": 32, "WHOLE": 0, "SPLITS": 6, "STAGES": kernel4.INT4.stages}


INT4_DOWN |= {"BLOCK_N": kernel4.TILE, "BLOCK_K": kernel4.BLOCK, "ACTIVATION": ""}
