"""The state of a recurrent layer, which rolls back as a KV cache does: by writing positions again.

A layer keeps one state, valid before position ``committed``. It also keeps rings by position with the change that each
later token made to the state: a rank-1 change (key, update, log decays), whose update was computed when the token was a
row of a forward. A forward first commits the changes from ``committed`` up to its first row's position. It then runs
its own rows, and leaves their changes in the rings. A rejected row never touches the state, and ``input_pos`` alone
tells which rows were accepted.

A chunk of more than ``ROLLBACK_ROWS`` rows, which only prefill has, commits all but its last ``ROLLBACK_ROWS`` rows. It
also saves that state: the next turn of a dialogue, whose prompt differs from the generated text from some position on,
continues from there.

A position before the committed one, other than the saved one, cannot be computed: its states are NaN.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
        slots = self._slots(positions)
        if len(positions) == self.slots:  # the whole ring
            return selected(self.rows[0, :, 0], slots, live)
        rows = self._read(slots)
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


Given = tuple[Tensor, ...]
"""The inputs of T rows, in float32: queries and keys [key heads, T, key size], values [value heads, T, value size], log
decays [value heads, T], or [value heads, T, key size] where each key channel has one of its own, and what else a rule
reads [value heads, T]."""


class StateSizes(NamedTuple):
    """The sizes of a recurrent layer's state and of the convolution before it."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    channels: int
    taps: int
    channel_decays: bool = False
    """True if each key channel of a head has a log decay of its own."""


class RecurrentState(nn.Module, ABC):
    """The state of one layer, in float32, and the changes that later tokens made to it. A subclass has the rule.

    ``state`` and ``saved`` are [value heads, key size, value size].
    """

    state: Tensor
    saved: Tensor
    saved_conv: Tensor

    def __init__(self, sizes: StateSizes):
        super().__init__()
        self.key_heads, self.value_heads = sizes.key_heads, sizes.value_heads
        self.earlier = sizes.taps - 1
        shape = sizes.value_heads, sizes.key_size, sizes.value_size
        self.register_buffer("state", torch.zeros(shape), persistent=False)
        self.register_buffer("saved", torch.zeros(shape), persistent=False)
        self.register_buffer("saved_conv", torch.zeros(self.earlier, sizes.channels), persistent=False)
        self.conv = Ring(ROLLBACK_ROWS + self.earlier, sizes.channels)
        # Key, update and log decays of a token are stored in one row, which is written at once.
        self.channel_decays = sizes.channel_decays
        decays = self.value_heads * (sizes.key_size if sizes.channel_decays else 1)
        self.parts = self.key_heads * sizes.key_size, self.value_heads * sizes.value_size, decays
        self.changes = Ring(ROLLBACK_ROWS, sum(self.parts))

    def with_earlier(self, mixed: Tensor, rows: RecurrentRows) -> Tensor:
        """Return the earlier rows of the convolution's inputs followed by ``mixed`` [1, channels, T], and keep the new
        ones."""
        positions = rows.before[-self.earlier :]
        earlier = self.conv.read(positions, positions >= 0)
        if rows.from_saved is not None:
            earlier = torch.where(rows.from_saved[:, None], self.saved_conv, earlier)
        both = torch.cat((earlier.to(mixed.dtype), mixed[0].T))  # [taps - 1 + T, channels]
        if rows.is_chunk:
            kept = both[rows.length - ROLLBACK_ROWS :]
            self.conv.write(rows.input_pos[-1:] + torch.arange(1 - kept.shape[0], 1), kept.float())
            self.saved_conv.copy_(kept[: self.earlier])
        else:  # the earlier rows are in the ring already, in other slots
            self.conv.write(rows.input_pos, both[self.earlier :].float())
        return both.T.unsqueeze(0)

    def forward(self, given: Given, rows: RecurrentRows) -> Tensor:
        """Run the rows of a forward. Returns outputs [value heads, T, value size]."""
        state = self.state
        if rows.from_saved is not None:
            state = torch.where(rows.from_saved[:, None, None], self.saved, state)
        earlier = self.changes.read(rows.before, rows.live)
        state = self._at_first_row(state, earlier, rows)
        if not rows.is_chunk:
            out, update = self._window(given, state, rows.masks)
            self._keep(rows.input_pos, given, update, earlier)
            self.state.copy_(state)
            return out
        bulk = rows.length - ROLLBACK_ROWS
        out, state = self._bulk(tuple(each[:, :bulk] for each in given), state)
        last = tuple(each[:, bulk:] for each in given)
        tail, update = self._window(last, state, rows.masks)
        self._keep(rows.input_pos[-1:] + torch.arange(1 - ROLLBACK_ROWS, 1), last, update, earlier)
        self.state.copy_(state)
        self.saved.copy_(state.clone())  # the two buffers must not come from one tensor, which breaks to_edge
        return torch.cat((out, tail), dim=1)

    def _at_first_row(self, state: Tensor, earlier: Tensor, rows: RecurrentRows) -> Tensor:
        """Return ``state`` after the live changes before the first row, which one product for each head commits."""
        key, update, decay = earlier.split(self.parts, dim=-1)
        key, update = (
            each.unflatten(-1, (heads, -1)).transpose(0, 1)
            for each, heads in ((key, self.key_heads), (update, self.value_heads))
        )
        state = selected(state, torch.arange(self.value_heads, device=state.device), rows.started)
        decay = decay.unflatten(-1, (self.value_heads, -1)).transpose(0, 1) if self.channel_decays else decay.T
        return self._behind(state, key, update, decay)

    def _behind(self, state: Tensor, key: Tensor, update: Tensor, decay: Tensor) -> Tensor:
        """Return the state after the changes of T rows: key [key heads, T, key size], update [value heads, T, value
        size], log decays [value heads, T] (or a channel each)."""
        key = self._for_values(key).transpose(1, 2)
        return state * decay.sum(-1).exp()[:, None, None] + torch.bmm(key, update * decay_behind(decay).unsqueeze(-1))

    def _keep(self, positions: Tensor, given: Given, update: Tensor, earlier: Tensor) -> None:
        """Write the changes of T rows. ``earlier`` holds the rows that were read.

        The new rows are a slice of a tensor with an earlier one in it, so that the write depends on the read: a backend
        might otherwise write in place before it reads.
        """
        _, key, _, decay, *_ = given
        changes = torch.cat([each.transpose(0, 1).flatten(1) for each in (key, update, decay)], dim=-1)
        self.changes.write(positions, torch.cat((earlier[:1], changes))[1:])

    def _for_values(self, heads: Tensor) -> Tensor:
        """Repeat [key heads, ...] for the value heads that share each key head."""
        groups = self.value_heads // self.key_heads
        return heads if groups == 1 else heads.index_select(0, torch.arange(self.value_heads) // groups)

    @abstractmethod
    def _window(self, given: Given, state: Tensor, masks: Masks) -> tuple[Tensor, Tensor]:
        """Return outputs and updates [value heads, T, value size] of up to ``ROLLBACK_ROWS`` rows that follow
        ``state``."""

    @abstractmethod
    def _bulk(self, given: Given, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs [value heads, T, value size] of committed rows, and the state after them."""


def selected(table: Tensor, rows: Tensor, live: Tensor) -> Tensor:
    """Return the rows of ``table`` [N, ...] at ``rows`` (int64 [T]), zeros where ``live`` (bool [T] or [1]) is False.

    Memory is copied: an elementwise choice takes ExecuTorch eight times as long.
    """
    with_zeros = torch.cat((table, table.new_zeros(1, *table.shape[1:])))
    return with_zeros.index_select(0, torch.where(live, rows, table.shape[0]))


def decay_behind(decay: Tensor) -> Tensor:
    """Return the factors [..., T] by which the change of each row decays until the last row, from the logarithms
    ``decay`` [..., T]. They are sums of the later rows, and no difference of sums, which would round what is left."""
    later = F.pad(decay, (0, 1))[..., 1:]
    return later.flip(-1).cumsum(-1).flip(-1).exp()


def decay_between(decay: Tensor, lower: Tensor) -> Tensor:
    """Return the factors [..., T, T] by which a change decays from the row of its column to the row of its line, from
    the logarithms ``decay`` [..., T]; zeros above the diagonal. ``lower`` [T, T] is 1 on and below it.

    Each is a sum of the rows between. A difference of two sums from the first row has an error of float32's last place
    of these sums: 5e-4 with a log decay of -400.
    """
    below = 1 - lower.transpose(0, 1)
    return (decay.unsqueeze(-1) * below).cumsum(-2).exp() * lower
