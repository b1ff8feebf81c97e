"""Compares two computations of the same tensors."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle3.export.output.folder import is_full_disk
from eagle3.runner.system.machine import size_text

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


@contextmanager
def twin_folder() -> Iterator[Path]:
    """Yield a folder that is deleted at the end. Raises OSError if the disk is too full for the files written there.
    The error must name the disk, so that a full disk is not reported as a fault of the model.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="eagle3-twin-") as folder:
            yield Path(folder)
    except Exception as error:
        if not is_full_disk(error):
            raise
        place = tempfile.gettempdir()
        raise OSError(
            f"{place} is full ({size_text(shutil.disk_usage(place).free)} free), and the twin check writes small "
            "copies of the models there: make room, or set TMPDIR to another folder"
        ) from error
