"""Compares a small copy of a draft head with an independent computation, over chunks, steps and rollbacks: with another
project's code or with plain formulas, as the head's kind says."""

from typing import Any

from eagle3.export.draft.common.description import DraftDescription
from eagle3.export.draft.kinds import KINDS
from eagle3.export.twin.comparison import TOLERANCE


def check_draft(draft: DraftDescription, taps: int, norm_before_residual: bool | None = None) -> dict[str, Any]:
    """Compare a small copy of a head that fuses ``taps`` states of its target, and return the manifest's entry on the
    comparison. ``norm_before_residual`` is the flag's value, None if it was not given. Raises ValueError if the results
    differ or the head cannot be computed.
    """
    file = draft.folder / "config.json"
    try:
        compared = KINDS[draft.kind].load().compare(draft, taps, norm_before_residual)
    except OSError:  # a fault of the disk, not of the head
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{file} describes a draft head that cannot be computed: {reason}") from error
    if compared.difference > TOLERANCE:
        raise ValueError(
            f"{file} describes a draft head that would not be computed by its formulas: {compared.worst()} in a "
            "small copy with random weights: this kind of head is not supported"
        )
    return compared.as_json()
