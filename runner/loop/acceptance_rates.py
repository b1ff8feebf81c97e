"""Counts how often the draft's proposals are accepted, position by position."""

MEMORY, USUAL_MEMORY = 16, 1024
"""The rounds after which an outcome weighs 1/e as much: in the rates of this text, and in the usual rates of all texts.
"""
PRIOR, PRIOR_WEIGHT = 0.8, 4
"""The acceptance rate before any outcome, and the weight of an expected rate, counted in outcomes."""

Counts = list[tuple[float, float]]
"""Accepted and observed proposals at each position."""


class AcceptanceRates:
    """Acceptance rates of this text. A rate with few outcomes in this text is pulled towards the usual rate of all
    texts; a usual rate with few outcomes is pulled towards the usual rate of the position before.
    """

    def __init__(self, longest: int, prior: float = PRIOR):
        """``longest``: the most proposals of a round; ``prior``: the rate before any outcome"""
        self._prior = prior
        self._usual: Counts = [(0.0, 0.0)] * longest
        self.forget_text()

    def forget_text(self) -> None:
        """Forget this text's rates: another text may follow."""
        self._tokens: list[float] = []
        self._now: Counts = [(0.0, 0.0)] * len(self._usual)

    def record(self, proposed: int, accepted: int) -> None:
        """Count the outcomes of a round. A round without proposals leaves the rates as they are."""
        if proposed:
            self._tokens = []
            self._usual = counted(self._usual, proposed, accepted, 1 - 1 / USUAL_MEMORY)
            self._now = counted(self._now, proposed, accepted, 1 - 1 / MEMORY)

    def tokens(self) -> list[float]:
        """Return the tokens that a round of each length is expected to yield, from length 0 on."""
        if self._tokens:
            return self._tokens
        tokens, reached, usual = [1.0], 1.0, self._prior
        for usual_counts, counts in zip(self._usual, self._now, strict=True):
            usual = rate(usual_counts, usual)
            reached *= rate(counts, usual)
            tokens.append(tokens[-1] + reached)
        self._tokens = tokens
        return tokens


def rate(counts: tuple[float, float], expected: float) -> float:
    return (counts[0] + PRIOR_WEIGHT * expected) / (counts[1] + PRIOR_WEIGHT)


def counted(counts: Counts, proposed: int, accepted: int, decay: float) -> Counts:
    """Return ``counts`` after another round. A proposal is observed if all before it were accepted."""
    observed = min(accepted + 1, proposed)
    return [(a * decay + (at < accepted), o * decay + (at < observed)) for at, (a, o) in enumerate(counts)]
