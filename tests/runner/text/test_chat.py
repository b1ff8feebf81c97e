"""Conversations are rendered in a model's own template; invalid ones, and those that the template rejects, are refused
in one line."""

import json
import shutil

import pytest

from eagle3.runner.conversation import Conversation
from eagle3.runner.loop.generation import complete
from eagle3.runner.loop.results import STOP
from eagle3.runner.model import Model
from eagle3.runner.text.text import Text
from eagle3.targets import TARGETS

CHECKPOINT = TARGETS["gemma4-tiny"].checkpoint
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Open a file.\nRead it."},
    {"role": "assistant", "content": '("opened")\n'},
    {"role": "user", "content": "Close it."},
]


@pytest.fixture(scope="module")
def text():
    return Text(CHECKPOINT)


@pytest.fixture
def with_template(tmp_path):
    """A function that returns the shipped tokenizer with a given template, or without one."""

    def make(template: str | None) -> Text:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(CHECKPOINT / name, tmp_path / name)
        if template is not None:
            (tmp_path / "chat_template.jinja").write_text(template)
        return Text(tmp_path)

    return make


def test_the_shipped_template_renders_scripts_that_end_like_files(text):
    ids = text.encode_messages(TURNS)
    assert (ids[0], ids.count(2), ids.count(1)) == (2, 1, 1)
    assert text.tokenizer.decode(ids, skip_special_tokens=False) == (
        "<bos>#! /usr/bin/env python3\n# Be brief.\n#\n# Open a file.\n# Read it.\n\n"
        "if __name__ == '__main__':\n    print(\"opened\")\n<eos>"
        "#! /usr/bin/env python3\n# Close it.\n\nif __name__ == '__main__':\n    print"
    )


@pytest.mark.parametrize(("template", "role"), [("", "system"), ("{# developer #}", "developer")])
def test_a_developer_message_becomes_a_system_message_if_the_template_lacks_that_role(with_template, template, role):
    text = with_template(template + "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}")
    asked = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "x"}]
    ids = text.encode_messages(asked)
    assert text.decode(ids) == f"{role}:Be brief.;user:x;" and asked[0]["role"] == "developer"


def test_the_next_turn_continues_the_tokens_of_the_answer(text):
    answer = text.tokenizer.encode('("opened")\n<eos>', add_special_tokens=False).ids
    before = text.encode_messages(TURNS[:2]) + answer
    assert text.encode_messages(TURNS)[: len(before)] == before


def test_an_answer_of_the_shipped_model_ends_with_an_end_token(artifact, session):
    text = Text(artifact)  # the template is one of the artifact's files
    answered = complete(session, text.encode_messages([{"role": "user", "content": "Open a file and read its lines."}]))
    assert answered.finish_reason == STOP
    assert text.decode(answered.token_ids).startswith('("Can\'t read from a file")')


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "one or more"),
        ("hello", "one or more, found 'hello'"),
        (["hello"], "message 1 must have role and content .*found 'hello'"),
        ([TURNS[0], {"role": "user"}], "message 2 must have role and content"),
        ([{**TURNS[1], "name": "x"}], "message 1 must have role and content and nothing else"),
        ([{"role": "usr", "content": "x"}], "message 1 has the role 'usr', but roles are system, developer, user"),
        ([{"role": [], "content": "x"}], "message 1 has the role"),
        ([TURNS[0], {"role": "user", "content": None}], "message 2 has the content None"),
        ([{"role": "user", "content": "a\udc00"}], "the content of message 1 is not Unicode text"),
        ([{"role": "tool", "content": "x"}], "roles are system, user and assistant, not tool"),
        ([TURNS[1], TURNS[0]], "the system message must be the first"),
    ],
)
def test_messages_that_are_no_conversation_are_refused(text, messages, words):
    with pytest.raises(ValueError, match=words) as failure:
        text.encode_messages(messages)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "has no chat template: give a plain prompt"),
        ("{{ raise_exception('not today') }}", "not today"),
        ("{{ messages[3].role.name }}", "no element 3"),
        ("{{ 'x' + 3 }}", "does not take these messages: can only concatenate"),
        ("{% for %}", "does not take these messages: "),
    ],
)
def test_a_missing_or_failing_chat_template_is_refused(with_template, template, words):
    with pytest.raises(ValueError, match=words) as failure:
        with_template(template).encode_messages([{"role": "user", "content": "x"}])
    assert "\n" not in str(failure.value)


def test_a_tokenizer_that_transformers_does_not_load_is_refused(with_template):
    text = with_template("{{ bos_token }}")
    (text.folder / "tokenizer_config.json").write_text("not json")
    with pytest.raises(ValueError, match="does not load for its chat template") as failure:
        text.encode_messages([{"role": "user", "content": "x"}])
    assert "\n" not in str(failure.value)


def test_an_answer_ends_at_the_tokenizers_end_token_that_config_json_lacks(session, with_template, artifact):
    asked = [TURNS[1]]
    whole = Model(session.metadata, lambda: session, artifact).generate(asked, max_new_tokens=12).token_ids
    text = with_template((artifact / "chat_template.jinja").read_text())
    end = whole[5]
    assert end not in (*session.metadata.eos_ids, *whole[:5])
    file = text.folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"eos_token": text.tokenizer.id_to_token(end)}))
    other = Model(session.metadata, lambda: session, text.folder)
    result = other.generate(asked, max_new_tokens=12)
    assert (result.token_ids, result.finish_reason, result.stop_reason) == (whole[:6], STOP, end)
    assert Conversation(other, max_new_tokens=12).ask(TURNS[1]["content"]).token_ids == whole[:6]
    assert other.generate(asked, max_new_tokens=12, ignore_eos=True).token_ids == whole
    assert other.generate(result.prompt_token_ids, max_new_tokens=12).token_ids == whole
