"""Anthropic's own client gets the answers of chat completions from /v1/messages."""

import json

import anthropic
import httpx
import openai
import pytest
from served import ASKED, served

from eagle3.runner.serve import messages
from eagle3.runner.serve.requests import MessagesBody, parse

PARAMETERS = {"type": "object", "properties": {"place": {"enum": ["start", "end"]}}, "required": ["place"]}
PARAMETERS["additionalProperties"] = False
TOOL = {"name": "seek", "description": "Go to a place.", "input_schema": PARAMETERS}


@pytest.fixture(scope="module")
def server(model, artifact):
    with served([model], artifact, key="secret") as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    """It sends its key as ``x-api-key``."""
    url = server.url.removesuffix("/v1")
    return anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0)


def told(server, **given) -> openai.types.chat.chat_completion.Choice:
    client = openai.OpenAI(base_url=server.url, api_key="secret", max_retries=0)
    return client.chat.completions.create(model="tiny", **({"messages": ASKED, "max_tokens": 20} | given)).choices[0]


def test_an_answer_equals_that_of_chat_completions(client, server):
    server.renew()
    chat = told(server)
    made = client.messages.create(model="tiny", messages=ASKED, max_tokens=20)
    assert [(block.type, block.text) for block in made.content] == [("text", chat.message.content)]
    assert (made.stop_reason, made.role, made.usage.output_tokens) == ("max_tokens", "assistant", 20)
    whole = client.messages.count_tokens(model="tiny", messages=ASKED).input_tokens
    assert (made.usage.input_tokens, made.usage.cache_read_input_tokens) == (1, whole - 1)


def test_a_stream_has_anthropics_events(client, server):
    with client.messages.stream(model="tiny", messages=ASKED, max_tokens=20) as stream:
        names = [event.type for event in stream]
        made = stream.get_final_message()
    assert made.content[0].text == told(server).message.content and made.stop_reason == "max_tokens"
    plain = [name for name in names if name not in ("text", "content_block_delta")]
    assert plain == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    raw = server.post(
        "/messages",
        {"messages": ASKED, "max_tokens": 2, "stream": True},
        headers={"x-api-key": "secret"},
    ).text
    assert "event: ping\ndata: " in raw and raw.index("event: message_start") == 0 and "[DONE]" not in raw


def test_a_stop_sequence_is_named_and_a_budget_beyond_the_context_ends_there(client, server):
    text = told(server).message.content
    stop = text[8:12]
    made = client.messages.create(model="tiny", messages=ASKED, max_tokens=20, stop_sequences=["\0", stop])
    assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in made.content) == text[: text.index(stop)]
    long = [{"role": "user", "content": "x = 1\n" * 180}]
    extra = {"ignore_eos": True}
    made = client.messages.create(model="tiny", messages=long, max_tokens=2000, extra_body=extra)
    assert made.stop_reason == "model_context_window_exceeded" and 0 < made.usage.output_tokens < 1024


@pytest.mark.parametrize("streams", [False, True])
def test_tools_are_called(client, streams):
    given = {"model": "tiny", "messages": ASKED, "max_tokens": 60, "tools": [TOOL]}
    given["tool_choice"] = {"type": "tool", "name": "seek"}
    if streams:
        with client.messages.stream(**given) as stream:
            made = stream.get_final_message()
    else:
        made = client.messages.create(**given)
    [call] = made.content
    assert (call.type, call.name, made.stop_reason) == ("tool_use", "seek", "tool_use")
    assert call.input["place"] in ("start", "end")
    cut = client.messages.create(**(given | {"max_tokens": 2}))
    assert cut.content[0].input == {} and cut.stop_reason == "max_tokens"
    given["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    assert [block.type for block in client.messages.create(**given).content] == ["tool_use"]


def test_a_history_with_tools_and_thoughts_is_that_of_chat_completions(server):
    """``cache_control`` and the signatures of thoughts change nothing."""
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "text", "text": "I go.", "cache_control": {"type": "ephemeral"}},
        {"type": "tool_use", "id": "t1", "name": "seek", "input": {"place": "end"}},
    ]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Done."}]}
    history = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [result, {"type": "text", "text": "Thanks."}]},
    ]
    given = {"system": [{"type": "text", "text": "Be brief."}], "messages": history, "max_tokens": 5}
    turn = messages._messages(parse(MessagesBody, given, {}))
    assert [each.role for each in turn] == ["system", "user", "assistant", "tool", "user"]
    assert turn[2].reasoning_content == "Hm." and turn[3].tool_call_id == "t1"
    [call] = turn[2].tool_calls
    assert (call.id, call.function.name, json.loads(call.function.arguments)) == ("t1", "seek", {"place": "end"})


WRONG = [
    {"max_tokens": 0},
    {"max_tokens": None},
    {"messages": [{"role": "user", "content": [5]}]},
    {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": {"a": 1}}]}]},
    {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": []}]}]},
    {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    {"tools": [{"name": "f", "input_schema": []}], "tool_choice": {"type": ["tool"]}},
    {"tools": [TOOL], "tool_choice": {"type": "tool", "name": {}}},
    {"stop_sequences": ["a"] * 5},
    {"output_config": {"format": {"type": "json_schema", "schema": 5}}},
    {"thinkin": {}},
]


@pytest.mark.parametrize("given", WRONG)
def test_errors_have_anthropics_form(client, given):
    body = {"model": "tiny", "messages": ASKED, "max_tokens": 5} | given
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.post("/v1/messages", body=body, cast_to=httpx.Response)
    assert caught.value.body["type"] == "error" and caught.value.body["error"]["type"] == "invalid_request_error"


def test_a_wrong_key_and_a_wrong_model_are_told_in_anthropics_form(client):
    with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
        client.with_options(api_key="wrong").messages.create(model="tiny", messages=ASKED, max_tokens=5)
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        client.messages.create(model="other", messages=ASKED, max_tokens=5)
