"""Handles ``POST /v1/messages``, Anthropic's form of a dialogue, which gives the answers of chat completions."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, suppress
from typing import Any

from starlette.requests import Request

from eagle3.runner.serve.answer import Answer, new_id
from eagle3.runner.serve.dialogue import REQUIRED, Turn
from eagle3.runner.serve.markup import REASONING
from eagle3.runner.serve.protocol import Outcome
from eagle3.runner.serve.requests import MessagesBody, as_messages, length, template_kwargs
from eagle3.runner.serve.service import Service
from eagle3.runner.serve.template import THOUGHT, Message


def asked(service: Service, body: MessagesBody) -> Turn:
    """Return the prompt and the options of a generation. Raises ``Refused``."""
    service.check_model(body.model)
    options, config = body.sampling(service.metadata), body.output_config
    if body.stop_sequences:
        options["stop"] = body.stop_sequences
    thinks = {"enable_thinking": body.thinking.get("type") != "disabled"} if body.thinking else {}
    tools = []
    for each in body.tools or ():
        kind = "function" if each.get("type") in (None, "custom") else each["type"]
        function = {"name": each.get("name"), "parameters": each.get("input_schema")}
        tools.append({"type": kind, "function": function | {"description": each.get("description") or ""}})
    choice: Any = body.tool_choice
    parallel = True
    if isinstance(choice, dict):
        parallel = not choice.get("disable_parallel_tool_use")
        named = {"type": "function", "function": {"name": choice.get("name")}}
        choice = {"any": REQUIRED, "tool": named}.get(str(choice.get("type")), choice.get("type"))
    turn = service.dialogue.turn(
        _messages(body),
        options,
        tools or None,
        choice,
        parallel,
        config.format if config else None,
        template_kwargs(thinks | (body.chat_template_kwargs or {}), config.effort if config else None),
    )
    turn.options["max_new_tokens"] = min(body.max_tokens, length(service.metadata, turn.prompt, None, "max_tokens"))
    return turn


def _messages(body: MessagesBody) -> list[Message]:
    """Return the messages in the form of chat templates, with a message of its own for each result of a tool."""
    made: list[dict[str, Any]] = [{"role": "system", "content": body.system}] if body.system else []
    for said in body.messages:
        results, calls, thought, rest = list[dict[str, Any]](), list[dict[str, Any]](), "", list[dict[str, Any]]()
        for block in [{"type": "text", "text": said.content}] if isinstance(said.content, str) else said.content:
            if block.get("type") == "tool_result":
                told = block.get("content") or ""
                results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": told})
            elif block.get("type") == "tool_use":
                function = {"name": block.get("name"), "arguments": json.dumps(block.get("input"))}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            elif block.get("type") in ("thinking", "redacted_thinking"):
                thought += str(block.get("thinking", ""))
            else:
                rest.append(block)
        made += results
        if rest or calls or not results:
            content = said.content if isinstance(said.content, str) else rest or None
            made.append({"role": said.role, "content": content, "tool_calls": calls or None, THOUGHT[0]: thought})
    return as_messages(made, "messages")


async def complete(service: Service, body: MessagesBody, request: Request) -> dict[str, Any]:
    """Return the whole answer."""
    async with aclosing(events(service, body, request)) as made:
        first = await anext(made)
        async for _ in made:
            pass
    return first["message"]


async def events(service: Service, body: MessagesBody, request: Request) -> AsyncGenerator[dict[str, Any], None]:
    """Yield Anthropic's events. The message of the first is the whole answer at the end. ``Refused`` is raised before
    the first."""
    turn = await asyncio.to_thread(asked, service, body)
    answer, content = Answer(turn), list[dict[str, Any]]()
    spent = {"input_tokens": len(turn.prompt), "output_tokens": 0}
    message: dict[str, Any] = {"id": new_id("msg"), "type": "message", "role": "assistant", "model": service.model_id}
    message |= {"content": content, "stop_reason": None, "stop_sequence": None, "usage": spent}
    async with service.generations(request, turn.prompt, turn.options, 1, turn.form) as [job]:
        yield {"type": "message_start", "message": message}
        yield {"type": "ping"}
        async with aclosing(answer.read(job, service.dialogue)) as rounds:
            async for parts, _ in rounds:
                for part in parts:
                    kind, more = ("thinking", {"signature": ""}) if part.kind == REASONING else ("text", {})
                    if not content or content[-1]["type"] != kind:
                        for event in _begun(content, {"type": kind, kind: "", **more}):
                            yield event
                    content[-1][kind] += part.text
                    yield _of_block(content, "delta", delta={"type": f"{kind}_delta", kind: part.text})
    for call in answer.calls:
        for event in _begun(content, {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}):
            yield event
        yield _of_block(content, "delta", delta={"type": "input_json_delta", "partial_json": call.arguments})
        with suppress(ValueError):  # the budget cut the arguments
            content[-1]["input"] = json.loads(call.arguments)
    if content:
        yield _of_block(content, "stop")
    message |= _end(service, body, answer)
    delta = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
    yield {"type": "message_delta", "delta": delta, "usage": message["usage"]}
    yield {"type": "message_stop"}


def _begun(content: list[dict[str, Any]], block: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if content:
        yield _of_block(content, "stop")
    content.append(block)
    yield _of_block(content, "start", content_block=block)


def _of_block(content: list[dict[str, Any]], name: str, **more: object) -> dict[str, Any]:
    return {"type": f"content_block_{name}", "index": len(content) - 1, **more}


def _end(service: Service, body: MessagesBody, answer: Answer) -> dict[str, Any]:
    """Return the reason of the end, the stop sequence that was found, and the counts of tokens."""
    outcome, reason, found = answer.outcome or Outcome(), answer.finish_reason, None
    ids, cached = outcome.token_ids, outcome.stats.reused_prompt_tokens
    ends = {*service.metadata.eos_ids, *answer.turn.options.get("stop_token_ids", ())}
    if reason == "stop" and body.stop_sequences and ids and ids[-1] not in ends:
        found = max(body.stop_sequences, key=service.text.decode(ids, False).rfind)
    cut = "max_tokens" if len(ids) >= body.max_tokens else "model_context_window_exceeded"
    ended = {"length": cut, "tool_calls": "tool_use", "stop": "stop_sequence" if found else "end_turn"}
    counts = {"input_tokens": len(answer.turn.prompt) - cached, "output_tokens": len(ids)}
    counts |= {"cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}
    return {"stop_reason": ended[reason], "stop_sequence": found, "usage": counts}
