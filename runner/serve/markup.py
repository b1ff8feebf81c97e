"""The markup of a model's own replies: where reasoning begins and ends, and that tool calls follow.

Which markup a model has is read from its chat template. Tool calls are parsed by ExecuTorch's detectors.
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
    """Llama 3's calls: JSON objects alone, behind PYTHON_TAG or not, with semicolons between several. ExecuTorch has no
    detector of them; what they say is read as Hermes's calls are."""

    def detect_and_parse(self, text: str, tools: dict[str, dict]) -> ParseResult:
        """Return the calls, or all of ``text`` where it is something else."""
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
"""The beginnings of a tool call's text."""

REASONING, CONTENT, TOOLS = "reasoning", "content", "tools"
FIELDS = {CONTENT: "content", REASONING: "reasoning_content"}
"""The field of a message, by the kind of a part."""


class ReasoningMarks(NamedTuple):
    """``begin`` and ``end`` as text; ``begin_token`` and ``end_token`` are the added tokens among them."""

    begin: str
    end: str
    begin_token: str
    end_token: str


THINK = ReasoningMarks("<think>", "</think>", "<think>", "</think>")
CHANNEL = ReasoningMarks("<|channel>thought\n", "<channel|>", "<|channel>", "<channel|>")
"""Gemma 4's."""


def reasoning_marks(template: str) -> ReasoningMarks | None:
    """Return the marks by which a chat template sets reasoning apart; None if it knows no reasoning."""
    if "<|channel>" in template:
        return CHANNEL
    return THINK if "</think>" in template else None


def tool_parser(template: str) -> str:
    """Return the name in TOOL_PARSERS of a template's tool calls."""
    if "<|tool_call>" in template:
        return "gemma"
    if "<function=" in template:
        return "qwen"
    return "llama" if PYTHON_TAG in template else "hermes"


class Part(NamedTuple):
    """``start``: the place of ``text`` in the whole of what was pushed; None where it is no piece of that."""

    kind: str
    text: str
    start: int | None = None


@dataclass
class Splitter:
    """An answer's text, as it comes, into reasoning, content and tool calls.

    ``marks``: None where reasoning is not told apart; ``reasoning``: the prompt has opened it; ``tool_marks``: what
    begins tool calls, which go to the end of the answer, empty where there are no tools; ``specials`` are tokens that
    no part shows.
    """

    marks: ReasoningMarks | None = None
    reasoning: bool = False
    tool_marks: tuple[str, ...] = ()
    specials: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._held, self._start = "", 0  # and the place of what is held in the whole text
        self._kind = REASONING if self.reasoning else CONTENT
        self._begun = self.reasoning  # reasoning comes first or not at all
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
        """Pass on what is certain; returns whether a mark was met, so that there may be more."""
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
        marks = self._ahead()  # text before a mark may have made it one no more
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
        """Return the marks that may come now, and the kind of what follows each."""
        if self._kind == REASONING and self.marks is not None:
            return {self.marks.end: CONTENT}
        ahead = dict.fromkeys(self.tool_marks, TOOLS)
        if self.marks is not None and not self._begun:
            ahead[self.marks.begin] = REASONING
        return ahead

    def _drop(self, count: int) -> str:
        """Hold the first ``count`` characters no more; returns them."""
        dropped, self._held = self._held[:count], self._held[count:]
        self._start += count
        return dropped

    def _part(self, count: int) -> list[Part]:
        """Return the first ``count`` characters that are held."""
        text = self._drop(count)
        if self._trims and self._begun:
            text = text.lstrip("\n")
        if not text:
            return []
        self._trims = False
        if self._kind == CONTENT and text.strip():
            self._begun = True
        return [Part(self._kind, text, self._start - len(text))]
