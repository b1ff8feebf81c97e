"""The state of a recurrent layer, which rolls back as a KV cache does: by writing positions again.

A layer keeps one state, valid before position ``committed``. It also keeps rings by position with the change that each
later token made to the state: a rank-1 change (key, update, log decay), whose update was computed when the token was a
row of a forward. A forward first commits the changes from ``committed`` up to its first row's position. It then runs
its own rows, and leaves their changes in the rings. A rejected row never touches the state, and ``input_pos`` alone
tells which rows were accepted.

A chunk of more than ``ROLLBACK_ROWS`` rows, which only prefill has, commits all but its last ``ROLLBACK_ROWS`` rows. It
also saves that state: the next turn of a dialogue, whose prompt differs from the generated text from some position on,
continues from there.

A position before the committed one, other than the saved one, cannot be computed: its states are NaN.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from eagle3.targets.spec import ROLLBACK_ROWS


class Ring(nn.Module):
    """A ring of rows by position, [1, slots, 1, width], where slot = position modulo the number of slots."""

    rows: Tensor

    def __init__(self, slots: int, width: int):
        super().__init__()
        self.slots = slots
        self.register_buffer("rows", torch.zeros(1, slots, 1, width), persistent=False)

    def read(self, positions: Tensor, live: Tensor) -> Tensor:
        """Return the rows at ``positions`` [T], zeros where ``live`` (bool [T]) is False: [T, width].

        A row that is not live may never have been written, so its memory may hold anything.
        """
        rows = self._read(self._slots(positions))
        return torch.where(live[:, None], rows, torch.zeros((), dtype=rows.dtype))

    def write(self, positions: Tensor, rows: Tensor) -> None:
        """Write ``rows`` [T, width] at ``positions`` [T]: consecutive, and at most ``slots`` of them."""
        self._write(rows[None, :, None], self._slots(positions))

    def _read(self, slots: Tensor) -> Tensor:
        return self.rows[0, :, 0].index_select(0, slots)

    def _write(self, rows: Tensor, slots: Tensor) -> None:
        self.rows.index_copy_(1, slots, rows)

    def _slots(self, positions: Tensor) -> Tensor:
        """Positions are at least ``-slots``: ExecuTorch's remainder of a negative number is negative."""
        return (positions + self.slots) % self.slots


class Masks(NamedTuple):
    """Masks [R, R] of a window of R rows, 0 or 1 in float32."""

    unit: Tensor
    lower: Tensor
    """The diagonal and the entries below it."""
    pairs: tuple[Tensor, ...]
    """For each block size of 1, 2, 4, ... rows: in each two neighbouring blocks, the rows of the second in the columns
    of the first."""


def window_masks(index: Tensor) -> Masks:
    """Return the masks of rows numbered ``index`` [R], at most ``ROLLBACK_ROWS``."""
    row, column = index[:, None], index[None, :]
    pairs = []
    block = 1
    while block < ROLLBACK_ROWS:
        pairs.append(((row // (2 * block) == column // (2 * block)) & (row // block > column // block)).float())
        block *= 2
    return Masks((row == column).float(), (row >= column).float(), tuple(pairs))


class RecurrentRows(NamedTuple):
    """The values that all recurrent layers share in a forward over T rows."""

    input_pos: Tensor
    """int64 [T], consecutive."""
    before: Tensor
    """int64 [ROLLBACK_ROWS]: the positions before the first row, ascending."""
    live: Tensor
    """bool [ROLLBACK_ROWS]: True for the changes at ``before`` that must be committed."""
    committed: Tensor
    """int64 [1]: the position before which the state that the forward continues from is valid."""
    started: Tensor
    """bool [1]: True if there is a position before the first row."""
    from_saved: Tensor | None
    """bool [1]: True if the forward continues from the saved state; None in a forward whose rows can all be
    rejected."""
    masks: Masks
    """The masks of the rows that can be rejected."""

    @property
    def length(self) -> int:
        return self.input_pos.shape[0]

    @property
    def is_chunk(self) -> bool:
        """True if the forward commits some of its own rows. Only prefill has so many."""
        return self.from_saved is not None


class RecurrentPositions(nn.Module):
    """The positions ``committed`` and ``saved``, int64 [1] each, before which the two states of each recurrent layer
    are valid."""

    committed: Tensor
    saved: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("committed", "saved"):
            self.register_buffer(name, torch.zeros(1, dtype=torch.long), persistent=False)

    def rows(self, input_pos: Tensor) -> RecurrentRows:
        first = input_pos[:1]
        before = first + torch.arange(-ROLLBACK_ROWS, 0, device=input_pos.device)
        committed, from_saved = self.committed, None
        count = input_pos.shape[0] if input_pos.shape[0] <= ROLLBACK_ROWS else ROLLBACK_ROWS
        if input_pos.shape[0] > ROLLBACK_ROWS:
            from_saved = self._from_saved(first)
            committed = torch.where(from_saved, self.saved, committed)
        live = (before >= committed) & (before >= 0)
        masks = window_masks(torch.arange(count, device=input_pos.device))
        return RecurrentRows(input_pos, before, live, committed, first > 0, from_saved, masks)

    def _from_saved(self, first: Tensor) -> Tensor:
        return (first == self.saved) & (first < self.committed) & (first > 0)

    def advance(self, rows: RecurrentRows) -> Tensor:
        """Record what a forward has committed. Return whether its first position could be computed: bool [1]."""
        first = rows.input_pos[:1]
        valid = (first == 0) | ((first >= self.committed) & (first <= self.committed + ROLLBACK_ROWS))
        if rows.from_saved is None:
            self.committed.copy_(torch.where(valid, first, self.committed))
            return valid
        valid = valid | rows.from_saved
        end = rows.input_pos[-1:] + (1 - ROLLBACK_ROWS)
        self.committed.copy_(torch.where(valid, end, self.committed))
        self.saved.copy_(torch.where(valid, end, self.saved))
        return valid
