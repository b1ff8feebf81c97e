"""Mixture of experts as two linear layers over all experts, with shapes that do not depend on the routing.

transformers loops over the chosen experts, which a trace cannot follow. Here every row goes through every expert, and
its output has weight zero if the router did not choose the expert. A backend may compute less: it finds the ``Experts``
in a model, whose inputs include the choice (``eagle3.export.lowering.cuda.weights.experts``).

On the CPU this is the best way. The rows of one verify window use most of 8 or 16 experts, and 32 of 128. Gathering the
chosen matrices would read, write and read them again, take gigabytes for a chunk of prefill, and need a second copy of
the weights in addition to the one that XNNPACK packs for prefill.
"""

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import activations
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts, Llama4TextMoe

Flatten = Callable[[Tensor], Tensor]


class Experts(nn.Module):
    """Replaces ``stacked``: one linear ``gate_up`` with the rows of all experts, one linear ``down`` with their
    columns.

    Args:
        stacked: a module of transformers with ``gate_up_proj`` [experts, 2 * width, hidden], ``down_proj``
            [experts, hidden, width], and possibly ``gate_up_proj_bias`` [experts, 2 * width] and ``down_proj_bias``
            [experts, hidden]; these are deleted from it. Experts without a gate have ``up_proj`` [experts, width,
            hidden] in place of ``gate_up_proj``, and ``gate_up`` then has those rows.
        transposed: the last two dimensions of its weights are swapped
        gate: the gated activation, [..., 2 * width] -> [..., width], or the activation where there is no gate
        weighs_inputs: a row is multiplied by its routing weight before the expert, not after it
    """

    def __init__(self, stacked: nn.Module, transposed: bool, gate: Callable[[Tensor], Tensor], weighs_inputs: bool):
        super().__init__()
        self.count, *shape = stacked.get_parameter("down_proj").shape
        hidden, self.width = reversed(shape) if transposed else shape
        self.has_gate = hasattr(stacked, "gate_up_proj")
        self.first = "gate_up_proj" if self.has_gate else "up_proj"
        bias = hasattr(stacked, f"{self.first}_bias")
        self.gate_up = nn.Linear(hidden, self.count * (1 + self.has_gate) * self.width, bias=bias)
        self.down = nn.Linear(self.count * self.width, hidden, bias=False)
        if bias:
            self.down_bias = nn.Parameter(torch.empty(self.count, hidden))
        self.transposed, self.gate, self.weighs_inputs = transposed, gate, weighs_inputs
        for name in list(stacked._parameters):
            delattr(stacked, name)  # the module itself stays, because the gate is a method of it

    def sources(self) -> Iterator[tuple[str, str, Flatten]]:
        """Yield for each tensor: its name in transformers' module, its name here, and the function that converts it."""

        def gate_up(stacked: Tensor) -> Tensor:
            return (stacked.transpose(1, 2) if self.transposed else stacked).flatten(0, 1)

        def down(stacked: Tensor) -> Tensor:
            return (stacked.permute(2, 0, 1) if self.transposed else stacked.transpose(0, 1)).flatten(1)

        yield self.first, "gate_up.weight", gate_up
        yield "down_proj", "down.weight", down
        if self.gate_up.bias is not None:
            yield f"{self.first}_bias", "gate_up.bias", torch.flatten
            yield "down_proj_bias", "down_bias", lambda bias: bias

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Map x [T, hidden], chosen int64 [T, k] and weights [T, k] to [T, hidden]."""
        each = self.by_expert(chosen, weights.to(x.dtype))
        inner = self.gate_up(x).unflatten(-1, (self.count, -1))  # [T, experts, 2 * width]
        # Without a bias, weighting the input is the same as weighting the output of gate_up.
        inner = self.gate(inner * each[..., None]) if self.weighs_inputs else self.gate(inner) * each[..., None]
        return self.finished(inner, each)

    def by_expert(self, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weights [T, k] in the columns of their experts, [T, experts], with 0 elsewhere."""
        return weights.new_zeros(weights.shape[0], self.count).scatter(1, chosen, weights)

    def finished(self, inner: Tensor, each: Tensor) -> Tensor:
        """Return the output [T, hidden] from weighted gated activations [T, experts, width] and the weights [T,
        experts]."""
        out = self.down(inner.flatten(1))
        return out if self.gate_up.bias is None else out + each @ self.down_bias


class Router(nn.Linear):
    """A linear that scores experts. It is not quantized, like routers that are not linears, since recipes cover only
    ``nn.Linear`` itself."""


def use_experts(model: nn.Module) -> dict[str, tuple[str, Flatten]]:
    """Replace transformers' own experts by ``Experts`` and routers that are linears by ``Router``, on the meta device.

    Returns for each tensor that they held its new name and the function that converts it. Raises ValueError for an
    unknown kind of experts, and for experts whose activation has weights.
    """
    replaced: dict[str, tuple[str, Flatten]] = {}
    for path, parent in list(model.named_modules()):
        if isinstance(parent, Gemma4TextRouter):
            with torch.device("meta"):
                parent.proj = Router(parent.proj.in_features, parent.proj.out_features, bias=False)
        for name, child in list(parent.named_children()):
            with torch.device("meta"):
                experts = _experts_for(child)
            if experts is None:
                continue
            _refuse_learnt_activation(model, child)
            setattr(parent, name, experts)
            if isinstance(parent, Llama4TextMoe):
                parent.forward = MethodType(_llama4_forward, parent)
            prefix = f"{path}.{name}"
            replaced |= {f"{prefix}.{was}": (f"{prefix}.{own}", flatten) for was, own, flatten in experts.sources()}
    return replaced


def _refuse_learnt_activation(model: nn.Module, stacked: nn.Module) -> None:
    """Raise ValueError for experts whose activation has weights (xIELU), since ``Experts`` loads only matrices."""
    for activation in stacked.children():
        if type(activation).__module__ == activations.__name__ and (names := dict(activation.named_parameters())):
            config: Any = model.config
            field = next(name for name in ("hidden_act", "hidden_activation") if hasattr(config, name))
            raise ValueError(
                f"{field} = {getattr(config, field)!r}: this value is not supported in experts, because it has weights "
                f"of its own ({', '.join(names)}): activations without weights are, such as silu and gelu"
            )


def _experts_for(module: nn.Module) -> Experts | None:
    """Return the replacement for a module of experts, None for any other module."""
    if isinstance(module, Llama4TextExperts):
        return Experts(module, True, MethodType(_llama4_gate, module), weighs_inputs=True)
    if not hasattr(type(module), "_apply_gate"):  # set by transformers' decorator for experts, or by the class itself
        return None
    stacked: Any = module
    name = type(module).__name__
    if not hasattr(stacked, "has_gate"):  # only the decorator tells the layout of the weights
        raise ValueError(f"its experts ({name}) do not say how their weights lie: not supported")
    if stacked.has_post_expert_norm:
        raise ValueError(f"its experts ({name}) have a norm of their own: not supported")
    gate = stacked._apply_gate if stacked.has_gate else stacked.act_fn
    return Experts(stacked, stacked.is_transposed, gate, weighs_inputs=False)


def _llama4_gate(experts: Llama4TextExperts, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return up * experts.act_fn(gate)


def _llama4_forward(self: Llama4TextMoe, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces ``Llama4TextMoe.forward``, which gives every row to every expert, with zeros for rows that were not
    routed to it."""
    x = hidden_states.reshape(-1, self.hidden_dim)
    logits = F.linear(x, self.router.weight)
    best, chosen = torch.topk(logits, self.top_k, dim=1)
    routed = self.experts(x, chosen, torch.sigmoid(best.float()).to(x.dtype))
    return self.shared_expert(x) + routed, logits
