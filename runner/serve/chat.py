"""Handles ``POST /v1/chat/completions``.

It also attributes the characters of an answer to the draft, whose proposals the target accepted, or to the target.
"""

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request

from eagle3.runner.contract import Metadata
from eagle3.runner.loop.results import TokenLogprobs
from eagle3.runner.options import Options
from eagle3.runner.serve.answer import Answer, Call, head, token_logprobs, usage
from eagle3.runner.serve.dialogue import Turn
from eagle3.runner.serve.errors import Refused
from eagle3.runner.serve.jobs import Job
from eagle3.runner.serve.limits import MOST_LOGPROBS
from eagle3.runner.serve.markup import CONTENT, FIELDS, REASONING, Part
from eagle3.runner.serve.protocol import Delta
from eagle3.runner.serve.requests import ChatBody, length, template_kwargs
from eagle3.runner.serve.service import Service
from eagle3.runner.serve.template import Ending
from eagle3.runner.text.text import Text, TextStream


class Authors:
    """The author of each token of one generation with ``options``: draft or target. A character of several tokens
    belongs to the last of them."""

    def __init__(self, text: Text, metadata: Metadata, options: dict[str, Any]):
        asked = Options.of(**options)
        self._stream = TextStream(text, (), asked.skip_special_tokens, asked.stop_ids(metadata))
        self._ends, self._drafted = [0], [False]  # for each token: the end of its text, and True if the draft wrote it

    def told(self, parts: Sequence[Part], delta: Delta | None) -> dict[str, Any]:
        """Return the report on a round for its chunk: ``proposed`` and ``accepted``, and under each field's name the
        tokens of that field of the delta. With ``delta`` None the report is on the text that was held back until the
        end."""
        said: dict[str, Any] = {}
        if delta is not None:
            said = {"proposed": delta.proposed, "accepted": delta.accepted}
            self._push(delta)
        for part in parts:
            said.setdefault(FIELDS[part.kind], []).extend(self._tokens(part))
        return said

    def _push(self, delta: Delta) -> None:
        for number, token in enumerate(delta.token_ids):
            self._ends.append(self._ends[-1] + len(self._stream.push([token])))
            self._drafted.append(number < delta.accepted)

    def _tokens(self, part: Part) -> list[dict[str, Any]]:
        """Return a part cut into its tokens; ``drafted`` is None if it is unknown."""
        if part.start is None:
            return [{"text": part.text, "drafted": None}]
        found, place, end = [], part.start, part.start + len(part.text)
        while place < end:
            token = bisect_right(self._ends, place)
            last = token >= len(self._ends)  # the last bytes never became a character
            until = end if last else min(end, self._ends[token])
            text = part.text[place - part.start : until - part.start]
            found.append({"text": text, "drafted": self._drafted[-1 if last else token]})
            place = until
        return found


def asked(service: Service, body: ChatBody) -> Turn:
    """Return the prompt and the options of a generation. Raises ``Refused``."""
    service.check_model(body.model)
    options = body.sampling(service.metadata)
    if body.logprobs:
        count = body.top_logprobs or 0
        if not 0 <= count <= MOST_LOGPROBS:
            raise Refused(f"top_logprobs is {count}, but must be from 0 to {MOST_LOGPROBS}", "top_logprobs")
        options["logprobs"] = count
    elif body.top_logprobs:
        raise Refused("top_logprobs needs logprobs to be true", "top_logprobs")
    if body.return_speculation and not body.stream:
        raise Refused(
            "return_speculation needs stream to be true: for a whole answer, usage has the counts", "return_speculation"
        )
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise Refused(
            "continue_final_message and add_generation_prompt are both true, but a prompt ends in one way: leave one "
            "of them out",
            "continue_final_message",
        )
    opens_turn = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    turn = service.dialogue.turn(
        body.messages,
        options,
        body.tools,
        body.tool_choice,
        body.parallel_tool_calls,
        body.response_format,
        template_kwargs(body.chat_template_kwargs, body.reasoning_effort),
        Ending(opens_turn, continues),
    )
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    turn.options["max_new_tokens"] = length(service.metadata, turn.prompt, getattr(body, name), name)
    return turn


async def complete(service: Service, body: ChatBody, request: Request) -> dict[str, Any]:
    """Return the whole answer."""
    turn = await asyncio.to_thread(asked, service, body)
    choices = []
    async with service.generations(request, turn.prompt, turn.options, body.choices, turn.form) as jobs:
        for index, job in enumerate(jobs):
            answer, logprobs = Answer(turn), list[TokenLogprobs]()
            async with aclosing(answer.read(job, service.dialogue)) as rounds:
                async for _, delta in rounds:
                    logprobs += delta.logprobs if delta else []
            told = _logprobs(service, turn, logprobs) if body.logprobs else None
            choices.append(_choice(index, answer, told))
    taken = usage([(len(turn.prompt), jobs)], service.reasoning_end(turn))
    return head("chatcmpl", "chat.completion", service.model_id) | {"choices": choices, "usage": taken}


def _logprobs(service: Service, turn: Turn, given: list[TokenLogprobs]) -> dict[str, Any]:
    return {"content": token_logprobs(service.text, service.metadata, given, turn.options), "refusal": None}


def _choice(index: int, answer: Answer, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text(CONTENT), "refusal": None}
    if answer.calls:
        message["content"] = answer.text(CONTENT) or None
        message["tool_calls"] = [_tool_call(call) for call in answer.calls]
    if reasoning := answer.text(REASONING):
        message["reasoning_content"] = reasoning
    return {"index": index, "message": message, "finish_reason": answer.finish_reason, "logprobs": logprobs}


def _tool_call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


async def stream(service: Service, body: ChatBody, request: Request) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the answer in chunks. ``Refused`` is raised before the first chunk."""
    turn = await asyncio.to_thread(asked, service, body)
    made = head("chatcmpl", "chat.completion.chunk", service.model_id) | ({"usage": None} if body.with_usage else {})
    async with service.generations(request, turn.prompt, turn.options, body.choices, turn.form) as jobs:
        for index, job in enumerate(jobs):
            async with aclosing(_deltas(service, body, turn, job)) as deltas:
                async for delta, more in deltas:
                    yield made | {"choices": [{"index": index, "delta": delta, "finish_reason": None} | more]}
    if body.with_usage:
        yield made | {"choices": [], "usage": usage([(len(turn.prompt), jobs)], service.reasoning_end(turn))}


async def _deltas(
    service: Service, body: ChatBody, turn: Turn, job: Job
) -> AsyncGenerator[tuple[dict[str, Any], dict[str, Any]], None]:
    """Yield the deltas of one choice, each with the other fields of its chunk: the role, the text of each round, the
    calls, the end."""
    answer, first = Answer(turn), True
    authors = Authors(service.text, service.metadata, turn.options) if body.return_speculation else None
    async with aclosing(answer.read(job, service.dialogue)) as rounds:
        async for parts, delta in rounds:
            if first:
                yield {"role": "assistant", "content": ""}, {}
                first = False
            fields, more = dict[str, Any](), dict[str, Any]()
            for part in parts:
                name = FIELDS[part.kind]
                fields[name] = fields.get(name, "") + part.text
            if body.logprobs and delta is not None and delta.logprobs:
                more["logprobs"] = _logprobs(service, turn, delta.logprobs)
            if authors is not None and (parts or delta is not None):
                more["speculation"] = authors.told(parts, delta)
            if fields or more:
                yield fields, more
    for number, call in enumerate(answer.calls):
        yield {"tool_calls": [{"index": number} | _tool_call(call)]}, {}
    yield {}, {"finish_reason": answer.finish_reason}
