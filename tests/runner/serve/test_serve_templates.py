"""Histories are converted to the form that a chat template needs, and partial characters have their bytes."""

import json

import pytest
from executorch.examples.llm_server.python.protocol import ChatMessage
from scripted import scripted_metadata
from scripted_logits import LogitsSession
from served import dialogue_in
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer

from eagle3.runner.serve.requests import ChatBody, ResponseBody, parse
from eagle3.runner.serve.responses import INCLUDED, _messages
from eagle3.runner.serve.template import THOUGHT, Ending
from eagle3.runner.text.text import Text
from eagle3.targets import TARGETS

TINY = TARGETS["gemma4-tiny"].checkpoint
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
HISTORY = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
CALLS = "{%% for m in messages %%}{%% for c in m.tool_calls or [] %%}%s{%% endfor %%}{%% endfor %%}"
CONCATENATED = CALLS % "{{ 'call ' + c.function.arguments }}"
MAPPING = CALLS % "{% for k, v in c.function.arguments|items %}{{ k }}={{ v }}{% endfor %}"


class Scripted(LogitsSession):
    def __init__(self):
        self.metadata = scripted_metadata()


def rendered(template: str, history: list[dict], folder) -> str:
    dialogue = dialogue_in(template, Scripted(), folder)
    return dialogue._render([ChatMessage(**each) for each in history], None, None)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (CONCATENATED, 'call {"a": 1}'),
        (MAPPING, "a=1"),
        ("{% for m in messages %}{{ '|' + m.content }}{% endfor %}", "|x|"),
        ("{% for m in messages %}{{ m.role }} {% endfor %}", "system user "),
        ("{# developer #}{% for m in messages %}{{ m.role }} {% endfor %}", "developer user "),
    ],
)
def test_a_history_is_converted_to_the_form_of_the_template(template, says, tmp_path):
    history = [{"role": "developer", "content": "y"}, HISTORY[0]] if "m.role" in template else HISTORY
    assert rendered(template, history, tmp_path) == says


def test_the_shipped_template_accepts_a_turn_of_tool_calls_without_content(tmp_path):
    assert rendered((TINY / "chat_template.jinja").read_text(), [*HISTORY, HISTORY[0]], tmp_path)


PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
)
TWO_PARTS = [{"type": "text", "text": "Open "}, {"type": "input_text", "text": "a file."}]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (PARTS, "<system>Open a file.<user>Open a file."),
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
         "<system>Open \na file.<user>Open \na file."),
        ("{% for m in messages %}<{{ m.role }}>{{ m.content[0].text }}{% endfor %}", "<system><user>"),  # no text
        ("<system>{{ messages[0].content + '!' }}" + PARTS.replace("in messages", "in messages[1:]"),
         "<system>Open \na file.!<user>Open a file."),
    ],
)  # fmt: skip
def test_parts_reach_a_template_that_takes_them_and_are_joined_for_others(template, says, tmp_path):
    history = [{"role": role, "content": TWO_PARTS} for role in ("system", "user")]
    assert rendered(template, history, tmp_path) == says


THINKS = "{%% for m in messages %%}<{{ m.role }}>{%% if m.%s %%}({{ m.%s }}){%% endif %%}{{ m.content }}{%% endfor %%}"
PART = (
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}"
    "{% if p.type == 'thinking' %}({{ p.thinking }}){% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("given", THOUGHT)
@pytest.mark.parametrize("template", [*(THINKS % (name, name) for name in THOUGHT), PART])
def test_the_thought_of_an_earlier_turn_reaches_the_template_under_its_own_name(given, template, tmp_path):
    turn = {"role": "assistant", "content": "Four.", given: "2+2"}
    dialogue = dialogue_in(template, Scripted(), tmp_path)
    parsed = parse(ChatBody, {"messages": [turn]}, {}).messages
    assert dialogue._render(parsed, None, None) == "<assistant>(2+2)Four."
    assert dialogue.unread == ["reasoning"]


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def test_instructions_and_later_system_messages_fit_a_strict_template(tmp_path):
    told = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]}
    asked = {"role": "user", "content": "go"}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Look."}]}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    dialogue = dialogue_in(STRICT + "{# .reasoning_content #}", Scripted(), tmp_path)

    def prompt(items: list[dict]) -> tuple[str, list]:
        body = parse(ResponseBody, {"instructions": "Be brief.", "input": items, "include": [INCLUDED[0]]}, {})
        return dialogue._render(messages := _messages(body), None, None), messages

    assert prompt([asked])[0] == "<system>Be brief.<user>go"
    assert prompt([told, asked])[0] == "<system>Be brief.\n\nRules.<user>go"
    assert prompt([told, asked, told])[0] == "<system>Be brief.\n\nRules.\n\nRules.<user>go"
    found = prompt([asked, thought, call, call])[1][-1]
    assert (found.reasoning_content, found.content, len(found.tool_calls)) == ("Look.", None, 2)


def test_the_logprobs_of_a_partial_character_have_its_bytes(tmp_path):
    tokens = ["<0xE2>", "a", "\ufffd"]
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, []))
    tokenizer.decoder = decoders.ByteFallback()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert [Text(tmp_path).token_bytes(id) for id in (0, 2)] == [b"\xe2", None]
    text = Text(TINY)
    ids = text.tokenizer.encode("\U0001f40d", add_special_tokens=False).ids
    assert len(ids) > 1 and b"".join(map(text.token_bytes, ids)) == "\U0001f40d".encode()
    assert json.dumps(list(text.token_bytes(ids[0])))


CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content|trim }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
BEGUN = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two, "}]


@pytest.mark.parametrize(
    ("ending", "says"),
    [
        (Ending(), "<assistant>One, two,</assistant><assistant>"),
        (Ending(False), "<assistant>One, two,</assistant>"),
        (Ending(False, True), "<assistant>One, two,"),
    ],
)
def test_each_ending_of_a_prompt_equals_transformers(ending, says, tmp_path):
    dialogue = dialogue_in(CHATML, Scripted(), tmp_path)
    messages = [ChatMessage(**each) for each in BEGUN]
    rendered = dialogue._render(messages, None, None, ending)
    assert rendered == "<user>Count.</user>" + says
    assert rendered == AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        BEGUN, tokenize=False, add_generation_prompt=ending.opens_turn, continue_final_message=ending.continues
    )


@pytest.mark.parametrize(
    ("begun", "opened"), [("<think>Let me", True), ("<think>Let me</think>\n\nOne", False), ("One", False)]
)
def test_a_continued_answer_stays_in_its_open_reasoning(begun, opened, tmp_path):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}"
    dialogue = dialogue_in(template, Scripted(), tmp_path)
    messages = [ChatMessage(role="assistant", content=begun)]
    assert dialogue.turn(messages, {}, ending=Ending(False, True)).reasoning is opened


def test_a_continued_answer_equals_the_rest_of_the_complete_one(server):
    asked = [{"role": "user", "content": "Open a file and read its lines."}]
    whole = server.post("/chat/completions", {"messages": asked}).json()["choices"][0]["message"]["content"]
    begun = {"role": "assistant", "content": whole[:12]}
    given = {"messages": [*asked, begun], "add_generation_prompt": False, "continue_final_message": True}
    for each in (given, {name: value for name, value in given.items() if name != "add_generation_prompt"}):
        [choice] = server.post("/chat/completions", each).json()["choices"]
        assert whole[:12] + choice["message"]["content"] == whole and choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"add_generation_prompt": True}, "are both true"),
        ({"messages": BEGUN[:1]}, "the last message has the role 'user'"),
        ({"messages": [*BEGUN[:1], {"role": "assistant", "content": ""}]}, "the last message has no content"),
        ({"messages": HISTORY}, "the last message has tool calls"),
        ({"continue_final_message": "yes"}, "continue_final_message"),
    ],
)
def test_messages_that_cannot_be_continued_are_refused(server, given, words):
    answer = server.post("/chat/completions", {"messages": BEGUN, "continue_final_message": True} | given)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]
