"""Top-k, top-p and min-p.

Each keeps the ids whose logit is at least some value, so together they are one threshold per row. Results equal
transformers' except in one case: of equal logits at the edge of top-p, transformers keeps those that its sort puts
last. Here all are kept, as at the edge of top-k.
"""

import math

from eagle3.runner.sampling.arrays import Array, Arrays
from eagle3.runner.sampling.options import Sampling

FIRST = 256
"""The number of largest logits that are sorted first; top-p seldom keeps more."""


def thresholds(logits: Array, sampling: Sampling, arrays: Arrays[Array]) -> Array | None:
    """Return the least logit of each row that the filters keep, [1, R, 1]; None without filters.

    Args:
        logits: float32 logits [1, R, V], with bias and penalty, before the temperature
    """
    least, top_k = None, sampling.top_k if sampling.top_k < logits.shape[-1] else 0
    if sampling.top_p < 1:
        least = _by_top_p(logits, top_k, sampling, arrays)
    elif top_k:
        least = arrays.largest(logits, top_k)[..., :1]
    if sampling.min_p:
        most = arrays.xp.amax(logits, axis=-1, keepdims=True)
        by_min_p = most + sampling.temperature * math.log(sampling.min_p)
        least = by_min_p if least is None else arrays.xp.maximum(least, by_min_p)
    return least


def _by_top_p(logits: Array, top_k: int, sampling: Sampling, arrays: Arrays[Array]) -> Array:
    """Return the least logit that top-p keeps in each row: probabilities are summed from the least, and ids above a sum
    of 1 - top_p are kept. The sum is over all ids, or over the ``top_k`` most likely and those equal to the last of
    them."""
    xp, temperature, vocabulary = arrays.xp, sampling.temperature, logits.shape[-1]
    for count in [top_k] if top_k else sorted({min(FIRST, vocabulary), vocabulary}):
        top = arrays.largest(logits, count)
        most = top[..., -1:]
        weights = xp.exp((top - most) / temperature)
        up_to = xp.cumsum(weights, axis=-1)
        if top_k:
            equal = (logits >= top[..., :1]).sum(-1)[..., None] - count
            up_to += weights[..., :1] * arrays.floats(equal)
        else:
            up_to += xp.exp((logits - most) / temperature).sum(-1)[..., None] - up_to[..., -1:]
        left_out = up_to <= (1 - sampling.top_p) * up_to[..., -1:]
        if left_out[..., 0].all():
            break
    return xp.amin(xp.where(left_out, most, top), axis=-1, keepdims=True)
