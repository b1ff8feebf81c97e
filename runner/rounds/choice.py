"""Chooses tokens from the outputs of a method."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from eagle3.runner.hosts.session import Step


class Choice(Protocol):
    """It knows the tokens so far (the prompt and what ``accept`` was told), whose next position is being chosen."""

    greedy: bool
    """It takes a step's ids as they are: logits and draft steps may be left out."""

    def target(self, step: Step, proposed: list[int], /) -> Tensor:
        """Return the token after each row of the target: int64 [1, R] on the host.

        Args:
            step: ids [1, R], logits [1, R, V]; of a fused round (``speculate``) ids alone, [2, R] with the next window
                below, and both are wanted back
            proposed: R - 1 ids; row i stands behind the tokens so far and the first i of these
        """

    def draft(self, step: Step, proposed: Sequence[Tensor], /) -> Tensor:
        """Return the proposals, as ids of the target: int64 [1, K] on the host.

        Args:
            step: ids [1, K], logits [1, K, V_draft]; row j is for the j-th position behind the tokens so far and
                ``proposed``
            proposed: what was proposed in this chain so far, int64 [1, ...] each
        """

    def forced(self, proposed: Sequence[Tensor], count: int, /) -> list[int]:
        """Return ids to propose behind ``proposed`` (as of ``draft``) without a draft step, ``count`` at most; mostly
        none."""

    def accept(self, tokens: list[int]) -> None:
        """Take note of tokens that follow those so far."""


class Greedy:
    """The artifact's own choice."""

    greedy = True

    def target(self, step: Step, _proposed: list[int]) -> Tensor:
        return step.ids

    def draft(self, step: Step, _proposed: Sequence[Tensor]) -> Tensor:
        return step.ids

    def forced(self, _proposed: Sequence[Tensor], _count: int) -> list[int]:
        return []

    def accept(self, tokens: list[int]) -> None:
        pass
