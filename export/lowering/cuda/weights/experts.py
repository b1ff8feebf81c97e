"""Experts on CUDA, of which a verify reads the chosen ones' weights alone.

Experts without biases whose gate is SiLU or GELU (tanh) of one half times the other are INT4 in groups of 32 without
zero points, whatever the recipe says for other weights, and so a prefill reads the chosen ones alone as well. Other
experts (gpt-oss) are INT8: two linears over all experts, which a prefill reads whole.
"""

import torch
from executorch.extension.llm.export.int4 import ExportableInt4Tensor
from executorch.extension.llm.export.quant import QuantConfig, QuantRule
from torch import Tensor, nn
from torchao.quantization import IntxUnpackedToInt8Tensor

from eagle3.export.backends import SMALL_M_ROWS
from eagle3.export.lowering.cuda.graph.attention import most_rows
from eagle3.export.lowering.cuda.kernels.int4_experts import GROUP, ZERO, int4_experts_small_m
from eagle3.export.lowering.cuda.kernels.int8_experts import int8_experts_small_m
from eagle3.export.lowering.cuda.kernels.sorted_experts import sorted_experts
from eagle3.export.lowering.cuda.kernels.sums import GELU_TANH, SILU, gated
from eagle3.targets.experts import Experts, Router

INT8 = QuantConfig(bits=8, group_size=GROUP, symmetric=True, method="min_max")
SYMMETRIC = QuantConfig(bits=4, group_size=GROUP, symmetric=True, method="min_max")


def expert_rules(model: nn.Module) -> list[QuantRule]:
    """Return the quantization rules for experts with kernels, and for routers, which are not quantized."""
    experts = {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
    fused = [name for name, module in experts.items() if is_fused(module)]
    others = [name for name, module in experts.items() if not is_fused(module) and in_whole_groups(module)]
    routers = [name for name, module in model.named_modules() if isinstance(module, Router)]
    routers += [f"{name.rpartition('.')[0]}.router" for name in fused]  # Llama 4's
    rules = [QuantRule(rf"(.*\.)?{name}\.weight", None) for name in routers]
    ways = [(name, SYMMETRIC) for name in fused] + [(name, INT8) for name in others]
    return rules + [QuantRule(rf"(.*\.)?{name}\.(gate_up|down)\.weight", way) for name, way in ways]


def is_fused(experts: Experts) -> bool:
    """Return True if the INT4 kernels can compute these experts."""
    return in_whole_groups(experts) and experts.gate_up.bias is None and activation_of(experts) is not None


def in_whole_groups(experts: Experts) -> bool:
    return experts.width % GROUP == 0 and experts.gate_up.in_features % GROUP == 0


def activation_of(experts: Experts) -> str | None:
    """Return the activation of the experts' gate, which is recognized by its results; None for any other gate."""
    gate_up = torch.linspace(-3, 3, 4 * experts.width).view(2, -1)
    found = experts.gate(gate_up)
    return next((name for name in (SILU, GELU_TANH) if torch.allclose(found, gated(gate_up, name), atol=1e-5)), None)


def use_fused_experts(model: nn.Module) -> None:
    """Replace every ``Experts`` whose weights are quantized by ``expert_rules``."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, Experts):
                continue
            weights = child.gate_up.weight, child.down.weight
            if isinstance(weights[0], ExportableInt4Tensor) and is_fused(child):
                setattr(parent, name, FusedExperts(child))
            elif all(map(_is_int8, weights)) and not child.weighs_inputs:
                setattr(parent, name, Int8Experts(child))


def _is_int8(weight: Tensor) -> bool:
    return isinstance(weight, IntxUnpackedToInt8Tensor) and weight.scale.shape[1] * GROUP == weight.shape[1]


def added(out: Tensor, chosen: Tensor, dtype: torch.dtype) -> Tensor:
    """Add each row's experts: [T * k, hidden] -> [T, hidden]. Number by number, because a reduction would take a
    program for each sum of so few."""
    each = out.float().unflatten(0, (-1, chosen.shape[1])).unbind(1)
    return sum(each[1:], each[0]).to(dtype)


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
        return added(out, chosen, x.dtype)


class Int8Experts(nn.Module):
    """Computes ``Experts`` with INT8 weights: for a few rows by the kernel that reads the chosen experts alone, for
    many as they are."""

    def __init__(self, experts: Experts):
        super().__init__()
        self.all = experts

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [T, hidden], chosen int64 [T, k], weights [T, k] -> [T, hidden]."""
        if most_rows(x.shape[0]) > SMALL_M_ROWS[-1]:
            return self.all(x, chosen, weights)
        gate_up, down = (self._parts(linear) for linear in (self.all.gate_up, self.all.down))
        inner = self.all.gate(int8_experts_small_m(x, *gate_up, self._bias("gate_up", x), chosen))
        out = int8_experts_small_m(inner, *down, self._bias("down", x), chosen, weights.float())
        return added(out, chosen, x.dtype)

    @staticmethod
    def _parts(linear: nn.Linear) -> tuple[Tensor, Tensor, Tensor]:
        weight: IntxUnpackedToInt8Tensor = linear.weight
        return weight.qdata, weight.scale, weight.zero_point

    def _bias(self, name: str, x: Tensor) -> Tensor:
        """Return the biases [experts, N] of ``gate_up`` or ``down``, zeros if there are none."""
        count = self.all.count
        if self.all.gate_up.bias is None:
            return x.new_zeros(count, 2 * self.all.width if name == "gate_up" else x.shape[1])
        return self.all.gate_up.bias.unflatten(0, (count, -1)) if name == "gate_up" else self.all.down_bias
