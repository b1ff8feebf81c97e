"""Draws an id from each row of logits: the most likely one, or the one with the largest logit + temperature * noise.

``Dense`` adds the noise of all ids. On the host that is too slow for a large vocabulary, and ``Sparse`` finds the same
id among the few that can have the largest sum.

The noise is Gumbel noise. It depends only on the seed, the position and the target's id.

The id with the largest logit / temperature + noise is a sample of the softmax. The same noise added to similar logits
mostly gives the same id, so the draft proposes the ids that sampling is going to choose.

1. Keys: a cryptographic hash of the seed gives each position two words.
2. Words: a multiplicative hash of an id with a position's keys, in wrapping int32, the same in numpy and PyTorch.
3. Gumbel noise: -log(-log(1 - v)) of 30 bits v in (0, 1), exact in the tail of large noise, where ids are chosen.
"""

import hashlib
import math
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Generic

import numpy as np

from eagle3.runner.sampling.arrays import Array, Arrays, Host
from eagle3.runner.sampling.options import Sampling

Draw = Callable[[Array, int], np.ndarray]
"""Maps float32 logits [1, R, V] with bias and penalty, and the position of the first row's id, to columns, int64 [1,
R]."""

MANY = 1 << 14
"""The largest vocabulary whose noise is computed for all ids on the host; ``Sparse`` serves larger ones."""
LOUD_WORD = -(1 << 21)
"""An id's noise is called loud (large) if its word is nearer to zero than this. One id in 1024 has loud noise."""
KEPT = 32
"""The number of positions whose loud ids are kept."""
LOUD, LEAST = 6.94, -2.78
"""A lower bound of the noise of loud ids, and a lower bound of all noise."""


def draw_by(sampling: Sampling, seed: int, ids: np.ndarray, arrays: Arrays[Array]) -> Draw[Array]:
    """Return the function that draws ids. ``ids``, int64 [V], is the target's id of each column."""
    if not sampling.temperature:
        return lambda logits, _position: arrays.host(logits.argmax(-1))
    if isinstance(arrays, Host) and len(ids) > MANY:
        return Sparse(sampling, seed, ids, arrays)
    return Dense(sampling, seed, ids, arrays)


class Dense(Generic[Array]):
    def __init__(self, sampling: Sampling, seed: int, ids: np.ndarray, arrays: Arrays[Array]):
        self._sampling = sampling
        self._arrays: Arrays[Array] = arrays
        self._noise: Noise[Array] = Noise(seed, ids, sampling.temperature, arrays)

    def __call__(self, logits: Array, position: int) -> np.ndarray:
        scores = logits + self._noise.rows(position, logits.shape[1])
        least = thresholds(logits, self._sampling, self._arrays)
        if least is not None:
            scores = self._arrays.xp.where(logits >= least, scores, -math.inf)
        return self._arrays.host(scores.argmax(-1))


class Sparse:
    """Draws from a large vocabulary.

    Few ids have loud noise; any other id can win only if its logit is large. The loud ids of a position are found once,
    by their words. Any other id is left out if its logit plus the largest noise that is not loud is less than the best
    score of a loud id, or than the largest logit plus the least noise.
    """

    def __init__(self, sampling: Sampling, seed: int, ids: np.ndarray, arrays: Host):
        self._sampling, self._seed, self._arrays = sampling, seed, arrays
        self._spread = spread(ids.astype(np.int32))
        self._loud: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __call__(self, logits: np.ndarray, position: int) -> np.ndarray:
        rows, least = logits[0], thresholds(logits, self._sampling, self._arrays)
        floors = [-math.inf] * len(rows) if least is None else least[0, :, 0].tolist()
        return np.array([[self._best(row, position + i, floors[i]) for i, row in enumerate(rows)]])

    def _best(self, row: np.ndarray, position: int, floor: float) -> int:
        """Return the column of the largest score among those whose logit is ``floor`` or more."""
        temperature = self._sampling.temperature
        if 0 < self._sampling.top_k < len(row):  # the kept ids are few enough
            columns = np.flatnonzero(row >= floor)
            scores = row[columns] + self._noise(position, columns)
        else:
            columns, noise = self._loud_at(position)
            logits = row[columns]
            scores = np.where(logits >= floor, logits + noise, -np.inf)
            to_beat = max(float(scores.max(initial=-np.inf)), float(row.max()) + temperature * LEAST)
            rounding = 1e-6 * abs(to_beat)
            others = np.flatnonzero(row >= max(floor, to_beat - temperature * LOUD - rounding))
            columns = np.concatenate((columns, others))
            scores = np.concatenate((scores, row[others] + self._noise(position, others)))
        return columns[scores == scores.max()].min()

    def _words(self, position: int, spread_ids: np.ndarray) -> np.ndarray:
        return words(keys(self._seed, position, 1)[0], spread_ids)

    def _noise(self, position: int, columns: np.ndarray) -> np.ndarray:
        return gumbel(self._words(position, self._spread[columns]), self._sampling.temperature, self._arrays)

    def _loud_at(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the columns with loud noise, ascending, and their noise times the temperature."""
        if position not in self._loud:
            if len(self._loud) >= KEPT:
                self._loud.clear()
            columns = np.flatnonzero(self._words(position, self._spread) > LOUD_WORD)
            self._loud[position] = columns, self._noise(position, columns)
        return self._loud[position]


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


KEYED, BLOCK = 512, 16
"""The number of positions whose keys come from one hash, and of those whose noise is computed at once, since the cost
is mostly per call."""
SIGN_AND_ODD = -0x7FFFFFFF  # bit 31 and bit 0
UNIT = 2.0**-31 * (1 - 2.0**-23)  # maps words to (-1, 0); float32 would round the first to -1
MULTIPLIERS = 0x7FEB352D, 0x846CA68B - (1 << 32)  # the multipliers of Chris Wellons's lowbias32


def keys(seed: int, position: int, count: int) -> np.ndarray:
    """Return the keys of ``count`` positions from ``position`` on: int32 [count, 2], of which the second is odd."""
    start = position % KEYED
    return _keys(seed, position // KEYED)[start : start + count]


@lru_cache(maxsize=4)
def _keys(seed: int, chunk: int) -> np.ndarray:
    digest = hashlib.shake_128(struct.pack("<QQ", seed, chunk)).digest(8 * KEYED)
    return np.frombuffer(digest, "<i4").reshape(KEYED, 2) | np.array([0, 1], np.int32)


def spread(ids: Array) -> Array:
    """Return a hash of each id, int32, in which every bit depends on every bit of the id (lowbias32)."""
    mixed = ids ^ ((ids >> 16) & 0xFFFF)
    mixed *= MULTIPLIERS[0]
    mixed ^= (mixed >> 15) & 0x1FFFF
    mixed *= MULTIPLIERS[1]
    mixed ^= (mixed >> 16) & 0xFFFF
    return mixed


def words(keys: Array, spread_ids: Array) -> Array:
    """Return random odd negative int32 [..., ids] for ``keys`` [..., 2] and ids hashed by ``spread``."""
    mixed = spread_ids ^ keys[..., :1]
    mixed *= MULTIPLIERS[0]
    shifted = mixed >> 15
    shifted &= 0x1FFFF
    mixed ^= shifted
    mixed *= keys[..., 1:]
    mixed |= SIGN_AND_ODD
    return mixed


def gumbel(words: Array, temperature: float, arrays: Arrays[Array]) -> Array:
    """Return the noise of ``words`` times the temperature, float32. Words nearer to zero have larger noise."""
    xp, noise = arrays.xp, arrays.floats(words)
    noise *= UNIT
    xp.log1p(noise, out=noise)
    xp.negative(noise, out=noise)
    xp.log(noise, out=noise)
    noise *= -temperature
    return noise


class Noise(Generic[Array]):
    """The noise of one vocabulary, times the temperature. Blocks of positions are computed on demand; two are kept."""

    def __init__(self, seed: int, ids: np.ndarray, temperature: float, arrays: Arrays[Array]):
        """``ids``, int64 [V], is the target's id of each column."""
        self._seed, self._temperature = seed, temperature
        self._arrays: Arrays[Array] = arrays
        self._spread: Array = spread(arrays.array(ids.astype(np.int32)))
        self._blocks: dict[int, Array] = {}

    def rows(self, position: int, count: int) -> Array:
        """Return float32 [count, V] for the positions from ``position`` on."""
        block, row = divmod(position, BLOCK)
        rows = self._block(block)[row : row + count]
        while len(rows) < count:
            block += 1
            rows = self._arrays.xp.concatenate((rows, self._block(block)[: count - len(rows)]))
        return rows

    def _block(self, block: int) -> Array:
        if block not in self._blocks:
            made = words(self._arrays.array(keys(self._seed, block * BLOCK, BLOCK)), self._spread)
            made = gumbel(made, self._temperature, self._arrays)
            self._blocks = {before: rows for before, rows in self._blocks.items() if before == block - 1}
            self._blocks[block] = made
        return self._blocks[block]
