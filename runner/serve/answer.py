"""Reads the answer of a generation while it is generated: reasoning, content, tool calls and token counts."""

import json
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from eagle3.runner.contract import Metadata
from eagle3.runner.loop.results import ABORT, TokenLogprobs
from eagle3.runner.loop.statistics import GenerationStats
from eagle3.runner.serve.calls import read_calls
from eagle3.runner.serve.dialogue import Dialogue, Turn
from eagle3.runner.serve.jobs import Job
from eagle3.runner.serve.markup import CONTENT, REASONING, TOOLS, Part
from eagle3.runner.serve.protocol import Delta, Outcome
from eagle3.runner.text.stop_strings import REPLACEMENT
from eagle3.runner.text.text import Text

FinishReason = Literal["stop", "length", "tool_calls"]


class Call(NamedTuple):
    """A tool call; ``arguments`` is JSON as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass
class Answer:
    """The part of a job's reply that was read so far; it is complete when ``read`` has ended."""

    turn: Turn
    texts: dict[str, list[str]] = field(default_factory=lambda: {REASONING: [], CONTENT: [], TOOLS: []})
    calls: list[Call] = field(default_factory=list)
    outcome: Outcome | None = None

    def text(self, kind: str) -> str:
        return "".join(self.texts[kind])

    @property
    def finish_reason(self) -> FinishReason:
        """The reason why generation ended, in OpenAI's terms."""
        reason = ABORT if self.outcome is None else self.outcome.finish_reason
        if reason == "length":
            return "length"
        return "tool_calls" if self.calls else "stop"

    async def read(self, job: Job, dialogue: Dialogue) -> AsyncGenerator[tuple[list[Part], Delta | None], None]:
        """Yield for each round the parts that became certain and are no call, and the round's delta; at the end the
        parts that were held back. Raises the errors of ``Job.deltas``."""
        splitter = self.turn.splitter()
        async with aclosing(job.deltas()) as deltas:
            async for delta in deltas:
                yield self._kept(splitter.push(delta.text)), delta
        self.outcome = job.outcome
        rest = self._kept(splitter.finish())
        yield rest + self._called(dialogue), None

    def _kept(self, parts: list[Part]) -> list[Part]:
        """Return the parts that are shown. The text of a forced call is content, but is shown only if it is no call."""
        for part in parts:
            self.texts[part.kind].append(part.text)
        hidden = (TOOLS, CONTENT) if self.turn.tools.forced else (TOOLS,)
        return [part for part in parts if part.kind not in hidden]

    def _called(self, dialogue: Dialogue) -> list[Part]:
        """Find the tool calls; returns text that is no tool call as content."""
        tools = self.turn.tools
        if tools.forced:
            self.calls = _forced_calls(tools.choice, self.text(CONTENT), set(tools.schemas))
            if self.calls:
                self.texts[CONTENT].clear()
            cut = self.text(CONTENT)  # the answer ended before its list of calls was complete
            return [Part(CONTENT, cut)] if cut else []
        text = self.text(TOOLS)
        if not text or dialogue.dialect is None:
            return []
        found, rest = read_calls(dialogue.dialect, text, tools.schemas)
        self.calls = [Call(new_id("call"), name, arguments) for name, arguments in found]
        return self._kept([Part(CONTENT, rest)] if rest else [])


def _forced_calls(choice: str, text: str, names: set[str]) -> list[Call]:
    """Return the calls in a text that follows the grammar of ``Tools``. If the budget cut the text, return the
    incomplete call of a named function, or otherwise the complete calls."""
    if choice in names:
        return [Call(new_id("call"), choice, text)]
    found, place, decoder = [], text.find("{"), json.JSONDecoder()
    with suppress(ValueError, LookupError, TypeError, RecursionError):  # the model may nest lists beyond any limit
        while place >= 0:
            each, end = decoder.raw_decode(text, place)
            found.append(Call(new_id("call"), each["name"], json.dumps(each["parameters"])))
            place = text.find("{", end)
    return found


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """Return the fields that OpenAI's completions and their chunks begin with."""
    return {"id": new_id(prefix), "object": kind, "created": int(time.time()), "model": model}


def usage(groups: Sequence[tuple[int, list[Job]]], reasoning_end: int | None = None) -> dict[str, Any]:
    """Return the total number of tokens of all choices in OpenAI's shape. ``groups``: each prompt's tokens and its
    jobs. ``reasoning_end``: the token that ends reasoning."""
    outcomes = [job.outcome for _, jobs in groups for job in jobs if job.outcome is not None]
    stats, prompt_tokens, cached, reasoning = GenerationStats(), 0, 0, 0
    for count, [first, *_] in groups:
        prompt_tokens += count
        cached += 0 if first.outcome is None else first.outcome.stats.reused_prompt_tokens
    for outcome in outcomes:
        stats.add(outcome.stats)
        if reasoning_end is not None and reasoning_end in outcome.token_ids:
            reasoning += outcome.token_ids.index(reasoning_end) + 1
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": stats.generation_tokens,
        "total_tokens": prompt_tokens + stats.generation_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": stats.num_accepted_tokens,
            "rejected_prediction_tokens": stats.num_draft_tokens - stats.num_accepted_tokens,
            "reasoning_tokens": reasoning,
        },
    }


def token_text(text: Text, token: int) -> str:
    """Return a token's text as it is within a text, since decoders drop the space before a text's first word."""
    return text.decode([token, token], False)[len(text.decode([token], False)) :]


def token_logprobs(
    text: Text, metadata: Metadata, given: list[TokenLogprobs], options: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return log probabilities in OpenAI's shape, without the tokens that end a text."""
    ends = {*metadata.eos_ids, *options.get("stop_token_ids", ())}

    def described(token: int, logprob: float) -> dict[str, Any]:
        written = token_text(text, token)
        octets = written.encode() if REPLACEMENT not in written else text.token_bytes(token)
        return {"token": written, "bytes": octets and list(octets), "logprob": max(logprob, -9999.0)}

    return [
        described(each.token_id, each.logprob) | {"top_logprobs": [described(*top) for top in each.top]}
        for each in given
        if each.token_id not in ends
    ]
