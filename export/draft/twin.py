"""Compares a small copy of a draft head, computed by our module, with code that is not ours or not a module, over
chunks, steps and rollbacks. The head's kind says which code that is."""

from typing import Any

from eagle3.export.draft.common.description import DraftDescription
from eagle3.export.draft.kinds import KINDS
from eagle3.export.twin.comparison import TOLERANCE


def check_draft(draft: DraftDescription, taps: int, norm_before_residual: bool | None = None) -> dict[str, Any]:
    """Compare the twins of a head that fuses ``taps`` states of its target; return the manifest's entry on it.

    ``norm_before_residual`` is the flag's value, None where the user gave none. Raises ValueError where the twins
    differ or ours does not run.
    """
    file = draft.folder / "config.json"
    try:
        compared = KINDS[draft.kind].load().compare(draft, taps, norm_before_residual)
    except OSError:  # of the disk, not of the head
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
