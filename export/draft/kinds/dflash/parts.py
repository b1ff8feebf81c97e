"""Collects the parts of a head of the DFlash family under the names of ``KindModule``."""

from eagle3.export.draft.common.pairing import check_pair
from eagle3.export.draft.kinds.dflash.fields import FIELDS
from eagle3.export.draft.kinds.dflash.head import Head
from eagle3.export.draft.kinds.dflash.reading import read

__all__ = ["FIELDS", "Head", "check_pair", "read"]
