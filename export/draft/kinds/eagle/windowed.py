"""Gives the layers of an EAGLE head a sliding window that it was not trained with.

A head that was trained with full attention on short texts accepts ever less behind longer ones. With a window it sees
no more positions at a time than it was trained on: 1.34 to 1.88 tokens a round on LongBench, vllm-ascend 10023.
"""

from copy import deepcopy
from dataclasses import replace

from eagle3.export.draft.common.description import DraftDescription
from eagle3.export.draft.kinds.eagle.description import EagleDescription


def windowed(draft: DraftDescription, window: int) -> DraftDescription:
    """Return the head as if ``sliding_window`` in its ``config.json`` were ``window`` tokens, for all layers.

    Raises ValueError for a head without full attention.
    """
    if not isinstance(draft, EagleDescription):
        raise ValueError(
            f"--draft-window {window} is for EAGLE heads, {draft.folder} is a head of the kind {draft.kind}: leave it "
            "out"
        )
    if any(draft.windows):
        raise ValueError(
            f"--draft-window {window}: the head was trained with a sliding window of {draft.window} tokens, which the "
            "export keeps: leave it out"
        )
    layer = deepcopy(draft.layer)
    layer.layer_types, layer.sliding_window = ["sliding_attention"] * draft.layers, window
    return replace(draft, layer=layer, windows=(window,) * draft.layers)
