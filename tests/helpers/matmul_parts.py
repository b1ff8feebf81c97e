"""Makes the inputs of a quantized product, and checks its result."""

import torch
from small_m_weights import int4_weight
from torch import Tensor

from eagle3.export.lowering.cuda.kernels import sums
from eagle3.export.lowering.cuda.kernels.int4.tiles import kernel as int4
from eagle3.export.lowering.cuda.kernels.int4.tiles import matmul as int4_matmul


def parts(*weights: tuple[Tensor, ...]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return the op's inputs for weights that ``int4_weight`` made."""
    laid_out = [int4.tiled(*weight[1:]) for weight in weights]
    return [weight[0] for weight in weights], *map(torch.cat, zip(*laid_out, strict=True))


class Int4Linear(torch.nn.Module):
    """A linear of many rows over a random INT4 weight [n, k]."""

    def __init__(self, n: int, k: int):
        super().__init__()
        (qdata,), codes, steps = parts(int4_weight(n, k))
        for name, value in (("qdata", qdata), ("codes", codes), ("steps", steps), ("arrived", sums.counters())):
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return int4_matmul.int4_matmul(x, [self.qdata], self.codes, self.steps, self.arrived)


def assert_product(found: Tensor, x: Tensor, w: Tensor) -> None:
    """Assert that ``found`` is the product of ``x`` and ``w``, up to a rounding to bf16 and float32's errors."""
    w = w.double()
    expected = x.double() @ w.T
    assert found.dtype == torch.bfloat16 and found.shape == expected.shape
    room = 1e-6 * x.double().abs() @ w.abs().T + 2**-8 * expected.abs()
    assert ((found.double() - expected).abs() <= room).all()
