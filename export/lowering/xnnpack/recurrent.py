"""Adapts recurrent layers to the CPU: rings are written in place, and ExecuTorch's own operators compute most of a
prefill chunk.

``index_copy_`` would lower to an ``index_put`` that copies a whole ring. The reference loops over parts of a chunk,
which needs a length that is known during the trace.
"""

import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401  (registers torch.ops.llama)
import torch
from torch import Tensor, nn

from eagle3.targets.gated_delta import GatedDeltaState
from eagle3.targets.kimi_delta import KimiDeltaState
from eagle3.targets.recurrent import Given, Masks, Ring


class InPlaceRing(Ring):
    """A ring that is written in place, by ``llama::update_cache_with_indices``."""

    def _write(self, rows: Tensor, slots: Tensor) -> None:
        torch.ops.llama.update_cache_with_indices(rows.contiguous(), self.rows, 0, slots[None])


class SequentialState(GatedDeltaState):
    """A recurrent state that computes the committed rows one after the other, by ``llama::gated_delta_rule``, which
    takes a decay for each head or for each of its key channels."""

    def _bulk(self, given: Given, state: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value, decay, beta = given
        return _row_by_row(self._for_values(query), self._for_values(key), value, decay.exp(), beta, state)


class SequentialKimiState(SequentialState, KimiDeltaState):
    """Such a state with a decay for each key channel. Windows too are computed by the operator, since products that
    decay by channel have two dynamic dimensions, which XNNPACK does not reshape."""

    def _window(self, given: Given, state: Tensor, masks: Masks) -> tuple[Tensor, Tensor]:  # noqa: ARG002 - not needed
        """Return outputs and updates of rows that follow ``state``.

        The operator gets two rows for each. The first decays the state and reads what its key holds, which the update
        replaces. The second updates the state and reads what its query gets.
        """
        query, key, value, decay, beta = given
        none, every = torch.zeros_like(beta), torch.ones_like(decay)
        doubled = ((key, query), (key, key), (value, value), (decay.exp(), every), (none, beta))
        rows = (torch.stack(pair, dim=2).flatten(1, 2) for pair in doubled)
        out, _ = _row_by_row(*rows, state)
        held, out = out.unflatten(1, (-1, 2)).unbind(2)
        return out, (value - held) * beta.unsqueeze(-1)


def _row_by_row(*given: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs and the state of ``llama::gated_delta_rule``, which takes a batch: here of one."""
    out, state = torch.ops.llama.gated_delta_rule(*(each.unsqueeze(0).contiguous() for each in given))
    return out[0], state[0]


ON_THE_CPU = {Ring: InPlaceRing, GatedDeltaState: SequentialState, KimiDeltaState: SequentialKimiState}


def use_cpu_recurrence(model: nn.Module) -> None:
    """Make the recurrent layers of ``model`` use ExecuTorch's operators, in place."""
    for module in model.modules():
        module.__class__ = ON_THE_CPU.get(type(module), type(module))
