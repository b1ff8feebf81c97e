"""Experts on CUDA, of which only the chosen ones' weights are read.

The kernels take INT4 weights in groups of 32 without zero points, no biases, and SiLU or GELU (tanh) of one half times
the other. The weights of such experts are quantized in this form, whatever the recipe says for other weights. Other
experts (gpt-oss) stay two linears over all experts. That is correct, and slower by the ratio of all experts to the
chosen ones.
"""

import torch
from executorch.extension.llm.export.int4 import ExportableInt4Tensor
from executorch.extension.llm.export.quant import QuantConfig, QuantRule
from torch import Tensor, nn

from eagle3.export.backends import SMALL_M_ROWS
from eagle3.export.lowering.cuda.graph.attention import most_rows
from eagle3.export.lowering.cuda.kernels.experts import GROUP, ZERO, int4_experts_small_m
from eagle3.export.lowering.cuda.kernels.sorted_experts import sorted_experts
from eagle3.export.lowering.cuda.kernels.sums import GELU_TANH, SILU, gated
from eagle3.targets.experts import Experts, Router

SYMMETRIC = QuantConfig(bits=4, group_size=GROUP, symmetric=True, method="min_max")


def expert_rules(model: nn.Module) -> list[QuantRule]:
    """Return the quantization rules for experts with kernels, and for routers, which are not quantized."""
    fused = [name for name, module in model.named_modules() if isinstance(module, Experts) and is_fused(module)]
    routers = [name for name, module in model.named_modules() if isinstance(module, Router)]
    routers += [f"{name.rpartition('.')[0]}.router" for name in fused]  # Llama 4's
    rules = [QuantRule(rf"(.*\.)?{name}\.weight", None) for name in routers]
    return rules + [QuantRule(rf"(.*\.)?{name}\.(gate_up|down)\.weight", SYMMETRIC) for name in fused]


def is_fused(experts: Experts) -> bool:
    """Return True if the kernels can compute these experts."""
    whole_groups = experts.width % GROUP == 0 and experts.gate_up.in_features % GROUP == 0
    return whole_groups and experts.gate_up.bias is None and activation_of(experts) is not None


def activation_of(experts: Experts) -> str | None:
    """Return the activation of the experts' gate, which is recognized by its results; None for any other gate."""
    gate_up = torch.linspace(-3, 3, 4 * experts.width).view(2, -1)
    found = experts.gate(gate_up)
    return next((name for name in (SILU, GELU_TANH) if torch.allclose(found, gated(gate_up, name), atol=1e-5)), None)


def use_fused_experts(model: nn.Module) -> None:
    """Replace every ``Experts`` whose weights are quantized by ``expert_rules``."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Experts) and _is_quantized(child) and is_fused(child):
                setattr(parent, name, FusedExperts(child))


def _is_quantized(experts: Experts) -> bool:
    return isinstance(experts.gate_up.weight, ExportableInt4Tensor)


class FusedExperts(nn.Module):
    """Computes ``Experts`` by kernels that read the chosen experts alone.

    ``gate_up`` [experts, 2 * width, hidden / 2] and ``down`` [experts, hidden, width / 2] hold two codes per byte, the
    even column in the low nibble, with a scale for each 32 columns: [experts, columns / 32, rows].
    """

    gate_up: Tensor
    gate_up_scale: Tensor
    down: Tensor
    down_scale: Tensor

    def __init__(self, experts: Experts):
        super().__init__()
        self.count, self.weighs_inputs, self.gate = experts.count, experts.weighs_inputs, experts.gate
        self.activation = activation_of(experts) or ""
        gate_up: ExportableInt4Tensor = experts.gate_up.weight
        down: ExportableInt4Tensor = experts.down.weight
        for name, weight in (("gate_up", gate_up), ("down", down)):
            if weight.group_size != GROUP or not bool((weight.zero_point == ZERO).all()):
                raise ValueError(f"the experts' {name} is not quantized in groups of {GROUP} without zero points")

        def beside(packed: Tensor) -> Tensor:  # [rows, experts * n] -> [experts, rows, n]
            return packed.unflatten(1, (self.count, -1)).transpose(0, 1).contiguous()

        def below(packed: Tensor) -> Tensor:  # [experts * rows, n] -> [experts, rows, n]
            return packed.unflatten(0, (self.count, -1)).contiguous()

        for name, weight, codes, scales in (("gate_up", gate_up, below, beside), ("down", down, beside, below)):
            self.register_buffer(name, codes(weight.qdata.view(torch.int8)), persistent=False)
            self.register_buffer(f"{name}_scale", scales(weight.scale.to(torch.bfloat16)), persistent=False)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [T, hidden], chosen int64 [T, k], weights [T, k] -> [T, hidden]."""
        factors = weights.float()
        if self.weighs_inputs:
            x = (x[:, None] * weights[..., None].to(x.dtype)).flatten(0, 1)  # a row for each choice
            factors = torch.ones_like(factors)
        gate_up, down = (self.gate_up, self.gate_up_scale), (self.down, self.down_scale)
        if most_rows(chosen.shape[0]) <= SMALL_M_ROWS[-1]:
            out = int4_experts_small_m(x, *gate_up, *down, chosen, factors, self.activation)
        else:
            out = sorted_experts(x, gate_up, down, chosen, factors, self.gate)
        # Added number by number: a reduction would take a program for each sum of so few.
        each = out.float().unflatten(0, (-1, chosen.shape[1])).unbind(1)
        return sum(each[1:], each[0]).to(x.dtype)
