"""Tracks the contents of a session's two KV caches, so that a common prefix of prompts is computed once."""

from collections.abc import Sequence
from typing import NamedTuple

from eagle3.runner.contract import Metadata


class Counters(NamedTuple):
    """The numbers of positions that ``CachedTokens`` keeps besides the tokens, 0 or more each."""

    draft_slots: int
    """Draft slots that were written with the target's own features."""
    slots: int
    """Positions that were written, up to the highest one."""
    committed: int
    saved: int
    """Positions before which the two states of recurrent layers are valid."""


class CachedTokens:
    """The tokens that the caches hold.

    The target's cache holds all ``tokens`` but the last. Slot p of the draft's cache pairs the target's feature at p
    with token p + 1. The first ``draft_slots`` slots were written with the target's own features.

    The loop registers a write before it makes it, so after an interruption the recorded contents are still valid.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.draft_slots = 0
        self._highest = -1
        self._committed = self._saved = 0

    def clear(self) -> None:
        self.tokens, self.draft_slots, self._highest = [], 0, -1
        self._committed = self._saved = 0

    @property
    def counters(self) -> Counters:
        return Counters(self.draft_slots, self._highest + 1, self._committed, self._saved)

    def restore(self, tokens: Sequence[int], counters: Counters) -> None:
        """Take over what another ``CachedTokens`` recorded for caches with the same contents."""
        self.tokens, self.draft_slots, self._highest = list(tokens), counters.draft_slots, counters.slots - 1
        self._committed, self._saved = counters.committed, counters.saved

    def reusable(self, prompt: Sequence[int], metadata: Metadata, draft: bool) -> int:
        """Return the number of positions that ``reuse`` would keep."""
        return self._kept(common_prefix(prompt, self.tokens), prompt, metadata, draft)

    def run(self, start: int, rows: int, rollback_rows: int | None) -> None:
        """Record that the target is about to compute ``rows`` rows from position ``start`` on.

        The states of recurrent layers then hold all positions before ``start``. A chunk longer than ``rollback_rows``
        also commits all of its rows but the last ``rollback_rows``, and saves the state at that point.
        """
        self.reach(start + rows - 1)
        if rollback_rows is not None and rows > rollback_rows:
            self._committed = self._saved = start + rows - rollback_rows
        else:
            self._committed = start

    def reach(self, position: int) -> None:
        """Record that a forward is about to write positions up to ``position``. They may be rejected later."""
        self._highest = max(self._highest, position)

    def reuse(self, prompt: Sequence[int], metadata: Metadata, draft: bool) -> int:
        """Keep the common prefix of ``prompt`` and the caches, forget the rest, and return the number of positions
        kept.

        The prompt's last token is always computed again, for its logits. With ``draft``, the last common token is
        computed again too if its successor differs, because its draft slot pairs its feature with the successor.
        Recurrent layers can continue from any position that they have not committed, or from the state that the last
        long chunk saved; only a long chunk reads that state. Sliding windows are checked last, at the position where
        the computation continues.
        """
        common = common_prefix(prompt, self.tokens)
        kept = self._kept(common, prompt, metadata, draft)
        if not kept:
            self.clear()
            return 0
        self.tokens, self.draft_slots = self.tokens[: kept + 1], min(self.draft_slots, kept, common - 1)
        return kept

    def _kept(self, common: int, prompt: Sequence[int], metadata: Metadata, draft: bool) -> int:
        """Return how many positions are kept of a prefix of ``common`` tokens; 0 if none can be."""
        kept = min(common, len(prompt) - 1, len(self.tokens) - 1)
        if draft:
            kept = min(kept, common - 1, self.draft_slots)
        if metadata.rollback_rows is not None and kept < self._committed:
            readable = self._saved <= kept and len(prompt) - self._saved >= metadata.min_prefill
            kept = self._saved if readable else 0
        windows = [metadata.sliding_window, *([metadata.draft_sliding_window] if draft else [])]
        return max(0, kept) if all(still_held(kept, window, self._highest) for window in windows) else 0


def still_held(position: int, window: int | None, highest: int) -> bool:
    """Return True if a ring buffer still holds the sliding window before ``position``. It has the size of two windows
    and was written up to position ``highest``.

    A slot holds the last position written into it. The ring's mask assumes that this is the slot's last position that
    is not after the query. ``window`` is 0 if there is no sliding window (the result is True), None if it is unknown
    (the result is False).
    """
    if window is None:
        return False
    oldest = max(0, position - window + 1)
    return not window or oldest + 2 * window > highest


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of two token sequences."""
    for index, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return index
    return min(len(a), len(b))
