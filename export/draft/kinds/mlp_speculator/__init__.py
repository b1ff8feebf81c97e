"""MLP speculators, which IBM publishes as accelerators. A stage for each proposal turns the state before it and the
embedding of the token before it into the next state. There is no attention, so no cache, and nothing is seeded."""

from eagle3.export.draft.kinds.common_fields import STATE
from eagle3.export.draft.kinds.mlp_speculator.head import Head
from eagle3.export.draft.kinds.mlp_speculator.reading import check_pair, read
from eagle3.export.draft.kinds.mlp_speculator.twin import compare

FIELDS = (STATE,)

__all__ = ["FIELDS", "Head", "check_pair", "compare", "read"]
