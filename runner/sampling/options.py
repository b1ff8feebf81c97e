"""The options of sampling, and the check that an artifact supports them."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from eagle3.runner.contract import Metadata
from eagle3.runner.text.checks import shown

TOKEN_ID = re.compile("0|[1-9][0-9]{0,17}")
LEAST, MOST = 1e-9, 1e9
"""Bounds of temperatures, penalties and biases within which float32 multiplies and divides without overflow."""


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of transformers, under its names and in its order: ``logit_bias`` (id to bias) is added
    to the logits; logits of tokens that occurred before, also in the prompt, are divided by ``repetition_penalty``
    (multiplied if negative); OpenAI's penalties are subtracted, ``frequency_penalty`` as often as a token was
    generated, ``presence_penalty`` once; then come the temperature, ``top_k``, ``top_p`` and ``min_p``.

    Ids of ``logit_bias`` may be text, such as "17", as the keys of a JSON object are. ``temperature`` 0 takes the most
    likely token. ``seed`` None draws a new seed for each generation; prompts with the same seed have the same noise at
    the same positions. Raises ValueError with one line for a value of another type or out of bounds.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        _number(
            "temperature", self.temperature, lambda t: t == 0 or LEAST <= t <= MOST, f"0 or from {LEAST:g} to {MOST:g}"
        )
        _integer("top_k", self.top_k, lambda k: k >= 0, "0 (all) or more")
        _number("top_p", self.top_p, lambda p: 0 < p <= 1, "above 0 and at most 1")
        _number("min_p", self.min_p, lambda p: 0 <= p < 1, "at least 0 and below 1")
        _number("repetition_penalty", self.repetition_penalty, lambda p: LEAST <= p <= MOST, "above 0, 1 for none")
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), lambda p: -MOST <= p <= MOST, "finite, 0 for none")
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias is {shown(self.logit_bias)}, but must be a mapping of token ids to numbers")
        given = [(_token_id(token), bias) for token, bias in self.logit_bias.items()]
        for token, bias in given:
            _integer("an id of logit_bias", token, lambda i: i >= 0, "0 or more")
            name = f"the logit_bias of {shown(token)}"
            _number(name, bias, lambda b: -MOST <= b <= MOST, "finite; -100 bans a token")
        if len(dict(given)) != len(given):
            raise ValueError(f"logit_bias is {shown(self.logit_bias)}, which names a token id twice")
        object.__setattr__(self, "logit_bias", dict(given))
        if self.seed is not None:
            _integer("seed", self.seed, lambda s: 0 <= s < 1 << 63, "from 0 to 2**63 - 1")

    @property
    def plain(self) -> bool:
        """True if the options ask for the artifact's own greedy ids."""
        return not (self.temperature or self.adjusts)

    @property
    def adjusts(self) -> bool:
        """True if single logits are changed before a token is drawn."""
        return bool(self.logit_bias or self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    def check(self, metadata: Metadata) -> None:
        """Raise ValueError with one line if the artifact does not support the options."""
        if not self.plain:
            check_logits(metadata, "sampling, a bias or a penalty")
        for token in self.logit_bias:
            if token >= metadata.vocab_size:
                last = metadata.vocab_size - 1
                raise ValueError(f"id {shown(token)} of logit_bias is outside the vocabulary 0..{last}")


def _token_id(given: object) -> object:
    """Return a token id given as text as a number, since JSON has no numbers as keys. Anything else is returned
    unchanged."""
    return int(given) if isinstance(given, str) and TOKEN_ID.fullmatch(given) else given


def check_logits(metadata: Metadata, wanted_for: str) -> None:
    """Raise ValueError with one line if the artifact has no logits."""
    if not metadata.has_logits:
        raise ValueError(f"{wanted_for} needs logits, which this artifact lacks: export it again without --no-logits")


def _number(name: str, value: object, allowed: Callable[[float], bool], bounds: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not allowed(value):
        raise ValueError(f"{name} is {shown(value)}, but must be a number {bounds}")


def _integer(name: str, value: object, allowed: Callable[[int], bool], bounds: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not allowed(value):
        raise ValueError(f"{name} is {shown(value)}, but must be an integer {bounds}")
