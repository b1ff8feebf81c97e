"""Faults in what recurrent layers share: positions, rings, the commit, the saved state, and the rows of a window."""

import torch

from eagle3.targets import recurrent
from eagle3.targets.gated_delta import GatedDeltaState
from eagle3.targets.mamba2 import Mamba2State
from eagle3.targets.recurrent import RecurrentPositions, RecurrentState, Ring, window_masks
from eagle3.targets.spec import ROLLBACK_ROWS


def committed_short(monkeypatch):
    original = RecurrentPositions.rows

    def rows(self, input_pos):
        found = original(self, input_pos)
        live = found.live.clone()
        live[-1] = False
        return found._replace(live=live)

    monkeypatch.setattr(RecurrentPositions, "rows", rows)


def committed_twice(monkeypatch):
    """Fault: committed changes are applied again."""
    original = RecurrentPositions.rows

    def rows(self, input_pos):
        found = original(self, input_pos)
        return found._replace(live=found.before >= 0)

    monkeypatch.setattr(RecurrentPositions, "rows", rows)


def masked_rows_are_read(monkeypatch):
    """Fault: changes that must not be committed count, and rows before position 0."""
    original = Ring.read
    monkeypatch.setattr(Ring, "read", lambda self, positions, live: original(self, positions, live | True))


def rejected_rows_commit(monkeypatch):
    original = RecurrentPositions.advance

    def advance(self, rows):
        valid = original(self, rows)
        if rows.from_saved is None:
            self.committed.add_(1)
        return valid

    monkeypatch.setattr(RecurrentPositions, "advance", advance)


def ring_too_short(monkeypatch):
    monkeypatch.setattr(Ring, "_slots", lambda self, positions: (positions + self.slots) % (self.slots - 1))


def ring_of_the_window_alone(monkeypatch):
    """Fault: the convolution's rows before the oldest live row are overwritten."""
    monkeypatch.setattr(Ring, "_slots", lambda self, positions: (positions + ROLLBACK_ROWS) % (ROLLBACK_ROWS // 2))


def decay_after_the_update(monkeypatch):
    original = RecurrentState._behind

    def behind(self, state, key, update, decay):
        return original(self, state, key, update * decay.exp().unsqueeze(-1), decay)

    monkeypatch.setattr(RecurrentState, "_behind", behind)


def undecayed_changes(monkeypatch):
    monkeypatch.setattr(recurrent, "decay_behind", torch.ones_like)


def convolution_one_off(monkeypatch):
    original = RecurrentState.with_earlier

    def with_earlier(self, mixed, rows):
        return original(self, mixed, rows._replace(before=rows.before - 1))

    monkeypatch.setattr(RecurrentState, "with_earlier", with_earlier)


def convolution_of_the_live_rows_alone(monkeypatch):
    """Fault: the saved state's convolution rows are not used."""
    original = RecurrentState.with_earlier

    def with_earlier(self, mixed, rows):
        if rows.from_saved is not None:
            rows = rows._replace(from_saved=torch.zeros_like(rows.from_saved))
        return original(self, mixed, rows)

    monkeypatch.setattr(RecurrentState, "with_earlier", with_earlier)


def saved_state_of_another_turn(monkeypatch):
    original = RecurrentState.forward

    def forward(self, *given):
        saved = self.saved.clone()
        out = original(self, *given)
        self.saved.copy_(saved)
        return out

    monkeypatch.setattr(RecurrentState, "forward", forward)


def saved_state_never_taken(monkeypatch):
    original = RecurrentState.forward

    def forward(self, given, rows):
        if rows.from_saved is not None:
            rows = rows._replace(from_saved=torch.zeros_like(rows.from_saved))
        return original(self, given, rows)

    monkeypatch.setattr(RecurrentState, "forward", forward)


def first_state_not_forgotten(monkeypatch):
    original = RecurrentPositions.rows
    monkeypatch.setattr(
        RecurrentPositions,
        "rows",
        lambda self, input_pos: original(self, input_pos)._replace(started=torch.ones(1, dtype=torch.bool)),
    )


def keys_of_the_next_head(monkeypatch):
    """Fault: the heads are repeated one after the other, and not each several times in turn."""

    def for_values(self, heads):
        return heads.repeat(self.value_heads // self.key_heads, *[1] * (heads.dim() - 1))

    monkeypatch.setattr(RecurrentState, "_for_values", for_values)


def chunk_keeps_one_row_less(monkeypatch):
    original = RecurrentState._keep

    def keep(self, positions, given, update, earlier):
        original(self, positions[1:], tuple(each[:, 1:] for each in given), update[:, 1:], earlier)

    monkeypatch.setattr(RecurrentState, "_keep", keep)


def updates_without_the_rows_before(monkeypatch):
    """Fault: the triangular system of a window is replaced by the unit matrix."""
    original = GatedDeltaState._window

    def window(self, given, state, masks):
        alone = window_masks(torch.arange(1))
        rows = range(given[0].shape[1])
        parts = [original(self, tuple(each[:, row : row + 1] for each in given), state, alone) for row in rows]
        return tuple(torch.cat(each, dim=1) for each in zip(*parts, strict=True))

    monkeypatch.setattr(GatedDeltaState, "_window", window)


def state_of_the_window_kept(monkeypatch):
    """Fault: rows that may be rejected change the state."""
    for rule in (GatedDeltaState, Mamba2State):

        def window(self, given, state, masks, original=rule._window):
            out, update = original(self, given, state, masks)
            state.copy_(self._behind(state, given[1], update, given[3]))
            return out, update

        monkeypatch.setattr(rule, "_window", window)


SHARED = (
    committed_short,
    committed_twice,
    masked_rows_are_read,
    rejected_rows_commit,
    ring_too_short,
    ring_of_the_window_alone,
    decay_after_the_update,
    undecayed_changes,
    convolution_one_off,
    convolution_of_the_live_rows_alone,
    saved_state_of_another_turn,
    saved_state_never_taken,
    first_state_not_forgotten,
    keys_of_the_next_head,
    chunk_keeps_one_row_less,
)
