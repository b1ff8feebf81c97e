"""Lowers a module to XNNPACK."""

import executorch.backends.cuda.quantize_op_dispatch  # noqa: F401  (gives torchao's tensors CUDA's products)
import torch
from executorch.runtime import Runtime
from torch import nn
from torch.export import Dim

from eagle3.export.lowering.xnnpack.lowering import lower


def lowered(model: nn.Module, ids: torch.Tensor):
    program = torch.export.export(model, (ids[:, :5],), dynamic_shapes=({1: Dim("rows", min=1, max=16)},), strict=False)
    lowered = lower({"forward": program}, {})
    # by name, since str() of a function holds its address, whose hexadecimal digits may spell "add"
    nodes = lowered.exported_program().graph.nodes
    left = {getattr(node.target, "__name__", str(node.target)) for node in nodes if node.op == "call_function"}
    return left, Runtime.get().load_program(lowered.buffer)
