"""Samples tokens for the loop, so that the text is the same with speculation and without.

It changes single logits before a token is drawn: biases, and the penalties on tokens that occurred before.
"""

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Generic

import numpy as np
import torch
from torch import Tensor

from eagle3.runner.contract import Metadata
from eagle3.runner.hosts.session import Step
from eagle3.runner.sampling.arrays import Array, Arrays, Device, Host
from eagle3.runner.sampling.draws import Draw, draw_by
from eagle3.runner.sampling.options import Sampling


class Sampler:
    """A ``Choice`` that draws tokens with noise, which the seed, a token's position and its id determine.

    The draft proposes with the same noise. An accepted proposal is therefore the token that sampling one token at a
    time would have drawn; the draft's logits affect how many are accepted, never the text. The draft's logits get the
    same biases, penalties and filters as the target's, which raises acceptance by some 3% on gemma4-tiny and has no
    other effect.
    """

    greedy = False

    def __init__(self, sampling: Sampling, metadata: Metadata, tokens: Sequence[int]):
        """``tokens`` are the prompt's. Raises ValueError with one line if the artifact does not support
        ``sampling``."""
        sampling.check(metadata)
        self.seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        self._sampling, self._metadata = sampling, metadata
        self._plain, self._adjusts = sampling.plain, sampling.adjusts
        self._prompt, self._generated, self._length = list(tokens), list[int](), len(tokens)
        self._vocabularies: tuple[_Vocabulary, _Vocabulary] | None = None  # created on the device of the first logits

    def target(self, step: Step, proposed: list[int]) -> Tensor:
        if self._plain:
            return step.ids
        assert step.logits is not None, "Sampling.check asks for logits"
        if self._vocabularies is None:
            self._vocabularies = self._made(step.logits.device)
        target, _ = self._vocabularies
        behind = enumerate(proposed, 1) if self._adjusts else ()
        return target.choose(step.logits, self._length, behind)

    def draft(self, step: Step, proposed: Sequence[Tensor]) -> Tensor:
        if self._plain:
            return step.ids
        assert step.logits is not None and self._vocabularies is not None  # the target chose the anchor before
        _, draft = self._vocabularies
        ahead = len(proposed) * self._metadata.proposals
        behind = [(0, int(token)) for tokens in proposed for token in tokens[0]] if self._adjusts else ()
        return draft.choose(step.logits, self._length + ahead, behind)

    def forced(self, _proposed: Sequence[Tensor], _count: int) -> list[int]:
        return []

    def accept(self, tokens: list[int]) -> None:
        self._length += len(tokens)
        if self._vocabularies is None:
            self._generated += tokens
        elif self._adjusts:
            for vocabulary in self._vocabularies:
                vocabulary.see(tokens)

    def _made(self, device: torch.device) -> tuple["_Vocabulary", "_Vocabulary"]:
        """Return the vocabularies of the target and of the draft, created at the first call."""
        arrays: Arrays = Host() if device.type == "cpu" else Device(device)
        common = self._sampling, self.seed, self._metadata.vocab_size, arrays, self._prompt, self._generated
        return _Vocabulary(None, *common), _Vocabulary(self._metadata.draft_ids, *common)


class _Vocabulary(Generic[Array]):
    """The ids of one model, and the choice among them."""

    def __init__(
        self,
        ids: Tensor | None,
        sampling: Sampling,
        seed: int,
        vocabulary: int,
        arrays: Arrays[Array],
        prompt: Sequence[int],
        generated: Sequence[int],
    ):
        """``ids``: int64 [V], the target's id of each column, None if they are the same; ``vocabulary``: the size of
        the target's vocabulary; ``prompt`` and ``generated``: the tokens so far"""
        self._view: Callable[[Tensor], Array] = arrays.view
        self._ids: np.ndarray | None = None if ids is None else ids.numpy()
        every = np.arange(vocabulary) if self._ids is None else self._ids
        self._draw: Draw[Array] = draw_by(sampling, seed, every, arrays)
        self._adjust: Adjustments[Array] | None = None
        if sampling.adjusts:
            columns = np.full(vocabulary, -1)
            columns[every] = np.arange(len(every))
            self._adjust = Adjustments(sampling, columns, arrays)
            self._adjust.see(prompt)
            self._adjust.see(generated, generated=True)

    def see(self, tokens: Sequence[int]) -> None:
        """Count generated tokens for the penalties."""
        if self._adjust:
            self._adjust.see(tokens, generated=True)

    def choose(self, logits: Tensor, position: int, proposed: Iterable[tuple[int, int]]) -> Tensor:
        """Return ids of the target after each row of ``logits`` [1, R, V]: int64 [1, R] on the host."""
        viewed = self._view(logits)
        if self._adjust:
            viewed = self._adjust(viewed, proposed)
        columns = self._draw(viewed, position)
        return torch.from_numpy(columns if self._ids is None else self._ids[columns])


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
