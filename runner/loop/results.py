"""Log-probabilities of tokens, and the reasons why a generation ends. Nothing here imports torch."""

from dataclasses import dataclass
from typing import Any

STOP, LENGTH = "stop", "length"
ABORT = "abort"
"""The finish reason of a generation that was abandoned or interrupted before its end (vLLM's name)."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of a softmax over the raw logits, before temperature, filters and penalties (vLLM's
    raw_logprobs). ``top``: (id, logarithm) of the most likely tokens, the most likely first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]

    def as_json(self) -> dict[str, Any]:
        top = [{"token_id": token, "logprob": round(logprob, 5)} for token, logprob in self.top]
        return {"token_id": self.token_id, "logprob": round(self.logprob, 5), "top": top}
