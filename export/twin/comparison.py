"""Compares two computations of the same tensors."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

TOLERANCE = 1e-4
"""The largest allowed difference in float32, as a share of a tensor's standard deviation. A different order of
summation causes at most 1e-5. The smallest known effect of a wrong field is 3e-4, for the exact GELU in place of its
approximation."""
SEEDS = (0, 1)


@dataclass
class Comparison:
    """The largest difference for each name, in standard deviations of the expected tensor, and the position of the
    first difference over ``TOLERANCE``."""

    tokens: int
    largest: dict[str, float] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)

    def add(self, what: str, start: int, value: Tensor, expected: Tensor, whole: Tensor) -> None:
        """Compare ``value`` with ``expected`` [1, T, .]; both begin at position ``start``.

        The differences are divided by the standard deviation of ``whole``.
        """
        if value.shape != expected.shape:
            raise ValueError(f"{what} is {list(value.shape)}, expected {list(expected.shape)}")
        gap = ((value - expected).abs().amax(-1)[0] / whole.std().clamp_min(1e-9)).nan_to_num(float("inf"))
        self.largest[what] = max(self.largest.get(what, 0.0), float(gap.max()))
        over = (gap > TOLERANCE).nonzero()
        if len(over) and what not in self.first:
            self.first[what] = start + int(over[0])

    @property
    def difference(self) -> float:
        return max(self.largest.values())

    def worst(self) -> str:
        """Return a readable description of the earliest tensor that differs; taps come before logits."""
        over = [what for what, gap in self.largest.items() if gap > TOLERANCE]
        taps = sorted((what for what in over if what.startswith("tap ")), key=lambda what: int(what[4:]))
        what = (taps + over)[0]
        parts = [f"{name} off by {self.largest[name]:.2g} of its spread" for name in dict.fromkeys((what, "logits"))]
        return f"{' and '.join(parts)}, from position {self.first[what]} of {self.tokens} on"

    def as_json(self) -> dict[str, Any]:
        taps = [gap for what, gap in self.largest.items() if what != "logits"]
        return {
            "tokens": self.tokens,
            "logits": float(f"{self.largest['logits']:.1e}"),
            "states": float(f"{max(taps):.1e}"),
        }
