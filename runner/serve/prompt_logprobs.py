"""Log-probabilities of a prompt's own tokens."""

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

import torch

from eagle3.runner.sampling.logprobs import TokenLogprobs, token_logprobs

if TYPE_CHECKING:
    from eagle3.runner.model import Model


def prompt_logprobs(model: "Model", prompt: Sequence[int], count: int) -> Generator[list[TokenLogprobs], None, None]:
    """Yield how likely each token of ``prompt`` but the first is behind those before it, a verify window at a time:
    ``prefill`` has the logits of its last row alone. The ``count`` likeliest tokens stand beside each.

    It has the model's KV caches from its first window to its end, and leaves them empty. ``check_request`` and
    ``Options.check`` say beforehand whether the model takes the prompt and has the logits.
    """
    session, cached = model.session, model.cached
    window, rollback = session.metadata.window, session.metadata.rollback_rows
    tokens = torch.tensor([prompt])
    with model.reserved():
        cached.clear()
        try:
            for start in range(0, len(prompt) - 1, window):
                end = min(start + window, len(prompt))  # two rows at least, as a verify window has
                cached.run(start, end - start, rollback)
                step = session.target_verify(tokens[:, start:end], session.positions[start:end])
                assert step.logits is not None, "Options.check asks for logits"
                following = list(prompt[start + 1 : end + 1])
                yield token_logprobs(step.logits[0, : len(following)], following, count)
        finally:
            cached.clear()  # no draft slot was written
