"""Compiles the required form of a text with llguidance: a JSON schema, a regular expression, a list of strings or a
grammar.

``structured_outputs`` has vLLM's names. llguidance is imported when the first of them is compiled, so everything else
runs without it.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.runner.contract import Metadata
from eagle3.runner.text.checks import shown

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance._lib import JsonCompileOptions  # exists only in the type stubs

KINDS = ("json", "json_object", "regex", "choice", "grammar")
REASONING = ("reasoning_begin", "reasoning_end")
KEPT_BYTES = 64 << 20
"""The most bytes of compiled grammars that are kept, since compiling a large schema takes tenths of a second."""
BYTES_OF_GRAMMAR, BYTES_A_CHARACTER = 1 << 16, 128
"""The bytes that a compiled grammar is assumed to take: a constant, and a number per character of the grammar in
llguidance's own form. For enums, properties and choices 44 to 172 bytes per character were measured."""
LONGEST_REASON = 400
"""The most characters of llguidance's reason in an error, since it may contain a grammar of a megabyte."""
SEPARATORS: "JsonCompileOptions" = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""JSON is written as by Python's ``json``, unless the schema's own ``x-guidance`` says otherwise. With flexible
whitespace a comma would force no token after it, and a small model might write spaces until its budget ends."""


def check_constraint(asked: object) -> None:
    """Raise ValueError with one line if ``asked`` is no ``structured_outputs``. Only ``Grammars.compile`` checks the
    grammar itself."""
    if not isinstance(asked, Mapping):
        raise ValueError(f"structured_outputs is {shown(asked)}, but must be a mapping with one of {', '.join(KINDS)}")
    unknown = [name for name in asked if name not in (*KINDS, *REASONING)]
    kinds = [kind for kind in KINDS if kind in asked]
    if unknown or len(kinds) != 1:
        found = shown(", ".join(map(str, asked)))
        raise ValueError(f"structured_outputs has {found}, but must have one of {', '.join(KINDS)}")
    kind, value = kinds[0], asked[kinds[0]]
    if kind == "json" and not isinstance(value, Mapping | bool | str):
        raise ValueError(f"json of structured_outputs is {shown(value)}, but must be a JSON schema")
    if kind == "json_object" and value is not True:
        raise ValueError(f"json_object of structured_outputs is {shown(value)}, but must be true")
    if kind in ("regex", "grammar") and not isinstance(value, str):
        raise ValueError(f"{kind} of structured_outputs is {shown(value)}, but must be text")
    strings = isinstance(value, list | tuple) and value and all(isinstance(each, str) and each for each in value)
    if kind == "choice" and not strings:
        raise ValueError(f"choice of structured_outputs is {shown(value)}, but must be a list of one string or more")
    for name in REASONING:
        if name in asked and not isinstance(asked[name], str):
            raise ValueError(f"{name} of structured_outputs is {shown(asked[name])}, but must be a token's text")
    if "reasoning_begin" in asked and "reasoning_end" not in asked:
        raise ValueError("structured_outputs has a reasoning_begin and no reasoning_end: give both")


@dataclass(frozen=True)
class Constraint:
    """A compiled grammar, for any number of generations.

    ``reasoning_begin`` is the token that may open reasoning before the constrained text, None if the reasoning is open
    from the start. ``reasoning_end`` is the token that ends it, None if there is no reasoning. Reasoning itself is not
    constrained.
    """

    matcher: "LLMatcher"
    eos_ids: tuple[int, ...]
    vocab_size: int
    reasoning_begin: int | None = None
    reasoning_end: int | None = None
    seconds: tuple[float, float] | None = None
    """The most seconds of processor time that one generation's grammar may take: a constant, and a number per token.
    None is no limit."""


class Grammars:
    """The grammars of one tokenizer. Any thread may call ``compile``."""

    def __init__(self, tokenizer_file: Path, metadata: Metadata):
        """Raises ValueError with one line if llguidance is not installed, the artifact has no logits or no end tokens,
        or llguidance does not accept the tokenizer."""
        if not metadata.has_logits:
            raise ValueError(
                "structured_outputs needs logits, which this artifact lacks: export it again without --no-logits"
            )
        if not metadata.eos_ids:
            raise ValueError("structured_outputs needs an end token, and this artifact names none")
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise ValueError("structured_outputs needs llguidance: type pip install 'eagle3-export[serve]'") from None
        self._metadata, self._lock = metadata, threading.Lock()
        self._compiled: OrderedDict[str, tuple[LLMatcher, int]] = OrderedDict()
        self._bytes = 0
        text = tokenizer_file.read_text(encoding="utf-8")
        self._ids = {token["content"]: token["id"] for token in json.loads(text).get("added_tokens", [])}
        try:
            self._tokenizer = LLTokenizer(text, n_vocab=metadata.vocab_size, eos_token=list(metadata.eos_ids))
        except Exception as error:  # the library may panic in Rust
            reason = " ".join(str(error).split())
            raise ValueError(f"llguidance does not take the tokenizer {tokenizer_file}: {reason}") from error

    def compile(self, asked: Mapping[str, Any]) -> Constraint:
        """Compile ``structured_outputs``. Raises ValueError for an invalid grammar or schema, with llguidance's reason
        in one line."""
        if (kept := self.kept(asked)) is not None:
            return kept
        grammar = self.source(asked)
        matcher = self._matcher(asked, grammar)  # without the lock, since it may take a second
        size = BYTES_OF_GRAMMAR + BYTES_A_CHARACTER * len(grammar)
        with self._lock:
            if _key(asked) not in self._compiled:
                self._compiled[_key(asked)] = matcher, size
                self._bytes += size
            while self._bytes > KEPT_BYTES and len(self._compiled) > 1:
                _, (_, size) = self._compiled.popitem(last=False)
                self._bytes -= size
        return self._constraint(matcher, asked)

    def kept(self, asked: Mapping[str, Any]) -> Constraint | None:
        """Return the constraint if it is already compiled, otherwise None. Raises the errors of
        ``check_constraint``."""
        check_constraint(asked)
        with self._lock:
            if (key := _key(asked)) not in self._compiled:
                return None
            self._compiled.move_to_end(key)
            matcher, _ = self._compiled[key]
        return self._constraint(matcher, asked)

    @staticmethod
    def source(asked: Mapping[str, Any]) -> str:
        """Return ``structured_outputs`` in llguidance's own form. Raises ValueError for an invalid JSON schema."""
        check_constraint(asked)
        kind = next(kind for kind in KINDS if kind in asked)
        try:
            return _grammar(kind, asked[kind])
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{kind} of structured_outputs is no JSON schema: {_line(error)}") from error

    @staticmethod
    def refusal(asked: Mapping[str, Any], reason: object) -> str:
        """Return the error line for a grammar that llguidance refuses for ``reason``."""
        return f"{next(kind for kind in KINDS if kind in asked)} of structured_outputs is refused: {_line(reason)}"

    def _constraint(self, matcher: "LLMatcher", asked: Mapping[str, Any]) -> Constraint:
        begin, end = (self._token(name, asked[name]) if name in asked else None for name in REASONING)
        return Constraint(matcher, tuple(self._metadata.eos_ids), self._metadata.vocab_size, begin, end)

    def _matcher(self, asked: Mapping[str, Any], grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        first = matcher.deep_copy()
        first.compute_bitmask()  # a grammar that allows no text fails here
        if matcher.is_error() or first.is_error():
            raise ValueError(self.refusal(asked, matcher.get_error() or first.get_error()))
        return matcher

    def _token(self, name: str, text: str) -> int:
        if text not in self._ids:
            raise ValueError(f"{name} of structured_outputs is {shown(text)}, which is no added token of the tokenizer")
        return self._ids[text]


def _grammar(kind: str, value: object) -> str:
    """Return llguidance's own form of a grammar."""
    from llguidance import LLMatcher

    if kind == "json_object":
        kind, value = "json", {"type": "object"}
    if kind == "json":
        schema = value if isinstance(value, str) else json.dumps(value, default=dict)
        whole = json.loads(schema)
        if whole is False:
            raise ValueError("false allows no text")
        if whole is True:  # llguidance accepts only objects as schemas
            schema = "{}"
        return LLMatcher.grammar_from_json_schema(schema, defaults=SEPARATORS)
    if kind == "choice":
        assert isinstance(value, Sequence)  # ensured by check_constraint
        value = "start: " + " | ".join(json.dumps(each) for each in value)
    assert isinstance(value, str)
    return LLMatcher.grammar_from_regex(value) if kind == "regex" else LLMatcher.grammar_from_lark(value)


def _key(asked: Mapping[str, Any]) -> str:
    return json.dumps({name: value for name, value in asked.items() if name in KINDS}, default=dict)


def _line(reason: object) -> str:
    line = " ".join(str(reason).split())
    return line if len(line) <= LONGEST_REASON else f"{line[:LONGEST_REASON]}..."
