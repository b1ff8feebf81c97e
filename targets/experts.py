"""Experts in shapes that do not depend on what is routed where: all of them as two linear layers.

transformers loops over the experts that were chosen, which no trace can follow. Here every row goes through every
expert and is weighted with zero where it was not sent. A backend may do better: it finds the ``Experts`` of a model and
has what was chosen as their inputs (``eagle3.export.lowering.cuda.experts``).

On the CPU this is what to do. A verify window alone sends its rows to most of 8 or 16 experts, and to 32 of 128;
gathering the matrices that were chosen would read, write and read them again, hold gigabytes for a chunk of prefill,
and want a copy of the weights beside the one that XNNPACK packs for prefill.
"""

from collections.abc import Callable
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts, Llama4TextMoe


class Experts(nn.Module):
    """``gate_up`` of all experts below each other, ``down`` of all beside each other."""

    def __init__(self, stacked: nn.Module, transposed: bool, gate: Callable[[Tensor], Tensor], weighs_inputs: bool):
        """Take the weights out of ``stacked``, a module of transformers.

        Args:
            stacked: ``gate_up_proj`` [experts, 2 * width, hidden], ``down_proj`` [experts, hidden, width], and perhaps
                ``gate_up_proj_bias`` [experts, 2 * width], ``down_proj_bias`` [experts, hidden]
            transposed: the last two dimensions of the weights are the other way round
            gate: [..., 2 * width] -> [..., width]
            weighs_inputs: a row is multiplied with its weight before the expert and not after it
        """
        super().__init__()
        gate_up, down = (stacked.gate_up_proj.data, stacked.down_proj.data)
        if transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        self.count, hidden, self.width = down.shape
        bias = getattr(stacked, "gate_up_proj_bias", None)
        self.gate_up = _linear(gate_up.reshape(-1, hidden), None if bias is None else bias.data.reshape(-1))
        self.down = _linear(down.transpose(0, 1).reshape(hidden, -1))
        self.down_bias = getattr(stacked, "down_proj_bias", None)  # [experts, hidden]
        self.gate, self.weighs_inputs = gate, weighs_inputs
        for name in list(stacked._parameters):
            delattr(stacked, name)  # the gate is a method of it

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [T, hidden], chosen int64 [T, k], weights [T, k] -> [T, hidden]."""
        each = torch.zeros(x.shape[0], self.count, dtype=x.dtype, device=x.device)
        each = each.scatter(1, chosen, weights.to(x.dtype))
        inner = self.gate_up(x).unflatten(-1, (self.count, -1))  # [T, experts, 2 * width]
        each_inner = each[..., None]  # without a bias it is one whether inputs or products are weighted
        inner = self.gate(inner * each_inner) if self.weighs_inputs else self.gate(inner) * each_inner
        out = self.down(inner.flatten(1))
        return out if self.down_bias is None else out + each @ self.down_bias


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def use_experts(model: nn.Module) -> None:
    """Put ``Experts`` in the place of transformers' own, layer by layer. Raises ValueError for a kind that is not
    known."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Llama4TextExperts):
                setattr(parent, name, Experts(child, True, MethodType(_silu_gate, child), weighs_inputs=True))
                parent.forward = MethodType(_llama4_forward, parent)
            elif hasattr(type(child), "_apply_gate"):  # transformers' mark of stacked experts
                if not child.has_gate or child.has_post_expert_norm:
                    raise ValueError(f"its experts ({type(child).__name__}) have no gate, or a norm of their own")
                setattr(parent, name, Experts(child, child.is_transposed, child._apply_gate, weighs_inputs=False))


def _silu_gate(experts: nn.Module, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return up * experts.act_fn(gate)


def _llama4_forward(self: Llama4TextMoe, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """transformers' own gives each expert every row, with those that were not sent to it multiplied by zero."""
    x = hidden_states.reshape(-1, self.hidden_dim)
    logits = F.linear(x, self.router.weight)
    best, chosen = torch.topk(logits, self.top_k, dim=1)
    routed = self.experts(x, chosen, torch.sigmoid(best.float()).to(x.dtype))
    return self.shared_expert(x) + routed, logits
