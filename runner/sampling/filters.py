"""Top-k, top-p and min-p, each of which keeps the ids from some logit on: together they are one threshold a row.

The meaning is transformers' but for one case: of equal logits at top-p's edge transformers keeps those that its sort
puts last; here all stay, as they do at top-k's.
"""

import math

from eagle3.runner.sampling.arrays import Array, Arrays
from eagle3.runner.sampling.options import Sampling

FIRST = 256
"""The number of a vocabulary's logits that are sorted at first; top-p seldom keeps more."""


def thresholds(logits: Array, sampling: Sampling, arrays: Arrays[Array]) -> Array | None:
    """Return the least logit of each row that the filters keep, [1, R, 1]; None where there are none.

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
    """Keep those that lie above 1 - top_p of the probability, all summed up from the least: of all ids, or of the
    ``top_k`` most likely and those equal to the last of them."""
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
