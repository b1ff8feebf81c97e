"""Client libraries of OpenAI's API work with a server; those that are not installed are skipped.

Clients: openai, litellm, pydantic-ai-slim[openai], openai-agents. Tool calls are forced, since gemma4-tiny calls no
tools by itself.
"""

import asyncio
import json
import os
from collections.abc import Callable, Iterable
from functools import cache
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

ASKED = [{"role": "user", "content": "Open a file and read its lines."}]
KEY, LIMIT = "none", 200


class Person(BaseModel):
    name: Annotated[str, Field(max_length=12)]
    age: Annotated[int, Field(ge=0, le=150)]


TOOL = {"type": "function", "function": {"name": "person", "parameters": Person.model_json_schema()}}
FORCED = {"type": "function", "function": {"name": "person"}}


def joined(chunks: Iterable[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def with_openai(url: str, model: str) -> dict[str, Callable[[], Any]]:
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key=KEY, max_retries=0)
    asks = {"model": model, "messages": ASKED, "max_tokens": LIMIT}
    create = client.chat.completions.create
    plain = create(**asks).choices[0].message.content
    tools = {"tools": [TOOL], "tool_choice": FORCED}
    return {
        "plain": lambda: plain,
        "streaming": lambda: same(joined(create(**asks, stream=True)), plain),
        "tools": lambda: person(create(**asks, **tools).choices[0].message.tool_calls[0].function.arguments),
        "structured": lambda: client.chat.completions.parse(**asks, response_format=Person).choices[0].message.parsed,
        "responses": lambda: client.responses.create(model=model, input=ASKED, max_output_tokens=LIMIT).output_text,
    }


def with_litellm(url: str, model: str) -> dict[str, Callable[[], Any]]:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it downloads a price list

    import litellm

    asks = {"model": f"openai/{model}", "api_base": url, "api_key": KEY, "messages": ASKED, "max_tokens": LIMIT}
    plain = litellm.completion(**asks).choices[0].message.content
    tools = {"tools": [TOOL], "tool_choice": FORCED}

    def structured() -> Person:
        return person(litellm.completion(**asks, response_format=Person).choices[0].message.content)

    def responses() -> str:
        given = {"model": f"openai/{model}", "api_base": url, "api_key": KEY, "max_output_tokens": LIMIT}
        return litellm.responses(input=ASKED[0]["content"], **given).output[0].content[0].text

    return {
        "plain": lambda: plain,
        "streaming": lambda: same(joined(litellm.completion(**asks, stream=True)), plain),
        "tools": lambda: person(
            litellm.completion(**asks, **tools).choices[0].message.tool_calls[0].function.arguments
        ),
        "structured": structured,
        "responses": responses,
    }


def with_pydantic_ai(url: str, model: str) -> dict[str, Callable[[], Any]]:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=url, api_key=KEY)
    asks: Any = {"model_settings": {"max_tokens": LIMIT}}
    chat, words = OpenAIChatModel(model, provider=provider), ASKED[0]["content"]
    plain = Agent(chat, **asks).run_sync(words).output

    async def streamed() -> str:
        async with Agent(chat, **asks).run_stream(words) as answer:
            return await answer.get_output()

    responses = OpenAIResponsesModel(model, provider=provider)
    return {
        "plain": lambda: plain,
        "streaming": lambda: same(asyncio.run(streamed()), plain),
        "tools": lambda: Agent(chat, output_type=ToolOutput(Person), **asks).run_sync(words).output,
        "structured": lambda: Agent(chat, output_type=NativeOutput(Person), **asks).run_sync(words).output,
        "responses": lambda: Agent(responses, **asks).run_sync(words).output,
    }


def with_openai_agents(url: str, model: str) -> dict[str, Callable[[], Any]]:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    called: list[Person] = []

    @function_tool
    def keep(person: Person) -> str:
        called.append(person)
        return "kept"

    def run(kind: type, settings: dict[str, Any] | None = None, **more: Any) -> object:
        served = kind(model=model, openai_client=AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0))
        limits = ModelSettings(max_tokens=LIMIT, **(settings or {}))
        agent = Agent(name="a", instructions="Be brief.", model=served, model_settings=limits, **more)
        return Runner.run_sync(agent, ASKED[0]["content"]).final_output

    async def streamed() -> str:
        served = OpenAIChatCompletionsModel(model=model, openai_client=AsyncOpenAI(base_url=url, api_key=KEY))
        agent = Agent(name="a", instructions="Be brief.", model=served, model_settings=ModelSettings(max_tokens=LIMIT))
        going = Runner.run_streamed(agent, ASKED[0]["content"])
        async for _ in going.stream_events():
            pass
        return going.final_output

    def tools(kind: type) -> Person:
        run(kind, {"tool_choice": "required", "parallel_tool_calls": False}, tools=[keep],
            tool_use_behavior="stop_on_first_tool")  # fmt: skip
        return called.pop()

    return {
        "plain": lambda: run(OpenAIChatCompletionsModel),
        "streaming": lambda: same(asyncio.run(streamed()), run(OpenAIChatCompletionsModel)),
        "tools": lambda: tools(OpenAIChatCompletionsModel),
        "structured": lambda: run(OpenAIChatCompletionsModel, output_type=Person),
        "responses": lambda: (run(OpenAIResponsesModel), tools(OpenAIResponsesModel))[0],
    }


CLIENTS = {
    "openai": with_openai,
    "litellm": with_litellm,
    "pydantic_ai": with_pydantic_ai,
    "agents": with_openai_agents,
}
WAYS = ("plain", "streaming", "tools", "structured", "responses")


def same(one: str, other: str) -> str:
    if one != other:
        raise AssertionError(f"streamed {one!r}, at once {other!r}")
    return one


def person(text: str) -> Person:
    return Person.model_validate(json.loads(text))


@pytest.fixture(scope="module")
def calls(server):
    """The calls of a client by its package, made once."""
    return cache(lambda package: CLIENTS[package](server.url, "tiny"))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("package", CLIENTS)
def test_a_client_gets_an_answer_of_each_kind(package, way, calls):
    pytest.importorskip(package)
    assert calls(package)[way]()
