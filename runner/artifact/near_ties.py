"""How far two logits of an artifact may move against each other by rounding alone.

Kernels of one row and of several add in different orders, so that of two logits that are nearly tied either may come
out first.
"""

from pathlib import Path

from eagle3.runner.artifact.record import read_export
from eagle3.runner.contract import Metadata

NEAR_TIE = 1e-3
"""In standard deviations of the logits: what rounding in float32 adds up to."""
QUANTIZED_NEAR_TIE = 0.1
"""The same where activations are quantized: what rounds differently may turn a code of 8 bits, and codes after it,
until logits differ by what 8 bits lose. On gemma4-tiny, over 8,096 rows of windows against steps, the two best logits
moved by up to 0.051 against each other; 8da4w chose another token 22 times, up to 0.011 behind, 8da8w never. On random
models of 3 to 48 layers they moved by up to 0.14, whatever the depth."""


def near_tie(qlinear: str | None) -> float:
    """The tolerance for weights quantized by the recipe ``qlinear``, before a model's own is measured."""
    return QUANTIZED_NEAR_TIE if (qlinear or "").startswith("8da") else NEAR_TIE


def near_tie_of(metadata: Metadata, folder: Path | None) -> float:
    """The tolerance of an artifact: what the check after its export measured, where ``export.json`` has it."""
    least = near_tie(metadata.manifest.get("qlinear"))
    check = {} if folder is None else read_export(folder).get("check")
    measured = check.get("tolerance") if isinstance(check, dict) else None
    return max(least, measured) if isinstance(measured, float) else least
