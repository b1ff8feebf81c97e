"""Collects the parts of a Gemma 4 assistant under the names of ``KindModule``."""

from eagle3.export.draft.kinds.gemma4_assistant.fields import FIELDS
from eagle3.export.draft.kinds.gemma4_assistant.head import Head
from eagle3.export.draft.kinds.gemma4_assistant.pairing import check_pair
from eagle3.export.draft.kinds.gemma4_assistant.reading import read

__all__ = ["FIELDS", "Head", "check_pair", "read"]
