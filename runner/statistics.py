"""What happened in a generation, under vLLM's names."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class SpeculationStats:
    """Counts over the rounds of one or more generations. A round verifies one chain of draft tokens."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    """Rounds in which the proposal at each position was accepted."""

    def record(self, proposed: int, accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += proposed
        self.num_accepted_tokens += accepted
        self.accepted_at += [0] * (proposed - len(self.accepted_at))
        for position in range(accepted):
            self.accepted_at[position] += 1

    def add(self, other: "SpeculationStats") -> None:
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        self.accepted_at += [0] * (len(other.accepted_at) - len(self.accepted_at))
        for position, count in enumerate(other.accepted_at):
            self.accepted_at[position] += count

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a round yields: 1 + accepted / drafts; 1.0 where there was no round."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_rate_per_position(self) -> list[float]:
        """Unconditional, as in vLLM: accepted at position i / drafts."""
        return [count / self.num_drafts for count in self.accepted_at]

    def as_json(self) -> dict[str, Any]:
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "acceptance_rate_per_position": [round(rate, 4) for rate in self.acceptance_rate_per_position],
        }
