"""The parts of a quantized product, and the comparison of two."""

import torch
from torch import Tensor

from eagle3.export.lowering.cuda.kernels import int4


def parts(*weights: tuple[Tensor, ...]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return the op's inputs for weights as ``int4_weight`` makes them."""
    laid_out = [int4.tiled(*weight[1:]) for weight in weights]
    return [weight[0] for weight in weights], *map(torch.cat, zip(*laid_out, strict=True))


def assert_product(found: Tensor, x: Tensor, w: Tensor) -> None:
    """Assert the product within a rounding to bf16 and the errors of float32."""
    w = w.double()
    expected = x.double() @ w.T
    assert found.dtype == torch.bfloat16 and found.shape == expected.shape
    room = 1e-6 * x.double().abs() @ w.abs().T + 2**-8 * expected.abs()
    assert ((found.double() - expected).abs() <= room).all()
