"""Chooses tokens from the outputs of a method."""

from collections.abc import Sequence
from typing import Protocol

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
