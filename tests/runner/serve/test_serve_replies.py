"""Replies in the markup of this year's models come back as their thought, content and calls, streamed byte by byte and
whole.

The text of a reply is what the family's template writes of the message, so the arguments of calls, the thought and the
content have to come back as they were.
"""

import asyncio
import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from chat_templates import FAMILIES, Family
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from scripted import scripted_metadata
from served import serviced
from starlette.requests import Request
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from eagle3.runner.contract import DRAFT_DECODE, TARGET_VERIFY, Metadata
from eagle3.runner.hosts.session import TimedSession
from eagle3.runner.model import Model
from eagle3.runner.serve import chat
from eagle3.runner.serve.calls import DIALECTS, read_calls, typed, types_of
from eagle3.runner.serve.requests import ChatBody, parse

GO = {"role": "user", "content": "go"}
STRING = {"type": "string"}
EDIT = {
    "before": STRING,
    "after": STRING,
    "zip": {"anyOf": [STRING, {"type": "null"}]},
    "code": {"type": ["string", "null"]},
    "flag": {"$ref": "#/$defs/text"},
    "times": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "dry": {"type": "boolean"},
    "scale": {"type": "number"},
    "where": {"type": "object"},
}
ARGUMENTS = {
    "before": "    if ready:\n        start(\"a\", {b: 'c'})\n",
    "after": "\tstop() # </b>\n\n",
    "zip": "0123",
    "code": "1234",
    "flag": "true",
    "times": 7,
    "dry": True,
    "scale": 0.5,
    "where": {"line": 3, "file": "a b.py"},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": properties, "$defs": {"text": STRING}},
        },
    }
    for name, properties in (("edit_file", EDIT), ("list-files", {}))
]
ONE, TWO = [("edit_file", ARGUMENTS)], [("edit_file", ARGUMENTS), ("list-files", {})]


class Scripted:
    """A service of a family's template, whose model writes a scripted text, one token a round."""

    def __init__(self, service, tokenizer: Tokenizer, script: dict):
        self._service, self._tokenizer, self._script = service, tokenizer, script
        self.dialogue = service.dialogue

    def answers(self, text: str, **given) -> list[tuple]:
        """Return the answers to a request, whole and streamed: thought, content, calls, finish reason."""
        self._script["ids"] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [asyncio.run(self._whole(given)), asyncio.run(self._streamed(given))]

    def _body(self, given: dict, **more) -> ChatBody:
        body = parse(ChatBody, {"messages": [GO], "temperature": 0, **given, **more}, {})
        self._script["start"] = len(chat.asked(self._service, body).prompt)
        return body

    async def _whole(self, given: dict) -> tuple:
        made = await chat.complete(self._service, self._body(given), Request({"type": "http"}))
        [choice] = ChatCompletion.model_validate(made).choices
        message = choice.message.model_dump()
        given_calls = [call["function"] for call in message["tool_calls"] or []]
        calls = [(call["name"], json.loads(call["arguments"])) for call in given_calls]
        assert calls or message["content"] is not None
        assert not calls or message["content"] != ""
        return message.get("reasoning_content") or "", message["content"] or "", calls, choice.finish_reason

    async def _streamed(self, given: dict) -> tuple:
        texts, calls, reason = {"reasoning_content": "", "content": ""}, [], None
        async for chunk in chat.stream(self._service, self._body(given, stream=True), Request({"type": "http"})):
            [choice] = ChatCompletionChunk.model_validate(chunk).model_dump(exclude_unset=True)["choices"]
            for name in texts:
                texts[name] += choice["delta"].get(name) or ""
            for call in choice["delta"].get("tool_calls") or []:
                calls.append((call["function"]["name"], json.loads(call["function"]["arguments"])))
            reason = choice["finish_reason"] or reason
        return texts["reasoning_content"], texts["content"], calls, reason


class Writing(TimedSession):
    """A session whose target writes the script, whatever was before it, and whose draft is never right."""

    has_decode, has_speculate = True, False

    def __init__(self, metadata: Metadata, script: dict, end: int):
        super().__init__(metadata)
        self._script, self._end = script, end

    def _call(self, name, tokens, *inputs):
        ids, start = self._script["ids"], self._script["start"]
        places = [position + 1 - start for position in inputs[-1].tolist()]
        said = [ids[place] if 0 <= place < len(ids) and name != DRAFT_DECODE else self._end for place in places]
        rows = len(said) if name == TARGET_VERIFY else 1
        return torch.tensor([said[-rows:]]), torch.zeros(1, 1 if name == DRAFT_DECODE else len(said), 1)


def byte_tokenizer(family: Family) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({char: id for id, char in enumerate(bytes_to_unicode().values())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    for texts, special in ((family.special, True), (family.plain, False)):
        tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text in texts])
    return tokenizer


@contextmanager
def scripted(family: Family, folder):
    tokenizer, script = byte_tokenizer(family), {"ids": [], "start": 0}
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": family.end}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(family.template)
    end, size = tokenizer.token_to_id(family.end), tokenizer.get_vocab_size()
    metadata = scripted_metadata(max_seq_len=4096, max_prefill=256, chain_len=1, eos_ids=(end,))
    session = Writing(replace(metadata, vocab_size=size, draft_vocab_size=size), script, end)
    with serviced([Model(session.metadata, lambda: session, folder)], folder) as service:
        yield Scripted(service, tokenizer, script)


def written(folder, family: Family, thought: str, content: str, calls: list) -> str:
    """Return what the family's template writes of a message after the beginning of the assistant's turn."""
    template = AutoTokenizer.from_pretrained(folder)
    content_parts = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": content}]
    message = {
        "role": "assistant",
        "content": content_parts if "p.thinking" in family.template else content,
        "reasoning_content": thought,
        "thinking": thought,
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls],
    }
    begun = template.apply_chat_template([GO], tokenize=False, add_generation_prompt=True)
    whole = template.apply_chat_template([GO, message], tokenize=False)
    assert whole.startswith(begun)
    return whole[len(begun) :].strip("\n").removesuffix(family.end)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_reply_comes_back_as_the_template_writes_it(name, tmp_path):
    family = FAMILIES[name]
    thought = "It says Question: 2+2 < 5,\n\nso four." if family.thinks else ""
    with scripted(family, tmp_path) as service:
        assert service.dialogue.unread == []

        def check(content: str, calls: list, reason: str, says: str | None = None, **given) -> None:
            text = written(tmp_path, family, thought, content, calls)
            for found in service.answers(text, **given):
                got_thought, got_content, got_calls, got_reason = found
                assert (got_thought.rstrip("\n"), got_content.rstrip("\n")) == (
                    thought,
                    content if says is None else says,
                )
                assert got_calls == calls and got_reason == reason

        check("Four.\n\nSee <b>.", [], "stop")
        check("Four.\n\nSee <b>.", [], "stop", tools=TOOLS)
        check("Four.\nQuestion: next", [], "stop", "Four.", stop=["Question:", "\n\n"])
        check("", ONE, "tool_calls", tools=TOOLS)
        check("Look." if family.both else "", TWO, "tool_calls", tools=TOOLS)


OSLO = [("f", {"city": "Oslo"})]
SCHEMAS = {"f": {"type": "object", "properties": {"city": STRING, "n": {"type": "integer"}}}, "g": {}}
FORMS = [
    ("gpt-oss", ' to=functions.f<|channel|>commentary json<|message|>{"city": "Oslo"}', OSLO),
    ("gpt-oss", '<|channel|>analysis to=functions.f code<|message|>{"city": "Oslo"}<|call|>', OSLO),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"city": "Oslo"}, "id": "abcdefghi"}]', OSLO),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"city": "Oslo"}', OSLO),
    ("mistral", '[TOOL_CALLS]f{"city": "Oslo"}[TOOL_CALLS]g{}', [*OSLO, ("g", {})]),
    ("lfm2", '<|tool_call_start|>[{"name": "f", "arguments": {"city": "Oslo"}}]<|tool_call_end|>', OSLO),
    ("lfm2", "<|tool_call_start|>[f(city='Oslo')]<|tool_call_end|>\n<|tool_call_start|>[g()]<|tool_call_end|>",
     [*OSLO, ("g", {})]),
    ("glm", "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>", OSLO),
    ("glm", "<tool_call>g</tool_call>", [("g", {})]),
    ("kimi", '<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>{"city": "Oslo"}'
     "<|tool_call_end|><|tool_calls_section_end|>", OSLO),
    ("nemotron-2", '<TOOLCALL>[{"name": "f", "arguments": {"city": "Oslo"}}]</TOOLCALL>', OSLO),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"city\\": \\"Oslo\\"}"}</tool_call>', OSLO),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"city": "</tool_call>"}}', [("f", {"city": "</tool_call>"})]),
    ("qwen", "<function=f>\n<parameter=city>\n<parameter=x>\n</parameter>;</function>;\n</parameter>\n</function>",
     [("f", {"city": "<parameter=x>\n</parameter>;</function>;"})]),
    ("qwen", "<tool_call><function=f><parameter=n>None</parameter></function></tool_call>", [("f", {"n": "None"})]),
    ("qwen", "<tool_call>\n<function=g>\n<parameter=x>\nTrue\n</parameter>\n</function>\n</tool_call>",
     [("g", {"x": True})]),
    ("gemma", "<|tool_call>call:f{city:Oslo,n:3,b-c:null}<tool_call|>", [("f", {"city": "Oslo", "n": 3, "b-c": None})]),
    ("llama", '{"name": "f", "parameters": {"city": "Oslo"}}\n{"name": "g", "parameters": null}', [*OSLO, ("g", {})]),
    ("llama", '<|python_tag|>{"name": "f", "parameters": {"city": "Oslo"}}; {"type": "function", "name": "g"}',
     [*OSLO, ("g", {})]),
    ("llama", '{"name": "Ann", "age": 3}', []),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "text", "calls"), FORMS)
def test_the_forms_in_which_models_write_calls_are_read_and_a_cut_or_unknown_call_stays_whole(dialect, text, calls):
    assert any(mark in text for mark in DIALECTS[dialect].marks)
    for end in range(1, len(text) + 1):
        found, rest = read_calls(dialect, text[:end], SCHEMAS)
        assert [(name, json.loads(given)) for name, given in found] == calls[: len(found)]
        assert found or rest == text[:end]
    assert len(found) == len(calls) and (rest == "") == bool(calls)
    assert read_calls(dialect, text, {"other": {}}) == ([], text)
    if text.endswith("</tool_call>"):
        assert read_calls(dialect, text + "\nDone.", SCHEMAS)[1] == "Done."


ROOT = {"$defs": {"a/b": {"enum": ["x", None]}, "loop": {"$ref": "#/$defs/loop"}, "n": {"allOf": [{"type": "number"}]}}}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"$ref": "#/$defs/a~1b"}, "1", "1"),
        ({"$ref": "#/$defs/a~1b"}, "null", None),
        ({"$ref": "#/$defs/loop"}, "1", 1),
        ({"$ref": "#/$defs/n"}, "1", 1),
        ({"$ref": "#/$defs/n"}, "true", "true"),
        ({"$ref": "#/missing/n"}, "[1]", [1]),
        ({"const": "1"}, "1", "1"),
        ({"type": "integer"}, "1.5", "1.5"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "string"}, '"a"', '"a"'),
        ({"type": "string", "nullable": True}, "None", None),
        ({"type": "object"}, "{}", {}),
        ({"oneOf": [{"type": "string"}, {"type": "array"}]}, "[1]", [1]),
        ({"anyOf": [{"type": "string"}, {}]}, "12", 12),
        (True, "12", 12),
    ],
)
def test_an_argument_has_a_type_that_its_schema_allows(schema, text, value):
    found = typed(text, types_of(schema, ROOT))
    assert found == value and type(found) is type(value)


UNREAD = Family(
    "{%- for m in messages -%}<|user|>{{ m.content }}{{ m.reasoning_content }}{{ m.tool_calls }}{%- endfor -%}",
    ("<|user|>", "<|START_THINKING|>", "<|START_ACTION|>", "<eos>"),
    "<eos>",
)


def test_a_reply_in_a_markup_that_nothing_reads_stays_whole(tmp_path):
    text = '<|START_THINKING|>Look.<|START_ACTION|>[{"tool_name": "f"}]'
    with scripted(UNREAD, tmp_path) as service:
        assert service.dialogue.unread == ["reasoning", "tool calls"]
        assert service.answers(text, tools=TOOLS) == [("", text, [], "stop")] * 2
