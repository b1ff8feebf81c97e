"""The options of a generation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, TypedDict

from eagle3.runner.contract import Metadata
from eagle3.runner.sampling.constraint import check_constraint
from eagle3.runner.sampling.options import Sampling, check_logits
from eagle3.runner.text.checks import shown
from eagle3.runner.text.stop_strings import StopStrings

AUTO: Final = "auto"


@dataclass(frozen=True)
class Options(Sampling):
    """Options for choosing tokens (``Sampling``) and for ending a generation. Raises ValueError for values out of
    bounds."""

    max_new_tokens: int = 128
    min_tokens: int = 0
    """The least number of tokens before an end token or a stop string ends the text (vLLM's name)."""
    stop: str | Sequence[str] = ()
    """The text ends before the first of these strings to appear."""
    reasoning: Sequence[str] = ()
    """The texts before and after the model's reasoning, in which stop strings do not count. The first is empty if the
    prompt has opened the reasoning."""
    stop_token_ids: Sequence[int] = ()
    """End tokens besides the artifact's own."""
    skip_special_tokens: bool = True
    """If False, the text shows special tokens, such as the markers of a tool call."""
    ignore_eos: bool = False
    """If True, generation continues after the artifact's own end tokens, for benchmarks."""
    chain_len: int | Literal["auto"] | None = None
    """Draft tokens per round: at most the artifact's number (the default), 0 for none, "auto" for the fastest
    number."""
    ngram: bool | None = None
    """If True, a lookup in the text proposes too, in the rounds that ``lookup_choice.py`` chooses. None means the
    result of ``lookup_choice.pays``, or False if ``chain_len`` is 0."""
    logprobs: int | None = None
    """The number of most likely tokens whose log-probabilities are returned with each token's own. They are of the raw
    logits."""

    structured_outputs: Mapping[str, Any] | None = None
    """The form that the text must have, under vLLM's names: one of ``{"json": schema}``, ``{"json_object": true}``,
    ``{"regex": ...}``, ``{"choice": [...]}`` and ``{"grammar": a grammar of llguidance's Lark}``. The mapping may also
    have ``reasoning_end``, the text of the token that ends unconstrained reasoning. The prompt opens that reasoning, or
    ``reasoning_begin`` names the token that opens it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.structured_outputs is not None:
            check_constraint(self.structured_outputs)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, items in (("stop", "one string or several"), ("stop_token_ids", "a list of token ids")):
            value = getattr(self, name)
            if not isinstance(value, Sequence) or isinstance(value, str | bytes):
                raise ValueError(f"{name} is {shown(value)}, but must be {items}; leave it out for none")
            object.__setattr__(self, name, tuple(value))
        for name, least in (("max_new_tokens", 1), ("min_tokens", 0), ("logprobs", 0), ("chain_len", 0)):
            value = getattr(self, name)
            if (value is None and name in ("logprobs", "chain_len")) or (name == "chain_len" and value == AUTO):
                continue
            if type(value) is not int or value < least:
                raise ValueError(f"{name} is {shown(value)}, but must be a whole number, {least} or more")
        if self.min_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, but max_new_tokens {self.max_new_tokens}: lower the first"
            )
        if not all(isinstance(string, str) and string for string in self.stop):
            raise ValueError(f"stop is {shown(self.stop)}, but stop strings must be text of a character or more")
        StopStrings(self.stop)
        marks = self.reasoning
        if marks and not (
            isinstance(marks, tuple | list) and [type(each) for each in marks] == [str, str] and marks[1]
        ):
            raise ValueError(f"reasoning is {shown(marks)}, but must be the two texts around it")
        if not all(type(token) is int and token >= 0 for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids is {shown(self.stop_token_ids)}, but must be whole numbers, 0 or more")
        for name in ("ignore_eos", "skip_special_tokens", "ngram"):
            if name == "ngram" and self.ngram is None:
                continue
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name} is {shown(getattr(self, name))}, but must be true or false")
        if self.ignore_eos and self.structured_outputs is not None:
            raise ValueError("structured_outputs end with an end token: leave ignore_eos out")
        if self.min_tokens and self.structured_outputs is not None:
            raise ValueError("structured_outputs end when their grammar is complete: leave min_tokens out")

    @classmethod
    def of(cls, **given: Any) -> "Options":  # untyped, since names also come from files and requests
        """Return the options with these names and values. Raises ValueError for an unknown name."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no option of a generation: the options are {', '.join(sorted(known))}")
        return cls(**given)

    def check(self, metadata: Metadata) -> None:
        super().check(metadata)
        if self.min_tokens and self.stop_ids(metadata):
            check_logits(metadata, "min_tokens")
        if self.logprobs is not None:
            check_logits(metadata, "logprobs")
            if self.logprobs > metadata.vocab_size:
                raise ValueError(
                    f"logprobs is {shown(self.logprobs)}, but the vocabulary has {metadata.vocab_size} tokens: ask for "
                    "as many at most"
                )
        for token in self.stop_token_ids:
            if token >= metadata.vocab_size:
                raise ValueError(
                    f"id {shown(token)} of stop_token_ids is outside the vocabulary 0..{metadata.vocab_size - 1}"
                )

    def stop_ids(self, metadata: Metadata) -> list[int]:
        return [*(() if self.ignore_eos else metadata.eos_ids), *self.stop_token_ids]


class OptionFields(TypedDict, total=False):
    """The fields of ``Options``, as keywords of ``Model.generate`` and others."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    max_new_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    reasoning: Sequence[str]
    stop_token_ids: Sequence[int]
    skip_special_tokens: bool
    ignore_eos: bool
    chain_len: int | Literal["auto"] | None
    ngram: bool | None
    logprobs: int | None
    structured_outputs: Mapping[str, Any] | None
