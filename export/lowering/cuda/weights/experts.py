"""Experts on CUDA by ExecuTorch's ``triton::fused_moe``, which reads only the weights of the chosen experts.

The kernel computes SiLU of one half times the other, without biases, from INT4 weights in groups of 32 without zero
points. The weights of such experts are therefore quantized in this form, whatever the recipe says for other weights.
Other experts (gpt-oss) stay two linears over all experts. That is correct, and slower by the ratio of all experts to
the chosen ones.
"""

import torch
from executorch.extension.llm.export.int4 import ExportableInt4Tensor
from executorch.extension.llm.export.quant import QuantConfig, QuantRule
from torch import Tensor, nn
from torch.nn import functional as F

from eagle3.export.backends import SMALL_M_ROWS
from eagle3.export.lowering.cuda.graph.attention import most_rows
from eagle3.targets.experts import Experts, Router

GROUP = 32
SYMMETRIC = QuantConfig(bits=4, group_size=GROUP, symmetric=True, method="min_max")


def expert_rules(model: nn.Module) -> list[QuantRule]:
    """Return the quantization rules for experts with fused kernels, and for routers, which are not quantized."""
    fused = [name for name, module in model.named_modules() if isinstance(module, Experts) and is_fused(module)]
    routers = [name for name, module in model.named_modules() if isinstance(module, Router)]
    routers += [f"{name.rpartition('.')[0]}.router" for name in fused]  # Llama 4's
    rules = [QuantRule(rf"(.*\.)?{name}\.weight", None) for name in routers]
    return rules + [QuantRule(rf"(.*\.)?{name}\.(gate_up|down)\.weight", SYMMETRIC) for name in fused]


def is_fused(experts: Experts) -> bool:
    """Return True if the fused kernels can compute these experts. Their gate is recognized by its results."""
    gate_up = torch.linspace(-3, 3, 4 * experts.width).view(2, -1)
    gate, up = gate_up.split(experts.width, dim=-1)
    plain = experts.gate_up.bias is None and torch.allclose(experts.gate(gate_up), F.silu(gate) * up, atol=1e-5)
    return plain and experts.width % GROUP == 0 and experts.gate_up.in_features % GROUP == 0


def use_fused_experts(model: nn.Module) -> None:
    """Replace every ``Experts`` whose weights are quantized by ``expert_rules``."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Experts) and _is_quantized(child) and is_fused(child):
                setattr(parent, name, FusedExperts(child))


def _is_quantized(experts: Experts) -> bool:
    return isinstance(experts.gate_up.weight, ExportableInt4Tensor)


class FusedExperts(nn.Module):
    """Computes ``Experts`` by the fused kernels, with their weights.

    ``w1`` [experts, 2 * width, hidden / 2] and ``w2`` [experts, hidden, width / 2] hold two codes per byte, the even
    column in the low nibble, with a scale for each 32 columns.
    """

    def __init__(self, experts: Experts):
        super().__init__()
        self.count, self.weighs_inputs = experts.count, experts.weighs_inputs
        gate_up: ExportableInt4Tensor = experts.gate_up.weight
        down: ExportableInt4Tensor = experts.down.weight
        for name, weight in (("gate_up", gate_up), ("down", down)):
            if weight.group_size != GROUP or not bool((weight.zero_point == 8).all()):
                raise ValueError(f"the experts' {name} is not quantized in groups of {GROUP} without zero points")

        def beside(packed: Tensor) -> Tensor:  # [hidden, experts * n] -> [experts, hidden, n]
            return packed.unflatten(1, (self.count, -1)).transpose(0, 1).contiguous()

        def below(packed: Tensor) -> Tensor:  # [experts * 2 * width, n] -> [experts, 2 * width, n]
            return packed.unflatten(0, (self.count, -1)).contiguous()

        for name, weight, stack in (("w1", gate_up, below), ("w2", down, beside)):
            self.register_buffer(name, stack(weight.qdata.view(torch.int8)), persistent=False)
            self.register_buffer(f"{name}_scale", stack(weight.scale.t().to(torch.bfloat16)), persistent=False)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [T, hidden], chosen int64 [T, k], weights [T, k] -> [T, hidden]."""
        if not self.weighs_inputs:
            return self._routed(x, chosen, weights.float())
        k = chosen.shape[1]
        each = (x[:, None] * weights[..., None].to(x.dtype)).flatten(0, 1)  # a row for each choice
        ones = torch.ones_like(chosen, dtype=torch.float32).view(-1, 1)
        return self._routed(each, chosen.reshape(-1, 1), ones).unflatten(0, (-1, k)).sum(1)

    def _routed(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Run the kernel for few or for many rows. For a verify window, a matrix is read once for each row that chose
        it; for a chunk of prefill, rows are sorted by expert first."""
        few = most_rows(x.shape[0]) <= SMALL_M_ROWS[-1]
        op = torch.ops.triton.fused_moe if few else torch.ops.triton.fused_moe_batched_gemm
        packed = self.w1, self.w1_scale, self.w2, self.w2_scale
        return op(x, *packed, weights, chosen, chosen.shape[1], self.count, GROUP)
