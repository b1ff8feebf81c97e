"""Collects the parts of an MLP speculator under the names of ``KindModule``."""

from eagle3.export.draft.common.fields import STATE
from eagle3.export.draft.kinds.mlp_speculator.head import Head
from eagle3.export.draft.kinds.mlp_speculator.reading import check_pair, read

FIELDS = (STATE,)

__all__ = ["FIELDS", "Head", "check_pair", "read"]
