"""What a session's two KV caches hold, so that a prompt which begins alike is not computed again."""

from collections.abc import Sequence

from eagle3.runner.contract import Metadata


class CachedTokens:
    """``tokens`` are known, and the target's cache holds all of them but the last. The draft's slot p pairs the
    target's feature at p with token p + 1; ``draft_slots`` of them are written with the target's own features.

    The loop says what it writes, before it does: whatever interrupts it, what is said to be there is there.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.draft_slots = 0
        self._highest = -1

    def clear(self) -> None:
        self.tokens, self.draft_slots, self._highest = [], 0, -1

    def reach(self, position: int) -> None:
        """A forward is going to write up to ``position``, which may be rejected later."""
        self._highest = max(self._highest, position)

    def reuse(self, prompt: Sequence[int], metadata: Metadata, draft: bool) -> int:
        """Keep as much of ``prompt`` as the caches hold and forget the rest; returns the positions kept.

        The prompt's last token is always computed again, for its logits; so is the last common one where its successor
        differs and ``draft`` is wanted, for the feature that its draft slot pairs with that successor.
        """
        common = common_prefix(prompt, self.tokens)
        kept = min(common, len(prompt) - 1, len(self.tokens) - 1)
        if draft:
            kept = min(kept, common - 1, self.draft_slots)
        windows = [metadata.sliding_window, *([metadata.draft_sliding_window] if draft else [])]
        if kept <= 0 or not all(still_held(kept, window, self._highest) for window in windows):
            self.clear()
            return 0
        self.tokens, self.draft_slots = self.tokens[: kept + 1], min(self.draft_slots, kept, common - 1)
        return kept


def still_held(position: int, window: int | None, highest: int) -> bool:
    """Whether the window before ``position`` is still in a ring of two windows that was written up to ``highest``.

    A slot holds the last position written into it; the ring's mask takes it for the last one that is not ahead.
    ``window`` 0: all is held; None: it is unknown.
    """
    if window is None:
        return False
    oldest = max(0, position - window + 1)
    return not window or oldest + 2 * window > highest


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that both begin with."""
    for index, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return index
    return min(len(a), len(b))
