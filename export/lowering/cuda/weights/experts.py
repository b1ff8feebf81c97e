"""Computes mixtures of experts on CUDA so that a verify reads only the chosen experts' weights.

Some experts get INT4 weights in groups of 32 without zero points, whatever the recipe says for other weights: those
without biases and limits whose gate is SiLU or GELU (tanh) of one half, times the other half. Their prefill also reads
only the chosen experts. Other experts are linears over all experts. If these linears are INT8 (gpt-oss' gate and up), a
verify reads only the chosen experts' rows of them.
"""

import torch
from executorch.extension.llm.export.int4 import ExportableInt4Tensor
from executorch.extension.llm.export.quant import QuantConfig, QuantRule
from torch import Tensor, nn
from torchao.quantization import IntxUnpackedToInt8Tensor

from eagle3.export.configuration.backends import SMALL_M_ROWS
from eagle3.export.lowering.cuda.kernels.int4_experts import GROUP, ZERO, int4_experts_small_m
from eagle3.export.lowering.cuda.kernels.int8_experts import int8_experts_small_m
from eagle3.export.lowering.cuda.kernels.sorted_experts import sorted_experts
from eagle3.export.lowering.cuda.kernels.sums import GELU_TANH, SILU, gated
from eagle3.export.lowering.cuda.weights.traced_rows import most_rows
from eagle3.targets.experts import Experts, Router

SYMMETRIC = QuantConfig(bits=4, group_size=GROUP, symmetric=True, method="min_max")


def expert_rules(model: nn.Module) -> list[QuantRule]:
    """Return the quantization rules for experts with kernels, and for routers, which are not quantized."""
    fused = [name for name, module in model.named_modules() if isinstance(module, Experts) and fused_activation(module)]
    routers = [name for name, module in model.named_modules() if isinstance(module, Router)]
    routers += [f"{name.rpartition('.')[0]}.router" for name in fused]  # the router of Llama 4
    rules = [QuantRule(rf"(.*\.)?{name}\.weight", None) for name in routers]
    return rules + [QuantRule(rf"(.*\.)?{name}\.(gate_up|down)\.weight", SYMMETRIC) for name in fused]


def fused_linears(model: nn.Module) -> set[str]:
    """Return the names of the linears of experts with kernels, which take any multiple of 32 inputs."""
    modules = model.named_modules(remove_duplicate=False)
    fused = [name for name, module in modules if isinstance(module, Experts) and fused_activation(module)]
    return {f"{name}.{linear}" for name in fused for linear in ("gate_up", "down")}


def fused_activation(experts: Experts) -> str | None:
    """Return the activation with which the INT4 kernels compute these experts; None if the kernels cannot."""
    whole_groups = experts.width % GROUP == 0 and experts.gate_up.in_features % GROUP == 0
    fits = whole_groups and experts.has_gate and experts.gate_up.bias is None
    return activation_of(experts) if fits else None


def activation_of(experts: Experts) -> str | None:
    """Return the activation of the experts' gate, which is recognized by its results; None for any other gate."""
    # to 1,000, which is beyond any model's limit
    gate = (torch.linspace(-10, 10, 64) ** 3)[:, None].expand(-1, experts.width)
    up = (torch.linspace(-10, 10, experts.width) ** 3).expand_as(gate)
    gate_up = torch.cat([gate, up], -1)
    found, room = experts.gate(gate_up), 1e-5 * (1 + (gate * up).abs())
    return next((name for name in (SILU, GELU_TANH) if ((found - gated(gate_up, name)).abs() <= room).all()), None)


def use_fused_experts(model: nn.Module) -> None:
    """Replace every ``Experts`` whose weights are quantized by ``expert_rules``."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, Experts):
                continue
            weight, biased = child.gate_up.weight, child.gate_up.bias is not None
            if isinstance(weight, ExportableInt4Tensor) and (activation := fused_activation(child)):
                setattr(parent, name, FusedExperts(child, activation))
            elif isinstance(weight, IntxUnpackedToInt8Tensor) and biased and _is_taken(child):
                setattr(parent, name, Int8Experts(child))


def _is_taken(experts: Experts) -> bool:
    """Return True if ``Int8Experts`` can compute these experts: the groups are of 32, and outputs rather than inputs
    are weighted."""
    weight: IntxUnpackedToInt8Tensor = experts.gate_up.weight
    return weight.scale.shape[1] * GROUP == weight.shape[1] and not experts.weighs_inputs


def added(out: Tensor, chosen: Tensor, dtype: torch.dtype) -> Tensor:
    """Add the outputs of each row's experts: [T * k, hidden] -> [T, hidden]. They are added one after the other,
    because a reduction would use a program for each of these short sums."""
    each = out.float().unflatten(0, (-1, chosen.shape[1])).unbind(1)
    return sum(each[1:], each[0]).to(dtype)


class FusedExperts(nn.Module):
    """Computes ``Experts`` by kernels that read only the chosen experts' weights.

    ``gate_up`` [experts, 2 * width, hidden / 2] and ``down`` [experts, hidden, width / 2] hold two codes per byte, the
    even column in the low nibble, with a scale for each 32 columns: [experts, columns / 32, rows].
    """

    gate_up: Tensor
    gate_up_scale: Tensor
    down: Tensor
    down_scale: Tensor

    def __init__(self, experts: Experts, activation: str):
        super().__init__()
        self.count, self.weighs_inputs, self.gate = experts.count, experts.weighs_inputs, experts.gate
        self.activation = activation
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
        """Map x [T, hidden], chosen int64 [T, k] and weights [T, k] to [T, hidden]."""
        factors = weights.float()
        if self.weighs_inputs:
            x = (x[:, None] * weights[..., None].to(x.dtype)).flatten(0, 1)  # one row for each choice
            factors = torch.ones_like(factors)
        gate_up, down = (self.gate_up, self.gate_up_scale), (self.down, self.down_scale)
        most = most_rows(chosen.shape[0])
        if most <= SMALL_M_ROWS[-1]:
            out = int4_experts_small_m(x, *gate_up, *down, chosen, factors, self.activation)
        else:
            out = sorted_experts(x, gate_up, down, chosen, factors, self.gate, most)
        return added(out, chosen, x.dtype)


class Int8Experts(nn.Module):
    """Computes ``Experts`` that have biases and INT8 gate and up. For few rows the kernel computes gate and up of the
    chosen experts only; everything else is computed over all experts."""

    def __init__(self, experts: Experts):
        super().__init__()
        self.all = experts

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Map x [T, hidden], chosen int64 [T, k] and weights [T, k] to [T, hidden]."""
        experts = self.all
        weight: IntxUnpackedToInt8Tensor = experts.gate_up.weight
        if most_rows(x.shape[0]) > SMALL_M_ROWS[-1]:
            return experts(x, chosen, weights)
        parts = weight.qdata, weight.scale, weight.zero_point
        inner = int8_experts_small_m(x, *parts, experts.gate_up.bias.unflatten(0, (experts.count, -1)), chosen)
        inner = experts.gate(inner).unflatten(0, (-1, chosen.shape[1])) * weights[..., None].to(x.dtype)
        rows = torch.arange(x.shape[0], device=x.device)[:, None].expand_as(chosen)
        placed = x.new_zeros(x.shape[0], experts.count, experts.width).index_put((rows, chosen), inner)
        return experts.finished(placed, experts.by_expert(chosen, weights.to(x.dtype)))
