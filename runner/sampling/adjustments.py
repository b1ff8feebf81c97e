"""What changes single logits before anything is drawn: biases, and the penalty on tokens that are there already."""

from collections.abc import Iterable
from typing import Generic

import numpy as np

from eagle3.runner.sampling.arrays import Array, Arrays
from eagle3.runner.sampling.options import Sampling


class Adjustments(Generic[Array]):
    """Those of one vocabulary.

    ``columns``, int64 [V of the target], is the column of each of the target's ids, -1 where there is none.
    """

    def __init__(self, sampling: Sampling, columns: np.ndarray, arrays: Arrays[Array]):
        self._columns, self._penalty = columns, sampling.repetition_penalty
        self._arrays: Arrays[Array] = arrays
        biases = {columns[token]: bias for token, bias in sampling.logit_bias.items() if columns[token] >= 0}
        self._biased: Array = arrays.array(np.array(list(biases), np.int64))
        self._biases: Array = arrays.array(np.array(list(biases.values()), np.float32))
        self._seen: set[int] = set()
        self._seen_columns: Array = arrays.array(np.empty(len(columns), np.int64))

    def see(self, tokens: Iterable[int]) -> None:
        """These are among the tokens so far."""
        known = len(self._seen)
        fresh = list({int(self._columns[token]) for token in tokens} - self._seen - {-1})
        self._seen.update(fresh)
        self._seen_columns[known : len(self._seen)] = self._arrays.array(np.array(fresh, np.int64))

    def __call__(self, logits: Array, proposed: Iterable[tuple[int, int]]) -> Array:
        """The logits that they make of ``logits``, float32 [1, R, V]. ``proposed``: (row, token), the first row that
        the token stands before."""
        logits = self._arrays.xp.asarray(logits, copy=True)
        rows = logits[0]
        rows[:, self._biased] += self._biases
        if self._penalty != 1:
            seen = self._seen_columns[: len(self._seen)]
            rows[:, seen] = self._penalized(rows[:, seen])
            done = self._seen | {-1}
            for row, token in proposed:
                column = int(self._columns[token])
                if column not in done:
                    done.add(column)
                    rows[row:, column] = self._penalized(rows[row:, column])
        return logits

    def _penalized(self, logits: Array) -> Array:
        return self._arrays.xp.where(logits < 0, logits * self._penalty, logits / self._penalty)
