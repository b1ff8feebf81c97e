"""Chooses no end token until a text has a given number of tokens."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from eagle3.runner.hosts.session import Step
from eagle3.runner.loop.choice import Choice


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
