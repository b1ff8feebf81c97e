"""Collects the parts of an EAGLE head under the names of ``KindModule``, but for ``read``: ``read_draft`` calls
``read_eagle`` with a dialect."""

from eagle3.export.draft.common.pairing import check_pair
from eagle3.export.draft.kinds.eagle.fields import FIELDS
from eagle3.export.draft.kinds.eagle.head import DraftHead as Head

__all__ = ["FIELDS", "Head", "check_pair"]
