"""What is asked of sampling, and whether an artifact can do it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle3.runner.contract import Metadata

LEAST, MOST = 1e-9, 1e9
"""Of temperatures, penalties and biases: what float32 multiplies and divides by without overflow."""


@dataclass(frozen=True)
class Sampling:
    """transformers' parameters under its names, in its order: ``logit_bias`` (id to bias) is added to the logits; those
    of tokens that are there already, the prompt's too, are divided by ``repetition_penalty`` (multiplied where
    negative); then come the temperature, ``top_k``, ``top_p`` and ``min_p``.

    ``temperature`` 0 takes the most likely token, ``seed`` None is another one for each generation. Raises ValueError,
    one line, for a value of another type or out of bounds.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self):
        _number(
            "temperature", self.temperature, lambda t: t == 0 or LEAST <= t <= MOST, f"0 or from {LEAST:g} to {MOST:g}"
        )
        _integer("top_k", self.top_k, lambda k: k >= 0, "0 (all) or more")
        _number("top_p", self.top_p, lambda p: 0 < p <= 1, "above 0 and at most 1")
        _number("min_p", self.min_p, lambda p: 0 <= p < 1, "at least 0 and below 1")
        _number("repetition_penalty", self.repetition_penalty, lambda p: LEAST <= p <= MOST, "above 0, 1 for none")
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias is {self.logit_bias!r}, but must be a mapping of token ids to numbers")
        for token, bias in self.logit_bias.items():
            _integer("an id of logit_bias", token, lambda i: i >= 0, "0 or more")
            _number(f"the logit_bias of {token}", bias, lambda b: -MOST <= b <= MOST, "finite; -100 bans a token")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if self.seed is not None:
            _integer("seed", self.seed, lambda s: 0 <= s < 1 << 63, "from 0 to 2**63 - 1")

    @property
    def plain(self) -> bool:
        """Whether the artifact's own greedy ids are what is asked for."""
        return not (self.temperature or self.logit_bias or self.repetition_penalty != 1)

    @property
    def filters(self) -> bool:
        """Whether ids are left out before one is drawn."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)

    def check(self, metadata: Metadata) -> None:
        """Raises ValueError, one line, for what the artifact cannot do."""
        if not self.plain:
            check_logits(metadata, "sampling, a bias or a repetition penalty")
        for token in self.logit_bias:
            if token >= metadata.vocab_size:
                raise ValueError(f"id {token} of logit_bias is outside the vocabulary 0..{metadata.vocab_size - 1}")


def check_logits(metadata: Metadata, wanted_for: str) -> None:
    """Raises ValueError, one line, where the artifact gives no logits."""
    if not metadata.has_logits:
        raise ValueError(f"{wanted_for} needs logits, which this artifact lacks: export it again without --no-logits")


def _number(name: str, value: Any, allowed: Callable[[float], bool], bounds: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not allowed(value):
        raise ValueError(f"{name} is {value!r}, but must be a number {bounds}")


def _integer(name: str, value: Any, allowed: Callable[[int], bool], bounds: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not allowed(value):
        raise ValueError(f"{name} is {value!r}, but must be an integer {bounds}")
