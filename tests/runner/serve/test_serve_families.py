"""Answers of Qwen 3, Qwen 3 Coder, DeepSeek R1, Gemma 3 and 4 and Llama 3.1 are parsed correctly, wherever rounds cut
them.

The templates are not the families' own, but have the same marks and the same beginning of a turn.
"""

import json
from itertools import combinations
from typing import NamedTuple

import pytest
from executorch.examples.llm_server.python.protocol import ChatMessage
from served import dialogue_in, read

from eagle3.runner.serve.markup import CONTENT, REASONING, THINK

ASKED = [ChatMessage(role="user", content="x")]
SEEK = {
    "type": "object",
    "properties": {"offset": {"type": "integer"}, "whence": {"type": "string"}, "keep": {"type": "boolean"}},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SEEK}} for name in ("seek", "tell")]
TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
QWEN3 = TURNS + "assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{# <tool_call> #}"
CODER = TURNS + "assistant\n{# <tool_call>\n<function=name> #}"
R1 = TURNS + "<|Assistant|><think>\n{# </think> #}"
GEMMA3 = TURNS + "<start_of_turn>model\n"
GEMMA4 = TURNS + "<|turn>model\n{# <|channel>thought <|tool_call> #}"
LLAMA = TURNS + "<|start_header_id|>assistant<|end_header_id|>\n\n{# <|python_tag|> #}"
ARGUMENTS = {"offset": 12, "whence": "end"}


class Case(NamedTuple):
    template: str
    said: str
    reasoning: str = ""
    content: str = ""
    calls: tuple = ()
    tools: bool = True
    kwargs: dict | None = None


CASES = {
    "Qwen 3 thinks and answers": Case(
        QWEN3, "<think>\nIs 1 < 2?\n\nYes.\n</think>\n\nIt <b>is</b>.", "Is 1 < 2?\n\nYes.\n", "It <b>is</b>."
    ),
    "Qwen 3 does not think": Case(QWEN3, "A </thin line.", "", "A </thin line.", kwargs={"enable_thinking": False}),
    "Qwen 3 thinks of nothing": Case(QWEN3, "<think>\n\n</think>\n\nYes.", "", "Yes."),
    "Qwen 3 is cut while it thinks": Case(QWEN3, "<think>\nIs 1 < 2? </th", "Is 1 < 2? </th"),
    "Qwen 3 thinks and calls twice": Case(
        QWEN3,
        "<think>\nTwo.\n</think>\n\nWell.\n"
        '<tool_call>\n{"name": "seek", "arguments": {"offset": 12, "whence": "end"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "tell", "arguments": {}}\n</tool_call>',
        "Two.\n",
        "Well.\n",
        (("seek", ARGUMENTS), ("tell", {})),
    ),
    "Qwen 3 without tools writes the same": Case(
        QWEN3,
        'So: <tool_call>\n{"name": "seek"}\n</tool_call>',
        "",
        'So: <tool_call>\n{"name": "seek"}\n</tool_call>',
        tools=False,
    ),
    "Qwen 3 Coder calls": Case(
        CODER,
        "I look.\n<tool_call>\n<function=seek>\n<parameter=offset>\n12\n</parameter>\n"
        "<parameter=whence>\nend\n</parameter>\n<parameter=keep>\ntrue\n</parameter>\n</function>\n</tool_call>",
        "",
        "I look.\n",
        (("seek", {**ARGUMENTS, "keep": True}),),
    ),
    "DeepSeek R1's prompt has begun to think": Case(R1, "Hm.\n\nSo.\n</think>\n\n**Yes**", "Hm.\n\nSo.\n", "**Yes**"),
    "DeepSeek R1 is cut while it thinks": Case(R1, "Hm.\nAnd <", "Hm.\nAnd <"),
    "Gemma 3 has no marks": Case(GEMMA3, "a < b <think> c", "", "a < b <think> c"),
    "Gemma 4 thinks and answers": Case(
        GEMMA4, "<|channel>thought\nA plan.\n<channel|>The answer.", "A plan.\n", "The answer."
    ),
    "Gemma 4 calls": Case(
        GEMMA4,
        '<|channel>thought\nSeek.<channel|><|tool_call>call:seek{offset:12,whence:<|"|>end<|"|>}<tool_call|>',
        "Seek.",
        "",
        (("seek", ARGUMENTS),),
    ),
    "Llama 3.1 answers": Case(LLAMA, 'As JSON: {"names": [1]}', "", 'As JSON: {"names": [1]}'),
    "Llama 3.1 calls": Case(
        LLAMA, '{"name": "seek", "parameters": {"offset": 12, "whence": "end"}}', calls=(("seek", ARGUMENTS),)
    ),
    "Llama 3.1 calls twice, as a Python tool": Case(
        LLAMA,
        '<|python_tag|>{"name": "seek", "parameters": {"offset": 12, "whence": "end"}}; '
        '{"name": "tell", "parameters": {}}',
        calls=(("seek", ARGUMENTS), ("tell", {})),
    ),
    "Llama 3.1 says the type too": Case(
        LLAMA, '{"type": "function", "name": "tell", "parameters": {}}', calls=(("tell", {}),)
    ),
    "Llama 3.1 writes JSON that is no call": Case(LLAMA, '{"name": "Ann", "age": 3}', "", '{"name": "Ann", "age": 3}'),
    "Llama 3.1's call is cut": Case(LLAMA, '{"name": "seek", "par', "", '{"name": "seek", "par'),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_familys_answer_is_parsed_the_same_however_it_is_cut(case, session, tmp_path):
    dialogue = dialogue_in(case.template, session, tmp_path)
    turn = dialogue.turn(ASKED, {}, TOOLS if case.tools else None, template_kwargs=case.kwargs)
    assert turn.reasoning == (case.template == R1)
    text = case.said
    for pieces in ([text], list(text)):
        answer = read(dialogue, turn, pieces)
        assert (answer.text(REASONING), answer.text(CONTENT)) == (case.reasoning, case.content)
        assert tuple((call.name, json.loads(call.arguments)) for call in answer.calls) == case.calls
    expected = parts(turn, [text])
    for first, second in combinations(range(1, len(text)), 2):
        assert parts(turn, [text[:first], text[first:second], text[second:]]) == expected, (first, second)


def parts(turn, pieces: list[str]) -> dict[str, str]:
    splitter, found = turn.splitter(), {}
    for part in [part for piece in pieces for part in splitter.push(piece)] + splitter.finish():
        found[part.kind] = found.get(part.kind, "") + part.text
    return found


def test_text_that_cannot_become_a_mark_is_not_held_back(session, tmp_path):
    """Reasoning and content are passed on at once, except text that may become a mark."""
    turn = dialogue_in(QWEN3, session, tmp_path).turn(ASKED, {})
    assert turn.marks == THINK
    splitter = turn.splitter()
    shown = [[part.text for part in splitter.push(piece)] for piece in ("<think>Is 1 <", " 2? </", "think>It ", "is.")]
    assert shown == [["Is 1 "], ["< 2? "], ["It "], ["is."]]
