"""Recurrent layers on CUDA: one launch commits the accepted rows, runs those of a call and writes their changes."""

from typing import Any

from torch import Tensor, nn

from eagle3.export.lowering.cuda.kernels.advance import advance
from eagle3.export.lowering.cuda.kernels.recurrent import SLOTS, recurrent_chunk, recurrent_rows
from eagle3.targets.gated_delta import GatedDeltaState, KimiDeltaState
from eagle3.targets.mamba2 import Mamba2State
from eagle3.targets.recurrent import Given, RecurrentPositions, RecurrentRows, RecurrentState, Ring


class IndexedRing(Ring):
    """Reads without ``index_select``, which does not lower to CUDA without a GPU."""

    def _read(self, slots: Tensor) -> Tensor:
        return self.rows[0, :, 0][slots]


class KernelState(RecurrentState):
    """A state that the kernels of ``recurrent`` compute, over a ring of ``SLOTS`` slots."""

    def forward(self, given: Given, rows: RecurrentRows) -> Tensor:
        query, key, value, decay, *others = (each.contiguous() for each in given)
        beta = others[0] if others else None  # Mamba 2 has none
        inputs = query, key, value, decay, beta, self.state
        at = rows.input_pos, rows.committed
        if rows.from_saved is None:
            out, state, changes = recurrent_rows(*inputs, self.changes.rows, *at)
        else:
            out, state, saved, changes = recurrent_chunk(*inputs, self.saved, self.changes.rows, *at, rows.from_saved)
            self.saved.copy_(saved)
        self.state.copy_(state)
        self.changes.rows.copy_(changes)
        return out


class CudaGatedDeltaState(KernelState, GatedDeltaState):
    """A state of the gated delta rule."""


class CudaKimiDeltaState(KernelState, KimiDeltaState):
    """A state of Kimi's delta rule, whose channels have decays."""


class CudaMamba2State(KernelState, Mamba2State):
    """A state of Mamba 2."""


class CudaRecurrentPositions(RecurrentPositions):
    """Records the committed positions by the kernel of ``advance``."""

    def advance(self, rows: RecurrentRows) -> Tensor:
        valid, committed, saved = advance(rows.input_pos, self.committed, self.saved, rows.from_saved)
        self.committed.copy_(committed)
        if rows.from_saved is not None:
            self.saved.copy_(saved)
        return valid != 0


STATES: dict[type[nn.Module], Any] = {
    GatedDeltaState: CudaGatedDeltaState,
    KimiDeltaState: CudaKimiDeltaState,
    Mamba2State: CudaMamba2State,
}
"""The classes of states, by those that they replace."""


def use_cuda_recurrence(model: nn.Module) -> None:
    """Make the recurrent layers of ``model`` use the kernels, in place."""
    for module in list(model.modules()):
        if isinstance(module, RecurrentState) and type(module) in STATES:
            module.__class__ = STATES[type(module)]
            module.changes = Ring(SLOTS, sum(module.parts))
        elif type(module) is Ring:
            module.__class__ = IndexedRing
        elif type(module) is RecurrentPositions:
            module.__class__ = CudaRecurrentPositions
