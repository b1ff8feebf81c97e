"""OpenAI's own client gets the library's results from a real eagle3-serve."""

import asyncio
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import httpx
import openai
import pytest
from executorch.examples.llm_server.python.protocol import ChatMessage
from pydantic import BaseModel, create_model
from served import ASKED, JSON, served

from eagle3.runner.model import Model
from eagle3.runner.serve.answer import Answer
from eagle3.runner.serve.markup import CONTENT
from eagle3.runner.serve.requests import with_own_seeds

TOOL = {
    "type": "function",
    "function": {
        "name": "seek",
        "description": "Go to a place.",
        "parameters": {
            "type": "object",
            "properties": {"offset": {"type": "integer", "minimum": 0}, "whence": {"enum": ["start", "end"]}},
            "required": ["offset", "whence"],
            "additionalProperties": False,
        },
    },
}


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)


@pytest.fixture
def alone(session, artifact):
    """A function that generates by the library with empty caches. Call it before a request to the server."""

    def generate(prompt, **options):
        return Model(session.metadata, lambda: session, artifact).generate(prompt, **options)

    return generate


@pytest.fixture(autouse=True)
def forgotten(model):
    """Clear the record of the server model's caches, which ``alone`` overwrites."""
    yield
    model.forget()


def test_executorchs_own_conformance_suite_passes(session, artifact):
    """Tool calls are forced if a request has tools, since gemma4-tiny calls none by itself."""
    spec = Path(find_spec("executorch").submodule_search_locations[0])
    suite = spec / "examples" / "llm_server" / "conformance" / "test_openai_contract.py"
    model = Model(session.metadata, lambda: session, artifact)
    with served([model], artifact, tool_choice="required", parallel_tool_calls=False) as running:
        environment = os.environ | {"OPENAI_BASE_URL": running.url, "OPENAI_MODEL": "tiny"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", str(suite)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=artifact)
    assert done.returncode == 0 and done.stdout.startswith("." * 7), done.stdout


def test_a_served_answer_equals_the_librarys(client, alone):
    said = alone(ASKED, max_new_tokens=30)
    answer = client.chat.completions.create(model="tiny", messages=ASKED, max_completion_tokens=30)
    [choice], usage = answer.choices, answer.usage
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (said.text, "assistant", "length")
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(said.prompt_token_ids), 30)
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens == said.stats.num_accepted_tokens > 0
    rejected = said.stats.num_draft_tokens - said.stats.num_accepted_tokens
    assert details.rejected_prediction_tokens == rejected > 0
    again = client.chat.completions.create(model="tiny", messages=ASKED, max_completion_tokens=30)
    assert again.choices[0].message.content == said.text
    assert again.usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_the_chunks_of_a_stream_join_to_the_answer(client, alone):
    said = alone(ASKED, max_new_tokens=40)
    options = {"model": "tiny", "messages": ASKED, "max_tokens": 40, "stream": True}
    chunks = list(client.chat.completions.create(**options, stream_options={"include_usage": True}))
    *told, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in told) == said.text
    assert told[0].choices[0].delta.role == "assistant" and told[-1].choices[0].finish_reason == said.finish_reason
    assert last.choices == [] and last.usage.completion_tokens == len(said.token_ids)
    assert len({chunk.id for chunk in chunks}) == 1 and len(told) > 8
    assert all(chunk.usage is None for chunk in client.chat.completions.create(**options))


def test_each_choice_of_a_request_has_a_seed_of_its_own(client, alone):
    seeds = [each["seed"] for each in with_own_seeds({"seed": 7}, 3)]
    said = [alone(ASKED, max_new_tokens=20, temperature=0.9, seed=seed).text for seed in seeds]
    options = {"model": "tiny", "messages": ASKED, "max_tokens": 20, "temperature": 0.9, "seed": 7, "n": 3}
    answer = client.chat.completions.create(**options)
    assert [choice.message.content for choice in answer.choices] == said and len(set(said)) > 1
    assert answer.usage.completion_tokens == sum(
        len(alone(ASKED, max_new_tokens=20, temperature=0.9, seed=seed).token_ids) for seed in seeds
    )
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**options, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == said


def test_choices_of_one_prompt_report_the_same_cached_tokens(client, model):
    model.forget()
    options = {"model": "tiny", "messages": ASKED, "max_tokens": 4, "n": 3}
    usage = client.chat.completions.create(**options).usage
    assert usage.prompt_tokens_details.cached_tokens == 0
    again = client.chat.completions.create(**options).usage
    assert again.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_a_request_without_a_temperature_is_sampled(model, artifact):
    with served([model], artifact, temperature=None) as running:
        given = {"messages": ASKED, "max_tokens": 20}
        texts = {running.post("/chat/completions", given).json()["choices"][0]["message"]["content"] for _ in range(4)}
    assert len(texts) > 1


def test_request_options_have_the_meaning_of_the_library(client, alone):
    biased = {"logit_bias": {17: 5.0}, "presence_penalty": 0.6, "frequency_penalty": 0.3}
    said = alone(ASKED, max_new_tokens=25, **biased)
    assert said.text != alone(ASKED, max_new_tokens=25).text
    given = {"model": "tiny", "messages": ASKED, "max_tokens": 25, **biased}
    assert client.chat.completions.create(**given).choices[0].message.content == said.text
    sampled = {"top_p": 0.8, "temperature": 0.7, "seed": 3}
    more = {"top_k": 9, "min_p": 0.02, "repetition_penalty": 1.1}
    given = {"model": "tiny", "messages": ASKED, "max_tokens": 25, **sampled, "extra_body": more}
    expected = alone(ASKED, max_new_tokens=25, **sampled, **more).text
    assert client.chat.completions.create(**given).choices[0].message.content == expected


def test_a_stop_string_is_not_part_of_the_served_text(client, alone):
    whole = alone(ASKED, max_new_tokens=30).text
    choice = client.chat.completions.create(model="tiny", messages=ASKED, stop=["read"]).choices[0]
    assert (choice.message.content, choice.finish_reason) == (whole[: whole.index("read")], "stop")


def test_characters_of_several_tokens_are_streamed_complete(client):
    text = "na\u00efve \u65e5\u672c \U0001f600!"
    given = {"model": "tiny", "messages": ASKED, "extra_body": {"structured_outputs": {"choice": [text]}}}
    assert client.chat.completions.create(**given).choices[0].message.content == text
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**given, stream=True)]
    assert "".join(pieces) == text and len(pieces) > 4 and not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("stop", [None, "<tool", ".", "whence"])
def test_a_stop_string_ends_an_answer_before_its_tool_call(server, stop):
    """A grammar makes the model write a tool call."""
    dialogue, text = server.service.dialogue, 'Well.<tool_call>{"name": "seek", "arguments": {"whence": 1}}</tool_call>'
    turn = dialogue.turn([ChatMessage(**ASKED[0])], {"stop": [stop] if stop else []}, [TOOL])
    turn.options["structured_outputs"] = {"choice": [text]}

    async def answer() -> Answer:
        [job] = await server.jobs.submit(turn.prompt, [turn.options])
        found = Answer(turn)
        async for _ in found.read(job, dialogue):
            pass
        return found

    found = asyncio.run(answer())
    expected = {None: "Well.", "<tool": "Well.", ".": "Well", "whence": text[: text.index("whence")]}[stop]
    assert (found.text(CONTENT), len(found.calls)) == (expected, stop is None)
    assert found.finish_reason == ("tool_calls" if stop is None else "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_served_log_probabilities_equal_the_librarys(client, alone, stream):
    said = alone(ASKED, max_new_tokens=12, logprobs=2)
    options = {"model": "tiny", "messages": ASKED, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(**options, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    told = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    assert "".join(token.token for token in told) == said.text
    assert [token.logprob for token in told] == pytest.approx([each.logprob for each in said.logprobs], abs=1e-4)
    assert all(len(token.top_logprobs) == 2 and bytes(token.bytes).decode() == token.token for token in told)


def test_the_token_that_ends_a_text_has_no_log_probability(client, alone):
    said = alone(ASKED, max_new_tokens=90)
    assert said.finish_reason == "stop"
    choice = client.chat.completions.create(model="tiny", messages=ASKED, max_tokens=90, logprobs=True).choices[0]
    assert "".join(token.token for token in choice.logprobs.content) == said.text
    assert len(choice.logprobs.content) == len(said.token_ids) - 1
    text = alone(said.prompt_token_ids, max_new_tokens=90).text
    logprobs = client.completions.create(model="tiny", prompt=said.prompt_token_ids, max_tokens=90, logprobs=0)
    assert "".join(logprobs.choices[0].logprobs.tokens) == text


def test_a_pydantic_response_format_returns_an_instance(client):
    answer = client.chat.completions.parse(model="tiny", messages=ASKED, response_format=Person, max_tokens=90)
    assert isinstance(answer.choices[0].message.parsed, Person)
    given = {"model": "tiny", "messages": ASKED, "response_format": {"type": "json_object"}, "max_tokens": 200}
    choice = client.chat.completions.create(**given).choices[0]
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)
    given = {"model": "tiny", "messages": ASKED, "extra_body": {"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}}}
    assert len(client.chat.completions.create(**given).choices[0].message.content) == 6


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "seek"}}])
def test_a_forced_tool_call_has_arguments_that_fit_its_schema(client, choice):
    given = {"model": "tiny", "messages": ASKED, "tools": [TOOL], "tool_choice": choice, "max_tokens": 80}
    given["parallel_tool_calls"] = False
    [answer] = client.chat.completions.create(**given).choices
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    [call] = answer.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "seek" and arguments.keys() == {"offset", "whence"} and arguments["offset"] >= 0
    with client.chat.completions.stream(**given) as stream:
        for _ in stream:
            pass
        [streamed] = stream.get_final_completion().choices
    assert streamed.finish_reason == "tool_calls" and not streamed.message.content
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments


class Place(BaseModel):
    line: int
    after: "Place | None" = None


def function(name: str, model: type[BaseModel]) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": model.model_json_schema()}}


@pytest.mark.parametrize("names", [("Trip",), ("Trip", "Walk")])
def test_a_forced_call_of_a_schema_that_refers_to_its_own_parts(client, names):
    """pydantic writes such schemas for nested and recursive models; here the schema is within another one."""
    models = {name: create_model(name, start=Place, end=Place) for name in names}
    tools = [function(name, model) for name, model in models.items()]
    given = {"model": "tiny", "messages": ASKED, "tools": tools, "tool_choice": "required", "max_tokens": 300}
    [answer] = client.chat.completions.create(**given, parallel_tool_calls=False).choices
    [call] = answer.message.tool_calls
    found = models[call.function.name].model_validate_json(call.function.arguments, strict=True)
    assert answer.finish_reason == "tool_calls" and isinstance(found.start, Place) and isinstance(found.end, Place)
    assert found.model_dump(exclude_unset=True).items() <= json.loads(call.function.arguments).items()


def test_a_truncated_list_of_tool_calls_has_the_complete_ones(client):
    """gemma4-tiny continues to call tools until its budget ends."""
    given = {"model": "tiny", "messages": ASKED, "tools": [TOOL], "tool_choice": "required"}
    [answer] = client.chat.completions.create(**given, max_tokens=200).choices
    calls = answer.message.tool_calls
    assert answer.finish_reason == "length" and len(calls) > 1 and answer.message.content is None
    assert all(json.loads(call.function.arguments).keys() == {"offset", "whence"} for call in calls)
    [none] = client.chat.completions.create(**given, max_tokens=5).choices
    assert (none.finish_reason, none.message.tool_calls) == ("length", None) and none.message.content


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_an_unforced_tool_call_is_left_to_the_model(client, alone, choice):
    said = alone(ASKED, max_new_tokens=20)
    given = {"model": "tiny", "messages": ASKED, "tools": [TOOL], "tool_choice": choice, "max_tokens": 20}
    [answer] = client.chat.completions.create(**given).choices
    assert (answer.message.content, answer.message.tool_calls) == (said.text, None)


def test_completions_equal_the_librarys_text(client, alone):
    said = [alone(prompt, max_new_tokens=12, logprobs=1) for prompt in ("def main(", "class A")]
    answer = client.completions.create(model="tiny", prompt="def main(", max_tokens=12, logprobs=1)
    [choice] = answer.choices
    assert choice.text == said[0].text == "".join(choice.logprobs.tokens) and choice.finish_reason == "length"
    ended = client.completions.create(model="tiny", prompt="def main(", max_tokens=90, stop=said[0].text[4:]).choices[0]
    assert (ended.finish_reason, ended.text) == ("stop", said[0].text[:4])
    assert choice.logprobs.token_logprobs == pytest.approx([each.logprob for each in said[0].logprobs], abs=1e-4)
    chunks = client.completions.create(model="tiny", prompt="def main(", max_tokens=12, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == said[0].text
    both = client.completions.create(model="tiny", prompt=["def main(", "class A"], max_tokens=12, n=2, echo=True)
    assert [choice.text for choice in both.choices] == [
        prompt + each.text for prompt, each in zip(("def main(", "class A"), said, strict=True) for _ in range(2)
    ]
    assert both.usage.completion_tokens == 48
    assert both.usage.prompt_tokens == sum(len(each.prompt_token_ids) for each in said)
    by_ids = client.completions.create(model="tiny", prompt=said[1].prompt_token_ids, max_tokens=12)
    assert by_ids.choices[0].text == said[1].text
    assert client.completions.create(model="tiny", prompt="def main(").usage.completion_tokens == 16


def test_responses_equal_the_librarys_text(client, alone):
    said = alone(ASKED, max_new_tokens=60)
    answer = client.responses.create(model="tiny", input=ASKED[0]["content"], max_output_tokens=60)
    assert (answer.output_text, answer.status) == (said.text, "completed")
    assert answer.usage.output_tokens == len(said.token_ids)
    with client.responses.stream(model="tiny", input=ASKED, max_output_tokens=60) as stream:
        events = list(stream)
        assert stream.get_final_response().output_text == said.text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == said.text
    cut = client.responses.create(model="tiny", input=ASKED, max_output_tokens=4)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    parsed = client.responses.parse(model="tiny", input="Who?", text_format=Person, max_output_tokens=90)
    assert isinstance(parsed.output_parsed, Person)
    system = [{"role": "system", "content": "Be brief."}, *ASKED]
    told = client.responses.create(model="tiny", instructions="Be brief.", input=ASKED, max_output_tokens=10)
    assert told.output_text == alone(system, max_new_tokens=10).text


def test_a_response_contains_a_forced_tool_call(client):
    tool = {"type": "function", "strict": True, **TOOL["function"]}
    given = {"model": "tiny", "input": "Go.", "tools": [tool], "tool_choice": "required", "max_output_tokens": 90}
    given["parallel_tool_calls"] = False
    [call] = client.responses.create(**given).output
    assert (call.type, call.name) == ("function_call", "seek") and json.loads(call.arguments)
    with client.responses.stream(**given) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type for event in events]
    assert "response.function_call_arguments.done" in names and names[-1] == "response.completed"


def test_the_served_model_is_listed(client, server):
    [card] = client.models.list().data
    assert (card.id, card.max_model_len) == ("tiny", 1024)
    assert client.models.retrieve("tiny").id == "tiny"
    assert httpx.get(server.url.removesuffix("/v1") + "/health").json() == {"status": "ok"}


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}}}


@pytest.mark.parametrize(
    ("given", "status", "words"),
    [
        ({"messages": "hello"}, 400, "messages: Input should be a valid list, found 'hello'"),
        ({"messages": []}, 400, "one or more"),
        ({"messages": [{"content": "x"}]}, 400, "messages.0.role: Field required"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "does not take these messages: roles are system"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "takes only text"),
        ({"messages": [{"role": "user", "content": "a\ud800"}]}, 400, "is not Unicode text"),
        ({"messages": [{"role": "user", "content": "word " * 1100}]}, 400, r"context length is 1024 .* has \d{4}"),
        ({"messages": [{"role": "user", "content": "word " * 90_000}]}, 400, "context 1024"),
        ({"max_tokens": 1000}, 400, r"maximum context length is 1024 tokens. However, you requested 1039"),
        ({"max_tokens": "9"}, 400, "max_tokens: Input should be a valid integer, found '9'"),
        ({"model": "gpt-4"}, 404, "Model 'gpt-4' not found"),
        ({"temprature": 1}, 400, "temprature is no field"),
        ({"temperature": -1}, 400, "temperature is -1"),
        ({"logit_bias": {"5000": 1}}, 400, "5000 of logit_bias is outside the vocabulary"),
        ({"top_logprobs": 3}, 400, "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "from 0 to 20"),
        ({"response_format": {"type": "xml"}}, 400, "response_format.type is 'xml'"),
        ({"response_format": {"type": "json_schema"}}, 400, "must be a JSON schema"),
        ({"response_format": SCHEMA}, 400, "uniqueItems"),
        ({"tool_choice": "required"}, 400, "there are no tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, 400, "none of the tools"),
        ({"tools": [{"type": "web_search"}]}, 400, "tools.0 must be a function"),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, 400, "do not go together"),
        ({"modalities": ["audio"]}, 400, "returns only text"),
    ],
)
def test_invalid_chat_requests_are_refused_before_a_stream_begins(server, given, status, words):
    body = json.dumps({"messages": ASKED, "stream": True} | given)
    answer = httpx.post(f"{server.url}/chat/completions", content=body, headers=JSON)
    error = answer.json()["error"]
    assert answer.status_code == status and error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert re.search(words, error["message"]), error
    assert "\n" not in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 50_000, b'{"messages": NaN}'])
def test_a_body_that_is_no_json_is_refused(server, body):
    answer = httpx.post(f"{server.url}/chat/completions", content=body, headers=JSON)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "given", "words"),
    [
        ("completions", {"prompt": ""}, "prompt is empty"),
        ("completions", {"prompt": [5000]}, "5000"),
        ("completions", {"prompt": {"a": 1}}, "prompt"),
        ("completions", {"prompt": "x", "best_of": 3}, "best_of is 3 and n 1"),
        ("completions", {"prompt": "x", "suffix": "y"}, "fills no gaps"),
        ("completions", {"prompt": "x", "max_tokens": 0, "logprobs": 1}, "max_tokens is 0"),
        ("completions", {"prompt": "x", "echo": True, "logprobs": 21}, "from 0 to 20"),
        ("completions", {"prompt": "word " * 2000}, "context length is 1024"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type is 'item_reference'"),
        ("responses", {"input": [{"type": "reasoning", "content": "x"}]}, "input.0.content must be a list of parts"),
        ("responses", {"input": "x", "previous_response_id": "y"}, "keeps no responses"),
        ("responses", {"input": [{"role": 3, "content": "x"}]}, "input: role"),
        ("responses", {"input": "x", "tools": [{"type": "web_search"}]}, "tools.0 must be a function"),
        ("responses", {}, "input: Field required"),
    ],
)
def test_invalid_requests_to_the_other_endpoints_are_refused(server, path, given, words):
    answer = server.post(f"/{path}", given)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_a_request_for_another_model_is_refused(server, path):
    given = (
        {"messages": ASKED} if path.startswith("chat") else {"prompt": "x"} if path == "completions" else {"input": "x"}
    )
    answer = server.post(f"/{path}", given | {"model": "gpt-4"})
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
    assert httpx.get(f"{server.url}/models/gpt-4").status_code == 404


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/chat/completions", 405), ("POST", "/edits", 404)])
def test_an_unknown_path_or_method_is_refused(server, method, path, status):
    answer = httpx.request(method, server.url + path)
    assert answer.status_code == status and answer.json()["error"]["message"]
