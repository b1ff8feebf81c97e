"""Log-probabilities of generated tokens under the model's own distribution."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle3.runner.hosts.session import Step
from eagle3.runner.loop.choice import Choice
from eagle3.runner.loop.results import TokenLogprobs


def token_logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Return the log-probability of each of ``tokens`` in its row of ``logits`` [T, V], with the ``count`` most likely
    tokens."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0].tolist()
    values, ids = (best.tolist() for best in logprobs.topk(count))
    return [
        TokenLogprobs(token, logprob, list(zip(top_ids, top_values, strict=True)))
        for token, logprob, top_ids, top_values in zip(tokens, chosen, ids, values, strict=True)
    ]


class Logprobs:
    """A ``Choice`` that delegates to another one and keeps the log-probabilities of accepted tokens in ``tokens``."""

    greedy = False

    def __init__(self, choice: Choice, count: int):
        """``count``: the number of most likely tokens to keep with each token"""
        self._choice, self._count = choice, count
        self._logits: Tensor | None = None
        self.tokens: list[TokenLogprobs] = []

    def target(self, step: Step, proposed: list[int]) -> Tensor:
        assert step.logits is not None, "Options.check asks for logits"
        self._logits = step.logits[0]
        return self._choice.target(step, proposed)

    def draft(self, step: Step, proposed: Sequence[Tensor]) -> Tensor:
        return self._choice.draft(step, proposed)

    def forced(self, proposed: Sequence[Tensor], count: int) -> list[int]:
        return self._choice.forced(proposed, count)

    def accept(self, tokens: list[int]) -> None:
        assert self._logits is not None  # the target chose the tokens before
        self.tokens += token_logprobs(self._logits[: len(tokens)], tokens, self._count)
        self._choice.accept(tokens)
