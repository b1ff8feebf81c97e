"""The dialects of draft checkpoints, a file each. The first that recognizes a checkpoint is used."""

from eagle3.export.draft.dialects import angelslim, deepspec, modelopt, nemo, safeailab, sglang, specforge, speculators
from eagle3.export.draft.dialects.dialect import Dialect, Proposal

DIALECTS: dict[str, Dialect] = {
    module.DIALECT.name: module.DIALECT
    for module in (speculators, deepspec, modelopt, nemo, specforge, sglang, angelslim, safeailab)
}

__all__ = ["DIALECTS", "Dialect", "Proposal"]
