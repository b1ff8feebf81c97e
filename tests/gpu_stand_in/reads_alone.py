"""Prints the launches of a method that only reads a cache, as the draft of an assistant does."""

import json
import sys

import torch
from cuda_lowered import lowered
from torch import nn

from eagle3.export.lowering.cuda.graph.rotations import CudaAttention
from eagle3.export.lowering.cuda.graph.shortcuts import counters_unchanged
from eagle3.targets.attention import KVCacheShape

SHAPE = KVCacheShape(2, 64, 4096, dtype=torch.bfloat16, heads=4)


class ReadOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = CudaAttention(SHAPE)

    def forward(self, query: torch.Tensor, input_pos: torch.Tensor) -> torch.Tensor:
        return self.attention(query, None, None, self.attention.rows(input_pos), 1.0)


if __name__ == "__main__":
    given = torch.randn(1, 1, 4, 64, dtype=torch.bfloat16), torch.tensor([7])
    with counters_unchanged():
        _, graph = lowered(ReadOnly(), given)
    found = {"launches": graph.launches, "slots": SHAPE.slots, "bytes": SHAPE.bytes}
    sys.stdout.write(json.dumps(found) + "\n")
