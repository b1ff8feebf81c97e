"""Small models with INT4 weights, to be packed into records, and their traces."""

import torch
from kernel_inputs import int4_weight
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F

from eagle3.export.lowering.cuda.kernels.int4.tiles.kernel import tiled
from eagle3.export.lowering.cuda.kernels.int4.tiles.tensor import TiledInt4Tensor
from eagle3.export.speculator.merged_linears import concatenated


def tiles(n: int, k: int, group: int = 32) -> TiledInt4Tensor:
    qdata, *rest = int4_weight(n, k, group)
    return TiledInt4Tensor(qdata, *tiled(*rest), torch.Size((n, k)))


def linear(weight: Tensor, bias: bool = False) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias, dtype=torch.bfloat16)
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made.requires_grad_(False)


class Mlp(nn.Module):
    """A gated MLP whose gate and up are one weight, merged as an export merges it."""

    def __init__(self, folder, width: int = 64):
        super().__init__()
        self.gate_up = linear(concatenated([tiles(width, 256), tiles(width, 256)], folder))
        self.down = linear(tiles(128, 256), bias=True)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        inner = F.silu(gate) * up
        return self.down(inner.repeat(1, 1, 256 // inner.shape[-1]))


def traced(model: nn.Module, shortest: int, longest: int) -> ExportedProgram:
    x, rows = torch.randn(1, longest - 1, 256).bfloat16(), {1: Dim("rows", min=shortest, max=longest)}
    with torch.no_grad():
        return torch.export.export(model, (x,), dynamic_shapes=(rows,), strict=False)
