"""A scripted session whose target and draft return logits."""

import torch
from scripted import ScriptedSession


def random_logits(seed: int, *shape: int, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed))


class LogitsSession(ScriptedSession):
    """A scripted session whose target and draft return logits. The prefix selects rows of two tables."""

    def __init__(self, metadata, target_logits: torch.Tensor, draft_logits: torch.Tensor, draft_ids: torch.Tensor):
        self._rows, self._draft_rows, self._draft_ids = target_logits, draft_logits, draft_ids

        def greedy(prefix):
            return int(self._of(prefix).argmax())

        def proposal(prefix):
            return int(draft_ids[self._draft_of(prefix).argmax()])

        super().__init__(metadata, greedy, proposal)

    def _of(self, prefix):
        return self._rows[(3 * prefix[-1] + 5 * len(prefix) + prefix[len(prefix) // 2]) % len(self._rows)]

    def _draft_of(self, prefix):
        return self._draft_rows[(prefix[-1] + 7 * len(prefix)) % len(self._draft_rows)]

    def _target(self, tokens, input_pos):
        step = super()._target(tokens, input_pos)
        prefixes = [self.target_cache[position].prefix for position in input_pos.tolist()]
        return step._replace(logits=torch.stack([self._of(prefix) for prefix in prefixes])[None])

    def prefill(self, tokens, input_pos):
        step = super().prefill(tokens, input_pos)
        return step._replace(logits=self._of(self.target_cache[int(input_pos[-1])].prefix)[None, None])

    def draft_decode(self, tokens, feature, input_pos):
        step = super().draft_decode(tokens, feature, input_pos)
        return step._replace(logits=self._draft_of(self.draft_cache[int(input_pos[-1])].prefix)[None, None])
