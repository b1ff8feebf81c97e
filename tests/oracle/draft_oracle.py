"""Compares a small copy of a draft head with an independent computation, over chunks, steps and rollbacks: with plain
formulas, or for a Gemma 4 assistant with transformers' own class."""

from typing import Any

import dflash_oracle
import eagle_oracle
import mlp_oracle
import mtp_oracle

from eagle3.export.draft.common.description import DraftDescription
from eagle3.export.draft.kinds.gemma4_assistant import twin as assistant_twin
from eagle3.export.twin.comparison import TOLERANCE

ORACLES = {
    "Gemma 4 assistant": lambda draft, *_: assistant_twin.compare(draft),
    "MLP speculator": mlp_oracle.compare,
    "MTP": mtp_oracle.compare,
    **dict.fromkeys(("EAGLE", "EAGLE-3", "P-EAGLE"), eagle_oracle.compare),
    **dict.fromkeys(("DFlash", "DFlash2", "DSpark", "xPress", "Domino"), dflash_oracle.compare),
}


def check_draft(draft: DraftDescription, taps: int, norm_before_residual: bool | None = None) -> dict[str, Any]:
    """Compare a small copy of a head that fuses ``taps`` states of its target. Return the number of tokens and the
    largest differences of logits and states. ``norm_before_residual`` is the flag's value, None if it was not given.
    Raises AssertionError if the results differ."""
    compared = ORACLES[draft.kind](draft, taps, norm_before_residual)
    assert compared.difference <= TOLERANCE, compared.worst()
    return compared.as_json()
