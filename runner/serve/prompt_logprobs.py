"""Computes the log-probabilities of a prompt's own tokens."""

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

import torch

from eagle3.runner.sampling.logprobs import TokenLogprobs, token_logprobs

if TYPE_CHECKING:
    from eagle3.runner.model import Model


def prompt_logprobs(model: "Model", prompt: Sequence[int], count: int) -> Generator[list[TokenLogprobs], None, None]:
    """Yield, for one verify window at a time, the log-probability of each token of ``prompt`` but the first, given the
    tokens before it, and the ``count`` most likely tokens. ``prefill`` cannot be used, since it returns the logits of
    its last row only.

    The generator reserves the model's KV caches from its first window to its end, and leaves them empty. The caller
    checks the prompt and the options first, with ``check_request`` and ``Options.check``.
    """
    session, cached = model.session, model.cached
    window, rollback = session.metadata.window, session.metadata.rollback_rows
    tokens = torch.tensor([prompt])
    with model.reserved():
        cached.clear()
        try:
            for start in range(0, len(prompt) - 1, window):
                end = min(start + window, len(prompt))  # a verify window has at least two rows
                cached.run(start, end - start, rollback)
                step = session.target_verify(tokens[:, start:end], session.positions[start:end])
                assert step.logits is not None, "Options.check asks for logits"
                following = list(prompt[start + 1 : end + 1])
                yield token_logprobs(step.logits[0, : len(following)], following, count)
        finally:
            cached.clear()  # no draft slot was written
