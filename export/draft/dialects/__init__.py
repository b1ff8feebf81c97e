"""The dialects of draft checkpoints, a file each; the first that recognizes a checkpoint reads it."""

from eagle3.export.draft.dialects import angelslim, modelopt, nemo, safeailab, sglang, specforge, speculators
from eagle3.export.draft.dialects.dialect import Dialect, Proposal

DIALECTS: dict[str, Dialect] = {
    module.DIALECT.name: module.DIALECT
    for module in (speculators, modelopt, nemo, specforge, sglang, angelslim, safeailab)
}

__all__ = ["DIALECTS", "Dialect", "Proposal"]
