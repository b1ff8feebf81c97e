"""Gemma 4 assistants, the drafters that Google publishes beside the models (MTP in vLLM).

A head takes the embedding of the newest token and the target's final state before it. Its layers have queries alone:
they attend to the keys and values that the target keeps. So it has no cache, and nothing is seeded.
"""

from eagle3.export.draft.kinds.gemma4_assistant.fields import FIELDS
from eagle3.export.draft.kinds.gemma4_assistant.head import Head
from eagle3.export.draft.kinds.gemma4_assistant.pairing import check_pair
from eagle3.export.draft.kinds.gemma4_assistant.reading import read
from eagle3.export.draft.kinds.gemma4_assistant.twin import compare

__all__ = ["FIELDS", "Head", "check_pair", "compare", "read"]
