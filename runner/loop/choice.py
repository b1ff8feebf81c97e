"""Chooses tokens from the outputs of a method. ``MinTokens`` chooses no end token until a text has a given number."""

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from eagle3.runner.hosts.session import Step


class Choice(Protocol):
    """Chooses the token after the tokens so far, which are the prompt and all tokens given to ``accept``."""

    greedy: bool
    """True if it takes a step's ids unchanged, so that logits and draft steps may be left out."""

    def target(self, step: Step, proposed: list[int], /) -> Tensor:
        """Return the token after each row of the target: int64 [1, R] on the host.

        Args:
            step: ids [1, R] and logits [1, R, V]. A fused round (``speculate``) has ids alone, [2, R], with the next
                window in the second row; both rows are then returned
            proposed: R - 1 ids; row i follows the tokens so far and the first i of these
        """

    def draft(self, step: Step, proposed: Sequence[Tensor], /) -> Tensor:
        """Return the proposals, as ids of the target: int64 [1, K] on the host.

        Args:
            step: ids [1, K], logits [1, K, V_draft]; row j is for the j-th position after the tokens so far and
                ``proposed``
            proposed: the tokens that this chain has proposed so far, int64 [1, ...] each
        """

    def forced(self, proposed: Sequence[Tensor], count: int, /) -> list[int]:
        """Return up to ``count`` ids to propose after ``proposed`` (as in ``draft``) without a draft step. Usually
        there are none."""

    def accept(self, tokens: list[int]) -> None:
        """Append ``tokens`` to the tokens so far."""


class Greedy:
    """Takes the greedy tokens that the artifact's methods return."""

    greedy = True

    def target(self, step: Step, _proposed: list[int]) -> Tensor:
        return step.ids

    def draft(self, step: Step, _proposed: Sequence[Tensor]) -> Tensor:
        return step.ids

    def forced(self, _proposed: Sequence[Tensor], _count: int) -> list[int]:
        return []

    def accept(self, tokens: list[int]) -> None:
        pass


class MinTokens:
    """A ``Choice`` that delegates to another one, with the logits of the end tokens at -inf until the text has
    ``count`` tokens (vLLM's ``min_tokens``, transformers' ``min_new_tokens``). The draft's logits are not masked: end
    tokens that it proposes are rejected."""

    greedy = False

    def __init__(self, choice: Choice, count: int, ends: Collection[int]):
        """``ends`` are the end tokens, as ids of the target."""
        self._choice, self._left, self._ends = choice, count, sorted(ends)

    def target(self, step: Step, proposed: list[int]) -> Tensor:
        assert step.logits is not None, "Options.check asks for logits"
        rows = max(0, min(self._left, step.logits.shape[1]))
        if not rows:
            return self._choice.target(step, proposed)
        logits = step.logits.clone()
        logits[0, :rows, self._ends] = float("-inf")
        ids = step.ids
        if self._choice.greedy and torch.isin(ids[0, :rows].cpu(), torch.tensor(self._ends)).any():
            ids = torch.cat((logits[:, :rows].argmax(-1).to(ids.device), ids[:, rows:]), dim=1)
        return self._choice.target(step._replace(ids=ids, logits=logits), proposed)

    def draft(self, step: Step, proposed: Sequence[Tensor]) -> Tensor:
        return self._choice.draft(step, proposed)

    def forced(self, proposed: Sequence[Tensor], count: int) -> list[int]:
        return self._choice.forced(proposed, count)

    def accept(self, tokens: list[int]) -> None:
        self._left -= len(tokens)
        self._choice.accept(tokens)
