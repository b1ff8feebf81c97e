"""What one generation is asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from eagle3.runner.contract import Metadata
from eagle3.runner.sampling.options import Sampling, check_logits

AUTO = "auto"


@dataclass(frozen=True)
class Options(Sampling):
    """How tokens are chosen (``Sampling``), and when it ends. Raises ValueError for values that make no sense."""

    max_new_tokens: int = 128
    stop: str | Sequence[str] = ()
    """The text ends before the first of these strings to appear."""
    stop_token_ids: Sequence[int] = ()
    """Besides the artifact's own end tokens."""
    ignore_eos: bool = False
    """Go on behind the artifact's own end tokens, for benchmarks."""
    chain_len: int | str | None = None
    """Draft tokens a round: at most the artifact's (the default), 0 for none, "auto" for as many as pay."""
    logprobs: int | None = None
    """Log-probabilities of each token and of so many that are likeliest, by the model's own distribution."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, least in (("max_new_tokens", 1), ("logprobs", 0), ("chain_len", 0)):
            value = getattr(self, name)
            if value is None or (name, value) == ("chain_len", AUTO):
                continue
            if type(value) is not int or value < least:
                raise ValueError(f"{name} is {value!r}, but must be a whole number, {least} or more")
        if not all(isinstance(string, str) and string for string in self.stop):
            raise ValueError(f"stop is {self.stop!r}, but stop strings must have a character or more")
        if not all(type(token) is int for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids is {self.stop_token_ids!r}, but must be whole numbers")

    @classmethod
    def of(cls, **given: Any) -> "Options":
        """From names and values. Raises ValueError for a name that there is not."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no option of a generation: there are {', '.join(sorted(known))}")
        return cls(**given)

    def check(self, metadata: Metadata) -> None:
        super().check(metadata)
        if self.logprobs is not None:
            check_logits(metadata, "logprobs")

    def stop_ids(self, metadata: Metadata) -> list[int]:
        return [*(() if self.ignore_eos else metadata.eos_ids), *self.stop_token_ids]
