"""Gumbel noise that depends only on the seed, the position and the target's id.

The id with the largest logit / temperature + noise is a sample of the softmax. The same noise added to similar logits
mostly gives the same id, so the draft proposes the ids that sampling is going to choose.

1. Keys: a cryptographic hash of the seed gives each position two words.
2. Words: a multiplicative hash of an id with a position's keys, in wrapping int32, the same in numpy and PyTorch.
3. Gumbel noise: -log(-log(1 - v)) of 30 bits v in (0, 1), exact in the tail of large noise, where ids are chosen.
"""

import hashlib
import struct
from functools import lru_cache
from typing import Generic

import numpy as np

from eagle3.runner.sampling.arrays import Array, Arrays

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
