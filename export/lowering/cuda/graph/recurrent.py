"""Recurrent layers on CUDA: one launch commits the accepted rows, runs those of a call and writes their changes."""

from torch import Tensor, nn

from eagle3.export.lowering.cuda.kernels.advance import advance
from eagle3.export.lowering.cuda.kernels.delta_rule import SLOTS, delta_chunk, delta_rows
from eagle3.targets.gated_delta import GatedDeltaState
from eagle3.targets.recurrent import Given, RecurrentPositions, RecurrentRows, Ring


class IndexedRing(Ring):
    """Reads without ``index_select``, which does not lower to CUDA without a GPU."""

    def _read(self, slots: Tensor) -> Tensor:
        return self.rows[0, :, 0][slots]


class CudaGatedDeltaState(GatedDeltaState):
    """A state that the kernels of ``delta_rule`` compute, over a ring of ``SLOTS`` slots."""

    def forward(self, given: Given, rows: RecurrentRows) -> Tensor:
        inputs = *(each.contiguous() for each in given), self.state
        at = rows.input_pos, rows.committed
        if rows.from_saved is None:
            out, state, changes = delta_rows(*inputs, self.changes.rows, *at)
        else:
            out, state, saved, changes = delta_chunk(*inputs, self.saved, self.changes.rows, *at, rows.from_saved)
            self.saved.copy_(saved)
        self.state.copy_(state)
        self.changes.rows.copy_(changes)
        return out


class CudaRecurrentPositions(RecurrentPositions):
    """Records the committed positions by the kernel of ``advance``."""

    def advance(self, rows: RecurrentRows) -> Tensor:
        valid, committed, saved = advance(rows.input_pos, self.committed, self.saved, rows.from_saved)
        self.committed.copy_(committed)
        if rows.from_saved is not None:
            self.saved.copy_(saved)
        return valid != 0


def use_cuda_recurrence(model: nn.Module) -> None:
    """Make the recurrent layers of ``model`` use the kernels, in place."""
    for module in list(model.modules()):
        if type(module) is GatedDeltaState:
            module.__class__ = CudaGatedDeltaState
            module.changes = Ring(SLOTS, sum(module.parts))
        elif type(module) is Ring:
            module.__class__ = IndexedRing
        elif type(module) is RecurrentPositions:
            module.__class__ = CudaRecurrentPositions
