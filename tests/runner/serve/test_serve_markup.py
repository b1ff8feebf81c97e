"""A model's own markup becomes reasoning, content and tool calls, however the text is cut into rounds."""

import json

import pytest
from executorch.examples.llm_server.python.protocol import ChatMessage
from hypothesis import given, settings
from hypothesis import strategies as st
from served import dialogue_in, read, serviced

from eagle3.runner.model import Model
from eagle3.runner.serve.answer import usage
from eagle3.runner.serve.calls import DIALECTS
from eagle3.runner.serve.chat import asked
from eagle3.runner.serve.dialogue import Dialogue
from eagle3.runner.serve.errors import Refused
from eagle3.runner.serve.jobs import Job, Times
from eagle3.runner.serve.markup import CHANNEL, CONTENT, HARMONY, REASONING, THINK, TOOLS, Splitter
from eagle3.runner.serve.protocol import Outcome
from eagle3.runner.serve.protocol import Request as Asked
from eagle3.runner.serve.requests import ChatBody, parse
from eagle3.runner.text.text import Text

HERMES = DIALECTS["hermes"].marks
CALL = '<tool_call>\n{"name": "seek", "arguments": {"offset": 3}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "seek", "parameters": {"type": "object"}}}
CASES = [
    (Splitter(THINK), "<think>\nwhy\n</think>\n\nbecause", {REASONING: "why\n", CONTENT: "because"}),
    (Splitter(THINK, reasoning=True), "why</think>because", {REASONING: "why", CONTENT: "because"}),
    (Splitter(THINK, reasoning=True), "never ends", {REASONING: "never ends"}),
    (Splitter(THINK), "<think>\nIs 1 < 2? </th", {REASONING: "Is 1 < 2? </th"}),
    (Splitter(THINK), "<think>\n\n</think>\n\nYes. </thin", {CONTENT: "Yes. </thin"}),
    (Splitter(THINK), "a <think> that comes late", {CONTENT: "a <think> that comes late"}),
    (Splitter(THINK), "a < b", {CONTENT: "a < b"}),
    (Splitter(CHANNEL), "<|channel>thought\nwhy<channel|>because", {REASONING: "why", CONTENT: "because"}),
    (Splitter(None, tool_marks=HERMES), f"Well.{CALL}", {CONTENT: "Well.", TOOLS: CALL}),
    (
        Splitter(THINK, True, HERMES),
        f"or <tool_call> ?</think>{CALL}",
        {REASONING: "or <tool_call> ?", TOOLS: CALL},
    ),
    (Splitter(None, tool_marks=HERMES), "a <tool_cal", {CONTENT: "a <tool_cal"}),
    (Splitter(THINK, specials=("<|end|>",)), "a<|end|>b", {CONTENT: "ab"}),
    (
        Splitter(HARMONY, specials=("<|return|>",)),
        "<|channel|>analysis<|message|>a < b<|end|><|start|>assistant<|channel|>commentary<|message|>One.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>c<|end|><|start|>assistant<|channel|>final<|message|>Two.",
        {REASONING: "a < bc", CONTENT: "One.Two."},
    ),
    (Splitter(), "<think>x</think>", {CONTENT: "<think>x</think>"}),
]


def parts_of(splitter: Splitter, pieces: list[str]) -> dict[str, str]:
    fresh = Splitter(splitter.marks, splitter.reasoning, splitter.tool_marks, splitter.specials)
    found: dict[str, str] = {}
    for part in [part for piece in pieces for part in fresh.push(piece)] + fresh.finish():
        found[part.kind] = found.get(part.kind, "") + part.text
    return found


@pytest.mark.parametrize(("splitter", "text", "expected"), CASES)
@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, 80), max_size=8))
def test_parsed_parts_do_not_depend_on_where_rounds_cut_the_text(splitter, text, expected, cuts):
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in zip(places, places[1:], strict=False)]
    assert parts_of(splitter, pieces) == expected


@pytest.fixture(scope="module")
def with_template(session, tmp_path_factory):
    """A function that returns a dialogue with another template and the shipped tokenizer."""

    def make(template: str) -> Dialogue:
        return dialogue_in(template, session, tmp_path_factory.mktemp("template"))

    return make


CHAT = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
THINKS = CHAT + "{% if enable_thinking is false %}<think>\n\n</think>{% elif effort %}<think>{% endif %}"
ASKED = [ChatMessage(role="user", content="x")]


def test_reasoning_marks_and_tool_parsers_are_read_from_the_template(with_template):
    dialogue = with_template(THINKS)
    for kwargs, opened in (({}, False), ({"effort": 1}, True), ({"enable_thinking": False}, False)):
        turn = dialogue.turn(ASKED, {}, template_kwargs=kwargs)
        assert (turn.marks, turn.reasoning, turn.tool_marks) == (THINK, opened, ())
        assert turn.options == {"skip_special_tokens": False}
    turn = with_template(CHAT + "<|tool_call>").turn(ASKED, {}, [TOOL])
    assert turn.tool_marks == DIALECTS["gemma"].marks and turn.marks is None
    assert with_template(CHAT + "<function=").turn(ASKED, {}, [TOOL]).tool_marks == DIALECTS["qwen"].marks
    assert with_template(CHAT).turn(ASKED, {}, [TOOL], "none").tool_marks == ()
    assert with_template(CHAT).turn(ASKED, {}).options == {}


def test_tools_are_in_the_prompt_unless_tool_choice_is_none(with_template):
    dialogue = with_template("{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + CHAT)
    for choice, shown in ((None, True), ("auto", True), ("required", True), ("none", False)):
        prompt = dialogue.turn(ASKED, {}, [TOOL], choice).prompt
        assert dialogue._text.decode(prompt).startswith("seek") == shown


def test_text_that_cannot_become_a_mark_is_not_held_back():
    splitter = Splitter(THINK)
    shown = [[part.text for part in splitter.push(piece)] for piece in ("<think>Is 1 <", " 2? </", "think>It ", "is.")]
    assert shown == [["Is 1 "], ["< 2? "], ["It "], ["is."]]


def test_tool_calls_in_the_models_own_markup_are_parsed(with_template):
    dialogue = with_template(THINKS + "{# <tool_call> #}")
    turn = dialogue.turn(ASKED, {}, [TOOL])
    answer = read(dialogue, turn, ["<thi", "nk>hm</think>Well.", CALL[:20], CALL[20:] + CALL])
    assert (answer.text(REASONING), answer.text(CONTENT)) == ("hm", "Well.")
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [("seek", {"offset": 3})] * 2
    assert len({call.id for call in answer.calls}) == 2
    broken = read(dialogue, turn, ["Well.", CALL[:30]])
    assert (broken.calls, broken.text(CONTENT)) == ([], "Well." + CALL[:30])  # nothing is lost
    unknown = CALL.replace("seek", "other")
    assert read(dialogue, turn, [unknown]).text(CONTENT) == unknown


def test_the_templates_end_token_ends_an_answer(session, tmp_path):
    """The tokenizer may end a turn with a token that the artifact does not name."""
    end = dialogue_in(CHAT, session, tmp_path)
    assert "stop_token_ids" not in end.turn(ASKED, {}).options
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<pad>"}))
    text = Text(tmp_path)
    dialogue, pad = Dialogue(text, session.metadata, tmp_path), text.tokenizer.token_to_id("<pad>")
    assert pad not in session.metadata.eos_ids
    assert dialogue.turn(ASKED, {}).options["stop_token_ids"] == [pad]
    assert dialogue.turn(ASKED, {"stop_token_ids": [7]}).options["stop_token_ids"] == [7, pad]


@pytest.fixture(scope="module")
def thinking(session, tmp_path_factory):
    """A service whose template knows reasoning, and whose tokenizer has its marks as tokens."""
    folder = tmp_path_factory.mktemp("thinking")
    tokenizer = dialogue_in(THINKS, session, folder)._text.tokenizer
    tokenizer.add_special_tokens(["<think>", "</think>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    with serviced([Model(session.metadata, lambda: session, folder)], folder) as service:
        yield service


def test_reasoning_before_constrained_text_is_not_constrained(thinking):
    asked = {"response_format": {"type": "json_object"}}
    both = {"reasoning_begin": "<think>", "reasoning_end": "</think>"}
    for kwargs, expected in (
        ({}, both),
        ({"effort": 1}, {"reasoning_end": "</think>"}),  # the prompt has begun the reasoning
        ({"enable_thinking": False}, {}),  # the prompt has begun and ended the reasoning
    ):
        options = thinking.dialogue.turn(ASKED, {}, **asked, template_kwargs=kwargs).options
        assert options["structured_outputs"] == {"json_object": True, **expected}


def test_reasoning_options_of_a_request_reach_the_template(thinking):
    def prompt(**given) -> str:
        body = parse(ChatBody, {"messages": [{"role": "user", "content": "x"}], **given}, {})
        return thinking.text.decode(asked(thinking, body).prompt, False)

    closed = "<think>\n\n</think>"
    assert prompt(reasoning_effort="none").endswith(closed) and "<think>" not in prompt(reasoning_effort="high")
    assert prompt(chat_template_kwargs={"effort": 1}).endswith("<think>")
    assert prompt(chat_template_kwargs={"enable_thinking": False}).endswith(closed)
    given = {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}
    assert prompt(**given).endswith(closed)  # an explicit option overrides a derived one


def test_reasoning_is_counted_up_to_the_token_that_ends_it():
    job = Job(Asked([5, 6], {}), None, Times(0.0), outcome=Outcome([8, 9, 4, 8], "stop"))
    for end, count in ((4, 3), (8, 1), (7, 0), (None, 0)):
        assert usage([(2, [job])], end)["completion_tokens_details"]["reasoning_tokens"] == count


def test_contradictory_tools_and_formats_are_refused(with_template):
    dialogue = with_template(CHAT)
    with pytest.raises(Refused, match="give one of them"):
        dialogue.turn(ASKED, {"structured_outputs": {"regex": "a"}}, [TOOL], "required")
    with pytest.raises(Refused, match="give one of them"):
        dialogue.turn(ASKED, {"structured_outputs": {"regex": "a"}}, response_format={"type": "json_object"})
