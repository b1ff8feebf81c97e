"""Changes single logits before a token is drawn: biases, and the penalties on tokens that occurred before."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Generic

import numpy as np

from eagle3.runner.sampling.arrays import Array, Arrays
from eagle3.runner.sampling.options import Sampling


class Adjustments(Generic[Array]):
    """The biases and penalties of one vocabulary.

    ``columns``, int64 [V of the target], is the column of each id of the target, -1 if there is none.
    """

    def __init__(self, sampling: Sampling, columns: np.ndarray, arrays: Arrays[Array]):
        self._columns, self._penalty = columns, sampling.repetition_penalty
        self._presence, self._frequency = sampling.presence_penalty, sampling.frequency_penalty
        self._counts: Counter[int] = Counter()  # how often each column was generated
        self._arrays: Arrays[Array] = arrays
        biases = {columns[token]: bias for token, bias in sampling.logit_bias.items() if columns[token] >= 0}
        self._biased: Array = arrays.array(np.array(list(biases), np.int64))
        self._biases: Array = arrays.array(np.array(list(biases.values()), np.float32))
        self._seen: set[int] = set()
        self._seen_columns: Array = arrays.array(np.empty(len(columns), np.int64))

    def see(self, tokens: Sequence[int], generated: bool = False) -> None:
        """Count tokens of the prompt, or generated tokens if ``generated``."""
        if generated and (self._presence or self._frequency):
            self._counts.update(column for column in self._columns[list(tokens)].tolist() if column >= 0)
        known = len(self._seen)
        fresh = list({int(self._columns[token]) for token in tokens} - self._seen - {-1})
        self._seen.update(fresh)
        self._seen_columns[known : len(self._seen)] = self._arrays.array(np.array(fresh, np.int64))

    def __call__(self, logits: Array, proposed: Iterable[tuple[int, int]]) -> Array:
        """Return the adjusted ``logits``, float32 [1, R, V]. ``proposed`` has (row, token) for each proposal, where row
        is the first row after the token."""
        logits = self._arrays.xp.asarray(logits, copy=True)
        rows = logits[0]
        rows[:, self._biased] += self._biases
        proposed = list(proposed)
        if self._penalty != 1:
            seen = self._seen_columns[: len(self._seen)]
            rows[:, seen] = self._penalized(rows[:, seen])
            done = self._seen | {-1}
            for row, token in proposed:
                column = int(self._columns[token])
                if column not in done:
                    done.add(column)
                    rows[row:, column] = self._penalized(rows[row:, column])
        if self._presence or self._frequency:
            self._take_off(rows, proposed)
        return logits

    def _take_off(self, rows: Array, proposed: list[tuple[int, int]]) -> None:
        """Subtract OpenAI's two penalties; a proposal counts as generated in the rows after it.

        A token's total penalty is subtracted at once, so that a row has the same logits however its tokens were
        proposed.
        """
        places = [(row, int(self._columns[token])) for row, token in proposed]
        before = {column: self._arrays.xp.asarray(rows[:, column], copy=True) for _, column in places if column >= 0}
        if self._counts:
            columns = self._arrays.array(np.array(list(self._counts), np.int64))
            counted = np.array(list(self._counts.values()))
            rows[:, columns] -= self._arrays.array(self._loss(counted))
        counts = Counter({column: self._counts[column] for column in before})
        for row, column in places:
            if column >= 0:
                counts[column] += 1
                rows[row:, column] = before[column][row:] - float(self._loss(np.array(counts[column])))

    def _loss(self, counts: np.ndarray) -> np.ndarray:
        """Return the penalties of ids by their counts, float32."""
        return (self._presence + self._frequency * counts).astype(np.float32)

    def _penalized(self, logits: Array) -> Array:
        return self._arrays.xp.where(logits < 0, logits * self._penalty, logits / self._penalty)
