"""Prompts from files and from stdin are read in every known format; anything else is refused with line and field."""

import io
import json
import sys
from dataclasses import replace

import pytest

from eagle3.runner.system.text_input import read_text
from eagle3.runner.text.prompts import Prompt, read_prompts

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def file(tmp_path):
    return tmp_path / "prompts.jsonl"


def set_stdin(monkeypatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))


# --- accepted prompts


@pytest.mark.parametrize(
    ("entry", "prompt"),
    [
        ({"prompt": "a b", "id": "x", "category": "y"}, Prompt(1, text="a b", id="x", category="y")),
        ({"prompt_tokens": [2, 3], "id": 0}, Prompt(1, tokens=[2, 3], id=0)),
        ({"messages": MESSAGES, "category": None}, Prompt(1, messages=MESSAGES)),
        (
            {"question_id": 81, "category": "writing", "turns": ["First.", "Second."], "reference": ["", ""]},
            Prompt(1, text="First.", further_turns=("Second.",), category="writing", id=81),
        ),
        ({"question": "How many?", "answer": "#### 3"}, Prompt(1, text="How many?")),
        (
            {
                "task_id": "HumanEval/0",
                "prompt": "def f():\n",
                "entry_point": "f",
                "canonical_solution": "    pass\n",
                "test": "def check(f): ...",
            },
            Prompt(1, text="def f():\n", id="HumanEval/0"),
        ),
    ],
    ids=["text", "tokens", "messages", "MT-Bench", "GSM8K", "HumanEval"],
)
def test_every_known_format_of_prompts_is_read_with_options(file, entry, prompt):
    options = {"temperature": 0.5, "stop": ["a"], "logit_bias": {"3": -1}}
    file.write_text(json.dumps(entry) + "\n" + json.dumps(entry | options))
    plain, with_options = read_prompts(file)
    assert plain == prompt
    assert with_options == replace(prompt, line=2, options=options)


def test_blank_lines_byte_order_marks_and_other_line_ends_are_ignored(file):
    file.write_bytes('\ufeff\r\n{"prompt": "a\u2028b\x85"}\r\n \t\n{"prompt": "\u00e9"}'.encode())
    assert read_prompts(file) == [Prompt(2, text="a\u2028b\x85"), Prompt(4, text="é")]


def test_prompts_and_a_single_prompt_are_read_from_stdin(monkeypatch):
    set_stdin(monkeypatch, '{"prompt": "é"}'.encode())
    assert read_prompts(None) == [Prompt(1, text="é")]
    set_stdin(monkeypatch, "\ufeffé\r\nb".encode())
    assert read_text(None) == "é\nb"


# --- refused prompts


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("not json", "not JSON .* column 1"),
        ('{"prompt": "a"', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('"a"', "no JSON object"),
        ("{}", "one of prompt, prompt_tokens, messages, turns, question is needed, found no field"),
        ('{"promt": "a"}', "is needed, found 'promt'"),
        ('{"prompt": "a", "temprature": 1}', "unknown field 'temprature': known beside prompt are id, .*temperature"),
        ('{"question": "a", "reference": 1}', "unknown field 'reference'"),
        ('{"prompt": "a", "messages": []}', "prompt and messages mean the same"),
        ('{"prompt": "a", "id": 1, "task_id": 2}', "id and task_id mean the same"),
        ('{"prompt": "a", "prompt": "b"}', "'prompt' occurs twice"),
        ('{"prompt": 3}', "prompt is 3, but must be text"),
        ('{"prompt": ""}', "prompt is empty"),
        ('{"prompt": "\\ud800"}', "prompt is not Unicode text"),
        ('{"turns": []}', "turns is empty"),
        ('{"turns": ["a", ""]}', "turns is empty"),
        ('{"turns": ["a", 1]}', r"turns\[1\] is 1, but must be text"),
        ('{"prompt_tokens": []}', "prompt_tokens is empty"),
        ('{"prompt_tokens": [1, true]}', r"prompt_tokens\[1\] is True, but must be a whole number"),
        ('{"prompt_tokens": "1,2"}', "prompt_tokens is '1,2', but must be a list"),
        ('{"messages": [{"role": "user"}]}', "message 1 must have role and content"),
        ('{"prompt": "a", "id": 1.5}', "id is 1.5, but must be text or a whole number"),
        ('{"prompt": "a", "category": 1}', "category is 1, but must be text"),
    ],
)
def test_a_line_that_is_no_prompt_is_refused_with_file_line_and_field(file, line, words):
    file.write_text('{"prompt": "a"}\n\n' + line)
    with pytest.raises(ValueError, match=words) as failure:
        read_prompts(file)
    assert str(failure.value).startswith(f"{file} line 3: ")
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("content", ["", "\n \n", "\ufeff"])
def test_a_file_without_prompts_is_refused(file, content):
    file.write_text(content)
    with pytest.raises(ValueError, match=f"{file} has no prompts"):
        read_prompts(file)


def test_bytes_that_are_not_utf8_are_named(file, monkeypatch):
    file.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}')
    with pytest.raises(ValueError, match=f"{file} line 2: not UTF-8 text .*0xff in position 12"):
        read_prompts(file)
    set_stdin(monkeypatch, b"abc\xff")
    with pytest.raises(ValueError, match="stdin is not UTF-8 text .*0xff in position 3"):
        read_text(None)


def test_reading_prompts_from_a_closed_stdin_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ValueError, match="stdin is closed"):
        read_prompts(None)
