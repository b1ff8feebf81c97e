"""Splits the text of a reply into reasoning, content and the markup of tool calls (``calls.py``), while it is
generated.

The marks of a model's reasoning are read from its chat template.
"""

from dataclasses import dataclass
from typing import NamedTuple

from eagle3.runner.text.stop_strings import StopStrings

REASONING, CONTENT, TOOLS = "reasoning", "content", "tools"
FIELDS = {CONTENT: "content", REASONING: "reasoning_content"}
"""Maps the kind of a part to the field of a message."""


class ReasoningMarks(NamedTuple):
    """The marks around reasoning: ``begin`` and ``end`` are texts, ``begin_token`` and ``end_token`` the added tokens
    in them.

    ``begin_token`` is empty if no single token opens the reasoning. ``frame``: marks around content, which no part
    shows. With these, reasoning may also come after content. ``opener``: the mark after which content begins, if that
    is not ``end``.
    """

    begin: str
    end: str
    begin_token: str
    end_token: str
    frame: tuple[str, ...] = ()
    opener: str = ""

    @property
    def shown(self) -> tuple[str, ...]:
        """The texts that a reply must show for it to be split."""
        return self.begin, self.end, *self.frame


THINK = ReasoningMarks("<think>", "</think>", "<think>", "</think>")
BRACKETS = ReasoningMarks("[THINK]", "[/THINK]", "[THINK]", "[/THINK]")
"""The marks of Magistral."""
CHANNEL = ReasoningMarks("<|channel>thought\n", "<channel|>", "<|channel>", "<channel|>")
"""The marks of Gemma 4."""
HARMONY = ReasoningMarks(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    "",
    "<|end|>",
    (
        "<|start|>assistant", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>", "<|end|>",
        "<|channel|>final <|constrain|>json<|message|>",
    ),
    "<|channel|>final<|message|>",
)  # fmt: skip
"""The marks of gpt-oss."""
TAGS = ReasoningMarks(
    "<|open|>think<|sep|>",
    "<|close|>think<|sep|>",
    "",
    "",
    ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    "<|open|>response<|sep|>",
)
"""The marks of Kimi K3."""
MARKS = {
    "<|channel>": CHANNEL, "<|channel|>": HARMONY, "<|open|>": TAGS, "[THINK]": BRACKETS, "</think>": THINK,
}  # fmt: skip
"""The marks of reasoning by a text in the chat template."""


def reasoning_marks(template: str) -> ReasoningMarks | None:
    """Return the marks that enclose reasoning in a chat template; None if it has no reasoning, or unknown marks."""
    return next((marks for text, marks in MARKS.items() if text in template), None)


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
        hidden = (*self.specials, *(self.marks.frame if self.marks else ()))
        self._searched = {
            state: StopStrings([*self._ahead(*state), *hidden])
            for state in ((REASONING, True), (CONTENT, False), (CONTENT, True))
            if self._ahead(*state) or hidden
        }
        self._first = {each[0] for each in (*hidden, *self._ahead(REASONING, True), *self._ahead(CONTENT, False))}

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
        strings = self._searched.get((self._kind, self._begun))
        if strings is None or self._first.isdisjoint(self._held):
            parts += self._part(len(self._held))
            return False
        found = strings.first(self._held)
        if found is None:
            parts += self._part(len(self._held) - strings.unfinished(self._held))
            return False
        start, mark = found
        asked = self._ahead(self._kind, self._begun)
        parts += self._part(start)
        marks = self._ahead(self._kind, self._begun)
        if mark in asked and mark not in marks:  # reasoning cannot begin after other text
            return True
        if marks.get(mark) == TOOLS:
            self._kind = TOOLS
            return False
        self._drop(len(mark))
        if mark in marks:
            self._kind, self._begun, self._trims = marks[mark], True, True
        return True

    def _ahead(self, kind: str, begun: bool) -> dict[str, str]:
        """Return the marks that may come in a part of this kind, and the kind of the text after each. ``begun``: text
        or reasoning came before."""
        if kind == REASONING:
            return {} if self.marks is None else {self.marks.end: CONTENT}
        ahead = dict.fromkeys(self.tool_marks, TOOLS)
        if self.marks is not None and (not begun or self.marks.frame):
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
