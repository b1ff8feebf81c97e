"""The statistics of a generation, under vLLM's names."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class GenerationStats:
    """Counts and seconds over one or more generations. A draft, in vLLM's sense, is one chain of draft tokens that a
    round verifies."""

    generations: int = 0
    prompt_tokens: int = 0
    reused_prompt_tokens: int = 0
    """The prompt tokens that the caches already held."""
    generation_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    """For each position, the number of drafts whose proposal there was accepted."""
    num_lookup_drafts: int = 0
    """The drafts among ``num_drafts`` that a lookup in the text proposed; the next two fields count its tokens."""
    num_lookup_draft_tokens: int = 0
    num_lookup_accepted_tokens: int = 0
    num_undrafted: int = 0
    """Steps of the target without a draft."""
    prefill_seconds: float = 0.0
    """Seconds to the first token."""
    decode_seconds: float = 0.0
    """Seconds from the first token to the last."""
    method_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    method_calls: Counter[str] = field(default_factory=Counter)

    def record(self, proposed: int, accepted: int, by_lookup: bool = False) -> None:
        """Count a round; ``proposed`` 0 is a step without a draft."""
        if not proposed:
            self.num_undrafted += 1
            return
        self.num_drafts += 1
        self.num_draft_tokens += proposed
        self.num_accepted_tokens += accepted
        if by_lookup:
            self.num_lookup_drafts += 1
            self.num_lookup_draft_tokens += proposed
            self.num_lookup_accepted_tokens += accepted
        if proposed > len(self.accepted_at):
            self.accepted_at += [0] * (proposed - len(self.accepted_at))
        for position in range(accepted):
            self.accepted_at[position] += 1

    def add_calls(
        self,
        seconds: Mapping[str, float],
        calls: Mapping[str, int],
        seconds_before: Mapping[str, float],
        calls_before: Mapping[str, int],
    ) -> None:
        """Add a session's calls since its counters, by method, had the values ``seconds_before`` and
        ``calls_before``."""
        for name, count in calls.items():
            if made := count - calls_before.get(name, 0):
                self.method_calls[name] += made
                self.method_seconds[name] += seconds[name] - seconds_before.get(name, 0.0)

    def add(self, other: "GenerationStats") -> None:
        self.generations += other.generations
        self.prompt_tokens += other.prompt_tokens
        self.reused_prompt_tokens += other.reused_prompt_tokens
        self.generation_tokens += other.generation_tokens
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        self.num_lookup_drafts += other.num_lookup_drafts
        self.num_lookup_draft_tokens += other.num_lookup_draft_tokens
        self.num_lookup_accepted_tokens += other.num_lookup_accepted_tokens
        self.num_undrafted += other.num_undrafted
        self.prefill_seconds += other.prefill_seconds
        self.decode_seconds += other.decode_seconds
        for name, seconds in other.method_seconds.items():
            self.method_seconds[name] += seconds
        self.method_calls += other.method_calls
        self.accepted_at += [0] * (len(other.accepted_at) - len(self.accepted_at))
        for position, count in enumerate(other.accepted_at):
            self.accepted_at[position] += count

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds

    @property
    def mean_acceptance_length(self) -> float:
        """The mean number of tokens per draft: 1 + accepted / drafts, or 1.0 without drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_rate_per_position(self) -> list[float]:
        """The drafts accepted at each position, divided by all drafts (unconditional, as in vLLM)."""
        return [count / self.num_drafts for count in self.accepted_at]

    @property
    def time_to_first_token(self) -> float:
        """The mean seconds to the first token."""
        return self.prefill_seconds / self.generations if self.generations else 0.0

    @property
    def time_per_output_token(self) -> float:
        """The mean seconds per token after the first."""
        rate = self.decode_tokens_per_second
        return 1 / rate if rate else 0.0

    @property
    def loop_share(self) -> float:
        """The share of the wall time that the loop's own Python takes, outside of the methods."""
        return 1 - sum(self.method_seconds.values()) / self.seconds if self.seconds else 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        """The computed prompt tokens, divided by the time to the first token."""
        computed = self.prompt_tokens - self.reused_prompt_tokens
        return computed / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """The tokens after the first, divided by their time."""
        return max(0, self.generation_tokens - self.generations) / self.decode_seconds if self.decode_seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        return self.counts() | self.times()

    def times(self) -> dict[str, Any]:
        methods = {
            name: {"calls": self.method_calls[name], "mean_ms": round(1000 * seconds / self.method_calls[name], 4)}
            for name, seconds in self.method_seconds.items()
        }
        return {
            "time_to_first_token_seconds": round(self.time_to_first_token, 6),
            "time_per_output_token_seconds": round(self.time_per_output_token, 6),
            "prefill_tokens_per_second": round(self.prefill_tokens_per_second, 1),
            "decode_tokens_per_second": round(self.decode_tokens_per_second, 1),
            "methods": methods,
            "loop_share": round(self.loop_share, 4),
        }

    def counts(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "reused_prompt_tokens": self.reused_prompt_tokens,
            "generation_tokens": self.generation_tokens,
            "num_undrafted_steps": self.num_undrafted,
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_lookup_drafts": self.num_lookup_drafts,
            "num_lookup_draft_tokens": self.num_lookup_draft_tokens,
            "num_lookup_accepted_tokens": self.num_lookup_accepted_tokens,
            "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "acceptance_rate_per_position": [round(rate, 4) for rate in self.acceptance_rate_per_position],
        }
