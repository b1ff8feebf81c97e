"""Handles ``POST /v1/completions``, which continues a text without a chat template."""

import asyncio
from collections.abc import AsyncGenerator, Collection
from contextlib import AsyncExitStack, aclosing
from typing import Any

from starlette.requests import Request

from eagle3.runner.loop.results import TokenLogprobs
from eagle3.runner.serve.answer import head, token_text, usage
from eagle3.runner.serve.errors import Refused
from eagle3.runner.serve.limits import MOST_LOGPROBS
from eagle3.runner.serve.protocol import Echo
from eagle3.runner.serve.requests import CompletionBody, length
from eagle3.runner.serve.service import Service
from eagle3.runner.text.text import TextStream

Logprobs = dict[str, list[Any]]
"""OpenAI's lists of ``tokens``, ``token_logprobs``, ``top_logprobs`` and ``text_offset``."""


def prompts(service: Service, body: CompletionBody) -> list[list[int]]:
    """Return token ids of each prompt. Raises ``Refused``."""
    found = []
    for each in body.prompts:
        if isinstance(each, str):
            service.dialogue.check_length(each)
        try:
            found.append(service.encode(each))
        except ValueError as error:
            raise Refused(str(error), "prompt") from None
    return found


def options(service: Service, body: CompletionBody) -> dict[str, Any]:
    """Return the options of a generation without its length. Raises ``Refused``."""
    service.check_model(body.model)
    found = body.sampling(service.metadata)
    if body.best_of not in (None, body.choices):
        raise Refused(f"best_of is {body.best_of} and n {body.choices}: they must be the same", "best_of")
    if body.logprobs is not None:
        if not 0 <= body.logprobs <= MOST_LOGPROBS:
            raise Refused(f"logprobs is {body.logprobs}, but must be from 0 to {MOST_LOGPROBS}", "logprobs")
        found["logprobs"] = body.logprobs
    return found


def _length(service: Service, prompt: list[int], body: CompletionBody) -> int:
    """Return the most tokens to generate; OpenAI's default is 16. It is 1 for an echo without generation."""
    if body.echo and body.max_tokens == 0:
        return length(service.metadata, prompt, 1, "max_tokens")
    room = service.metadata.max_seq_len - len(prompt)
    wanted = min(16, max(room, 1)) if body.max_tokens is None else body.max_tokens
    return length(service.metadata, prompt, wanted, "max_tokens")


async def answers(service: Service, body: CompletionBody, request: Request) -> AsyncGenerator[dict[str, Any], None]:
    """Yield one chunk per round; the last one has the usage and no choices. ``Refused`` is raised before the first."""
    common = options(service, body)
    asked = await asyncio.to_thread(prompts, service, body)
    sized = [(prompt, common | {"max_new_tokens": _length(service, prompt, body)}) for prompt in asked]
    made = head("cmpl", "text_completion", service.model_id) | ({"usage": None} if body.with_usage else {})
    echo = Echo(body.logprobs, body.max_tokens == 0) if body.echo else Echo()
    ends = () if body.echo else service.metadata.eos_ids
    async with AsyncExitStack() as stack:
        groups = [
            await stack.enter_async_context(service.generations(request, prompt, each, body.choices, echo=echo))
            for prompt, each in sized
        ]
        index = 0
        for (prompt, _), jobs in zip(sized, groups, strict=True):
            for job in jobs:
                echoed = service.text.decode(prompt) if body.echo else ""
                offset, waits = len(echoed), echo.logprobs is not None
                async with aclosing(job.deltas()) as deltas:
                    async for delta in deltas:
                        logprobs = _echoed(service, prompt, job.prompt_logprobs) if waits else None
                        if body.logprobs is not None and delta.logprobs:
                            said, offset = _logprobs(service, delta.logprobs, offset, ends)
                            logprobs = _joined([logprobs, said])
                        yield made | {"choices": [_choice(index, echoed + delta.text, None, logprobs)]}
                        echoed, waits = "", False
                logprobs = _echoed(service, prompt, job.prompt_logprobs) if waits else None  # nothing was generated
                reason = "length" if job.outcome is not None and job.outcome.finish_reason == "length" else "stop"
                yield made | {"choices": [_choice(index, echoed, reason, logprobs)]}
                index += 1
    taken = usage([(len(prompt), jobs) for (prompt, _), jobs in zip(sized, groups, strict=True)])
    yield made | {"choices": [], "usage": taken}


def _choice(index: int, text: str, finish_reason: str | None, logprobs: Logprobs | None) -> dict[str, Any]:
    return {"index": index, "text": text, "finish_reason": finish_reason, "logprobs": logprobs}


def _logprobs(service: Service, given: list[TokenLogprobs], offset: int, ends: Collection[int]) -> tuple[Logprobs, int]:
    """Return tokens in OpenAI's format, without ``ends``, and the offset after them."""
    text, tokens, logprobs, tops, offsets = service.text, [], [], [], []
    for each in given:
        if each.token_id in ends:
            continue
        tokens.append(token_text(text, each.token_id))
        logprobs.append(max(each.logprob, -9999.0))
        best = reversed(each.top)  # of tokens with the same text (parts of characters), keeps the most likely
        tops.append({token_text(text, token): max(logprob, -9999.0) for token, logprob in best})
        offsets.append(offset)
        offset += len(tokens[-1])
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}, offset


def _echoed(service: Service, prompt: list[int], given: list[TokenLogprobs]) -> Logprobs:
    """Return a prompt in OpenAI's format. Its first token has null, since no token precedes it. Offsets are into the
    echoed text, which has no special tokens."""
    found, _ = _logprobs(service, given, 0, ())
    decoder, offsets, offset = TextStream(service.text), list[int](), 0
    for token in prompt:
        offsets.append(offset)
        offset += len(decoder.push([token]))
    found["tokens"].insert(0, token_text(service.text, prompt[0]))
    for name in ("token_logprobs", "top_logprobs"):
        found[name].insert(0, None)
    return found | {"text_offset": offsets}


async def complete(service: Service, body: CompletionBody, request: Request) -> dict[str, Any]:
    """Return the whole answer."""
    parts: dict[int, list[dict[str, Any]]] = {}
    async with aclosing(answers(service, body, request)) as chunks:
        async for chunk in chunks:
            for part in chunk["choices"]:
                parts.setdefault(part["index"], []).append(part)
    return chunk | {"choices": [_whole(each) for each in parts.values()]}


def _whole(parts: list[dict[str, Any]]) -> dict[str, Any]:
    logprobs = _joined([part["logprobs"] for part in parts])
    return parts[-1] | {"text": "".join(part["text"] for part in parts), "logprobs": logprobs}


def _joined(parts: list[Logprobs | None]) -> Logprobs | None:
    given = [part for part in parts if part is not None]
    return {name: [entry for part in given for entry in part[name]] for name in given[0]} if given else None


async def stream(service: Service, body: CompletionBody, request: Request) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the answer in chunks."""
    async with aclosing(answers(service, body, request)) as chunks:
        async for chunk in chunks:
            if chunk["choices"] or body.with_usage:
                yield chunk
