"""Parses the markup of a model's replies: reasoning, content and tool calls.

The markup of a model is read from its chat template. Tool calls are parsed by ExecuTorch's detectors.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from executorch.examples.llm_server.python.tool_parsers import (
    GemmaToolCallDetector,
    HermesDetector,
    QwenFunctionCallDetector,
)
from executorch.examples.llm_server.python.tool_parsers.types import ParseResult

from eagle3.runner.text.stop_strings import StopStrings

PYTHON_TAG = "<|python_tag|>"


class LlamaDetector:
    """Detects the tool calls of Llama 3: bare JSON objects, optionally after PYTHON_TAG, separated by semicolons.
    ExecuTorch has no detector for this form; each object is read like a call of Hermes."""

    def detect_and_parse(self, text: str, tools: dict[str, dict]) -> ParseResult:
        """Return the calls, or all of ``text`` if it has no calls."""
        found, rest, decoder = "", text.removeprefix(PYTHON_TAG).strip(), json.JSONDecoder()
        with suppress(json.JSONDecodeError):
            while rest:
                _, end = decoder.raw_decode(rest)
                found += f"<tool_call>{rest[:end]}</tool_call>"
                rest = rest[end:].lstrip("; \n")
        parsed = HermesDetector().detect_and_parse(found, tools)
        return parsed if parsed.calls and not rest else ParseResult(normal_text=text)


TOOL_PARSERS = {
    "gemma": GemmaToolCallDetector,
    "qwen": QwenFunctionCallDetector,
    "hermes": HermesDetector,
    "llama": LlamaDetector,
}
TOOL_MARKS = {
    "gemma": ("<|tool_call>",),
    "qwen": ("<tool_call>", "<function="),
    "hermes": ("<tool_call>",),
    "llama": (PYTHON_TAG, '{"name":', '{"type": "function",'),
}
"""The texts with which a tool call may begin."""

REASONING, CONTENT, TOOLS = "reasoning", "content", "tools"
FIELDS = {CONTENT: "content", REASONING: "reasoning_content"}
"""Maps the kind of a part to the field of a message."""


class ReasoningMarks(NamedTuple):
    """The marks around reasoning: ``begin`` and ``end`` are texts, ``begin_token`` and ``end_token`` the added tokens
    in them."""

    begin: str
    end: str
    begin_token: str
    end_token: str


THINK = ReasoningMarks("<think>", "</think>", "<think>", "</think>")
CHANNEL = ReasoningMarks("<|channel>thought\n", "<channel|>", "<|channel>", "<channel|>")
"""The marks of Gemma 4."""


def reasoning_marks(template: str) -> ReasoningMarks | None:
    """Return the marks that enclose reasoning in a chat template; None if it has no reasoning."""
    if "<|channel>" in template:
        return CHANNEL
    return THINK if "</think>" in template else None


def tool_parser(template: str) -> str:
    """Return the name in TOOL_PARSERS of the parser for a template's tool calls."""
    if "<|tool_call>" in template:
        return "gemma"
    if "<function=" in template:
        return "qwen"
    return "llama" if PYTHON_TAG in template else "hermes"


class Part(NamedTuple):
    """A part of an answer. ``start`` is the offset of ``text`` in all text pushed, None if it is not a part of that
    text."""

    kind: str
    text: str
    start: int | None = None


@dataclass
class Splitter:
    """Splits an answer's text, while it is generated, into reasoning, content and tool calls.

    ``marks``: None if reasoning is not separated; ``reasoning``: True if the prompt opened it; ``tool_marks``: texts
    that begin tool calls, which extend to the end of the answer, empty without tools; ``specials``: tokens that no part
    shows.
    """

    marks: ReasoningMarks | None = None
    reasoning: bool = False
    tool_marks: tuple[str, ...] = ()
    specials: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._held, self._start = "", 0  # the held text, and its offset in the whole text
        self._kind = REASONING if self.reasoning else CONTENT
        self._begun = self.reasoning  # reasoning can only come first
        self._trims = True

    def push(self, text: str) -> list[Part]:
        """Return the parts that became certain."""
        self._held += text
        parts: list[Part] = []
        while self._advance(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """Return the parts that were held back."""
        return self._part(len(self._held))

    def _advance(self, parts: list[Part]) -> bool:
        """Append to ``parts`` the held text in which no mark can begin. Returns True if a mark was found, so that more
        parts may follow."""
        if self._kind == TOOLS:
            return False
        marks = self._ahead()
        strings = StopStrings([*marks, *self.specials]) if marks or self.specials else None
        if strings is None:
            parts += self._part(len(self._held))
            return False
        found = strings.first(self._held)
        if found is None:
            parts += self._part(len(self._held) - strings.unfinished(self._held))
            return False
        start, mark = found
        parts += self._part(start)
        marks = self._ahead()  # reasoning cannot begin after other text
        if mark not in marks and mark not in self.specials:
            return True
        if marks.get(mark) == TOOLS:
            self._kind = TOOLS
            return False
        self._drop(len(mark))
        if mark in marks:
            self._kind, self._begun, self._trims = marks[mark], True, True
        return True

    def _ahead(self) -> dict[str, str]:
        """Return the marks that may come now, and the kind of the text after each."""
        if self._kind == REASONING and self.marks is not None:
            return {self.marks.end: CONTENT}
        ahead = dict.fromkeys(self.tool_marks, TOOLS)
        if self.marks is not None and not self._begun:
            ahead[self.marks.begin] = REASONING
        return ahead

    def _drop(self, count: int) -> str:
        """Remove and return the first ``count`` held characters."""
        dropped, self._held = self._held[:count], self._held[count:]
        self._start += count
        return dropped

    def _part(self, count: int) -> list[Part]:
        """Remove the first ``count`` held characters, and return them as a part."""
        text = self._drop(count)
        if self._trims and self._begun:
            text = text.lstrip("\n")
        if not text:
            return []
        self._trims = False
        if self._kind == CONTENT and text.strip():
            self._begun = True
        return [Part(self._kind, text, self._start - len(text))]
