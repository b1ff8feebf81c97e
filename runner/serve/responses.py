"""Handles ``POST /v1/responses``, which gives the same answers in OpenAI's newer API. Nothing is stored."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from openai.types.responses import Response
from pydantic import ValidationError
from starlette.requests import Request

from eagle3.runner.serve.answer import Answer, Call, new_id, usage
from eagle3.runner.serve.dialogue import Turn
from eagle3.runner.serve.errors import Refused
from eagle3.runner.serve.jobs import Job
from eagle3.runner.serve.markup import CONTENT, REASONING
from eagle3.runner.serve.requests import ResponseBody, as_messages, invalid, length, template_kwargs
from eagle3.runner.serve.service import Service
from eagle3.runner.serve.template import SYSTEM, THOUGHT, Message
from eagle3.runner.text.checks import shown

INCLUDED = (
    "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)  # fmt: skip
"""The entries of ``include`` that add nothing here: reasoning items have their text, and there are no such calls."""


def asked(service: Service, body: ResponseBody) -> Turn:
    """Return the prompt and the options of a generation. Raises ``Refused``."""
    service.check_model(body.model)
    if body.top_logprobs:
        raise Refused("top_logprobs is not supported here: chat completions have it", "top_logprobs")
    for asked_for in body.include or ():
        if asked_for not in INCLUDED:
            raise Refused(f"include has {shown(asked_for)}, but only {', '.join(INCLUDED)} are taken here", "include")
    if body.background:
        raise Refused("background is not supported: this server keeps no responses, leave it out", "background")
    if body.choices != 1:
        raise Refused("n is not supported here: a response is one answer", "n")
    turn = service.dialogue.turn(
        _messages(body),
        body.sampling(service.metadata),
        [_tool(tool) for tool in body.tools or ()] or None,
        body.tool_choice,
        body.parallel_tool_calls,
        body.text.format if body.text else None,
        template_kwargs(body.chat_template_kwargs, body.reasoning.effort if body.reasoning else None),
    )
    turn.options["max_new_tokens"] = length(service.metadata, turn.prompt, body.max_output_tokens, "max_output_tokens")
    return turn


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in the form of chat completions and chat templates, which nest the function."""
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": tool.get("type"), "function": function}


def _messages(body: ResponseBody) -> list[Message]:
    messages: list[dict[str, Any]] = []
    items: list[dict[str, Any]] = (
        [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    )
    if body.instructions:  # a system message of the input continues them
        more = bool(items) and items[0].get("type", "message") == "message" and items[0].get("role") in SYSTEM
        messages.append({"role": SYSTEM[more], "content": body.instructions})
    thought = ""
    for number, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if messages and messages[-1]["role"] == "assistant" and not thought:
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            told = {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
            messages.append(told)
        elif kind == "reasoning":  # of the next message of the assistant
            parts = item.get("content") or []
            if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
                raise Refused(f"input.{number}.content must be a list of parts", "input")
            thought += "".join(str(part.get("text", "")) for part in parts)
        else:
            raise Refused(
                f"input.{number}.type is {shown(kind)}, but must be message, function_call, function_call_output or "
                "reasoning"
            )
        if thought and kind != "reasoning":
            messages[-1] |= {THOUGHT[0]: thought} if messages[-1]["role"] == "assistant" else {}
            thought = ""
    return as_messages(messages, "input")


async def complete(service: Service, body: ResponseBody, request: Request) -> Response:
    """Return the whole answer."""
    async with aclosing(events(service, body, request)) as made:
        async for event in made:
            last = event
    return last["response"]


async def events(service: Service, body: ResponseBody, request: Request) -> AsyncGenerator[dict[str, Any], None]:
    """Yield OpenAI's events, the last of which has the whole response. ``Refused`` is raised before the first."""
    turn = await asyncio.to_thread(asked, service, body)
    form = "text" if turn.form == "response_format" else turn.form
    log = Events(service, body, turn)
    try:
        begun = log.response("in_progress")
    except ValidationError as error:  # openai's types check what the client gave
        raise invalid(error) from None
    async with service.generations(request, turn.prompt, turn.options, 1, form) as jobs:
        yield log.event("response.created", response=begun)
        yield log.event("response.in_progress", response=begun)
        async with aclosing(log.of(jobs[0])) as made:
            async for event in made:
                yield event


class Events:
    """The numbered events of one response, and its output items so far."""

    def __init__(self, service: Service, body: ResponseBody, turn: Turn):
        self._service, self._body, self._turn = service, body, turn
        self._id, self._created, self._number = new_id("resp"), time.time(), -1
        self._items: list[dict[str, Any]] = []
        self._open: str | None = None  # the kind of the output item that is open for more text
        self._text, self._item_id = "", ""

    def event(self, name: str, /, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": name, "sequence_number": self._number} | fields

    def response(self, status: str, **more: Any) -> Response:
        body = self._body
        fields: dict[str, Any] = dict(
            id=self._id,
            object="response",
            created_at=self._created,
            model=self._service.model_id,
            status=status,
            output=list(self._items),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            instructions=body.instructions,
            temperature=self._turn.options.get("temperature", 0.0),
            top_p=body.top_p if body.top_p is not None else 1.0,
            max_output_tokens=body.max_output_tokens,
            error=None,
            metadata=body.metadata or {},
            background=False,
            store=False,
            **({"incomplete_details": None} | more),
        )
        return Response(**fields)

    async def of(self, job: Job) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of each round, and the end."""
        answer = Answer(self._turn)
        async with aclosing(answer.read(job, self._service.dialogue)) as rounds:
            async for parts, _ in rounds:
                for part in parts:
                    for event in self._add(part.kind, part.text):
                        yield event
        whole = answer.finish_reason != "length"
        if not self._items and not self._open and not answer.calls:
            for event in self._add(CONTENT, ""):
                yield event
        for event in self._close(whole):
            yield event
        for call in answer.calls:
            for event in self._called(call):
                yield event
        yield self._ended(job, whole)

    def _ended(self, job: Job, whole: bool) -> dict[str, Any]:
        taken = usage([(len(self._turn.prompt), [job])], self._service.reasoning_end(self._turn))
        spent = {
            "input_tokens": taken["prompt_tokens"],
            "input_tokens_details": taken["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": taken["completion_tokens"],
            "output_tokens_details": taken["completion_tokens_details"],
            "total_tokens": taken["total_tokens"],
        }
        status = "completed" if whole else "incomplete"
        why = {} if whole else {"incomplete_details": {"reason": "max_output_tokens"}}
        return self.event(f"response.{status}", response=self.response(status, usage=spent, **why))

    def _add(self, kind: str, text: str) -> list[dict[str, Any]]:
        made = []
        if self._open != kind:
            made = self._close(whole=True)
            self._open, self._text, self._item_id = kind, "", new_id("rs" if kind == REASONING else "msg")
            made.append(self._of_item("added", self._item("in_progress", [])))
            if kind == CONTENT:
                made.append(self.event("response.content_part.added", **self._place(), part=self._part()))
        self._text += text
        if text:
            made.append(self._of_text("delta", delta=text))
        return made

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": len(self._items), "content_index": 0}

    def _of_text(self, name: str, **more: str) -> dict[str, Any]:
        if self._open == REASONING:
            return self.event(f"response.reasoning_text.{name}", **self._place(), **more)
        return self.event(f"response.output_text.{name}", **self._place(), logprobs=[], **more)

    def _of_item(self, name: str, item: dict[str, Any]) -> dict[str, Any]:
        return self.event(f"response.output_item.{name}", item=item, output_index=len(self._items))

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        item = {"id": self._item_id, "content": content, "status": status}
        if self._open == REASONING:
            return item | {"type": "reasoning", "summary": []}
        return item | {"type": "message", "role": "assistant"}

    def _part(self) -> dict[str, Any]:
        if self._open == REASONING:
            return {"type": "reasoning_text", "text": self._text}
        return {"type": "output_text", "text": self._text, "annotations": []}

    def _close(self, whole: bool) -> list[dict[str, Any]]:
        """End the open output item."""
        if self._open is None:
            return []
        made = [self._of_text("done", text=self._text)]
        if self._open == CONTENT:
            made.append(self.event("response.content_part.done", **self._place(), part=self._part()))
        return made + self._done(self._item("completed" if whole else "incomplete", [self._part()]))

    def _done(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        made = [self._of_item("done", item)]
        self._items.append(item)
        self._open = None
        return made

    def _called(self, call: Call) -> list[dict[str, Any]]:
        item = {"id": new_id("fc"), "type": "function_call", "call_id": call.id, "name": call.name}
        place = {"item_id": item["id"], "output_index": len(self._items)}
        name = "response.function_call_arguments"
        return [
            self._of_item("added", item | {"arguments": "", "status": "in_progress"}),
            self.event(f"{name}.delta", delta=call.arguments, **place),
            self.event(f"{name}.done", arguments=call.arguments, name=call.name, **place),
            *self._done(item | {"arguments": call.arguments, "status": "completed"}),
        ]
