"""The tolerance for near-ties: how far rounding alone may move two logits of an artifact against each other.

A kernel for one row and a kernel for several rows add in different orders. If two logits are nearly equal, either may
come out larger.
"""

from pathlib import Path

from eagle3.runner.artifact.record import read_export
from eagle3.runner.contract import Metadata

NEAR_TIE = 1e-3
"""The effect of rounding in float32, in standard deviations of the logits."""
QUANTIZED_NEAR_TIE = 0.1
"""The same for quantized activations. A rounding difference may change an 8-bit code, and codes after it, until the
logits differ by the error of 8 bits. Measured on gemma4-tiny, over 8,096 rows, verify windows against single steps: the
two best logits moved by up to 0.051 against each other; 8da4w chose another token 22 times, whose logit was up to 0.011
lower; 8da8w never did. On random models of 3 to 48 layers the two moved by up to 0.14, at any depth."""


def near_tie(qlinear: str | None) -> float:
    """Return the tolerance for weights quantized by the recipe ``qlinear``, used until a model's own is measured."""
    return QUANTIZED_NEAR_TIE if (qlinear or "").startswith("8da") else NEAR_TIE


def near_tie_of(metadata: Metadata, folder: Path | None) -> float:
    """Return the tolerance of an artifact: the one that the check after its export measured, if ``export.json`` has it
    and it is larger than the recipe's."""
    least = near_tie(metadata.manifest.get("qlinear"))
    check = {} if folder is None else read_export(folder).get("check")
    measured = check.get("tolerance") if isinstance(check, dict) else None
    return max(least, measured) if isinstance(measured, float) else least
