"""Renders a model's chat template by ExecuTorch's server, or, for another ending of the prompt, by transformers.

Templates differ in the messages that they take. ``forms`` gives a conversation in the forms to try, the most faithful
first.
"""

import json
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from executorch.examples.llm_server.python.chat_template import ChatTemplate, _decode_tool_call_arguments
from executorch.examples.llm_server.python.protocol import ChatMessage

from eagle3.runner.serve.errors import Refused
from eagle3.runner.text.chat import role_in
from eagle3.runner.text.checks import check_unicode, shown

THOUGHT = ("reasoning_content", "reasoning", "thinking")
"""The fields of a message that hold the reasoning of an earlier turn, in clients and in chat templates."""
THOUGHT_PART = re.compile(r"""==\s*['"]thinking['"]""")
"""Templates with this take the reasoning as a part of the content (Magistral)."""
SYSTEM = ("system", "developer")


class Ending(NamedTuple):
    """The end of a prompt: the opening of the assistant's next turn, the end of an unfinished last message, or the end
    of a finished one."""

    opens_turn: bool = True
    continues: bool = False


OPENS_TURN = Ending()


class Message(ChatMessage):
    """A message with the reasoning of an earlier turn under any of the names in THOUGHT."""

    reasoning: str | None = None
    thinking: str | None = None


class Template(ChatTemplate):
    """ExecuTorch's chat template with more endings. Its ``render`` always adds the generation prompt; transformers
    renders the others."""

    def render_to(
        self, ending: Ending, messages: list[ChatMessage], tools: list | None, kwargs: dict[str, Any] | None
    ) -> str:
        """Return the conversation up to ``ending``."""
        if ending == OPENS_TURN:
            return self.render(messages, tools, kwargs)
        dumped = [message.model_dump(exclude_none=True) for message in messages]
        _decode_tool_call_arguments(dumped)
        return self._hf.apply_chat_template(
            dumped,
            tools=tools,
            tokenize=False,
            add_generation_prompt=ending.opens_turn,
            continue_final_message=ending.continues,
            **(kwargs or {}),
        )


def checked(messages: Sequence[ChatMessage], template: str) -> list[Message]:
    """Return messages with the roles and the fields of reasoning that ``template`` knows, and their parts as text
    parts. Raises ``Refused`` for parts of another kind, and for text that is not Unicode."""
    found = []
    for number, message in enumerate(messages):
        place, given = f"messages.{number}.content", message.model_dump()
        if isinstance(message.content, list):
            given["content"] = [_text_part(part, place) for part in message.content]
        thought = next((given[name] for name in THOUGHT if given.get(name)), None)
        known = thought_fields(template)
        given |= {name: thought if name in known else None for name in THOUGHT}
        if thought and message.role == "assistant" and THOUGHT_PART.search(template):
            parts = given["content"] if isinstance(given["content"], list) else [_part(given["content"] or "")]
            given["content"] = [{"type": "thinking", "thinking": thought}, *parts]
        for name, text in (("content", text_of(given["content"])), ("reasoning_content", thought or "")):
            try:
                check_unicode(text, f"messages.{number}.{name}")
            except ValueError as error:
                raise Refused(str(error), f"messages.{number}.{name}") from None
        found.append(Message.model_validate(given))
    begin = next((index for index, each in enumerate(found) if each.role not in SYSTEM), len(found))
    if begin > 1 and any(each.role == "developer" for each in found[:begin]):
        found[:begin] = [_one(found[:begin])]
    for message in found:
        message.role = role_in(template, message.role)
    return found


def thought_fields(template: str) -> list[str]:
    """Return the names in THOUGHT by which a chat template reads the reasoning of a message."""
    return [name for name in THOUGHT if re.search(rf"[.'\"]{name}\b", template)]


def text_of(content: str | list[dict[str, Any]] | None) -> str:
    """Return the text of a message's content. Parts are joined with line feeds."""
    return "\n".join(part["text"] for part in content if "text" in part) if isinstance(content, list) else content or ""


def _text_part(part: dict[str, Any], place: str) -> dict[str, str]:
    if part.get("type") not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
        raise Refused(f"{place} has a part of type {shown(part.get('type'))}: this model takes only text", place)
    return _part(part["text"])


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _one(messages: Sequence[Message]) -> Message:
    return Message(role="system", content="\n\n".join(text_of(each.content) for each in messages))


def forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the messages in the forms that templates need: parts of content as they are, or of the user's messages
    only; joined parts; text instead of a null content; no reasoning; arguments of tool calls as JSON text, which
    ``render`` would decode; one system message."""
    joined = [
        each.model_copy(update={"content": None if each.content is None else text_of(each.content)})
        for each in messages
    ]
    if any(isinstance(each.content, list) for each in messages):
        yield list(messages)
        yield [each if each.role == "user" else text for each, text in zip(messages, joined, strict=True)]
    yield joined
    full = [each.model_copy(update={"content": each.content or ""}) for each in joined]
    yield full
    bare = [each.model_copy(update=dict.fromkeys(THOUGHT)) for each in full]
    yield bare
    as_text = deepcopy(full)
    for message in as_text:
        for call in message.tool_calls or ():
            if isinstance(call.function.arguments, str):
                call.function.arguments = json.dumps(call.function.arguments)
    yield as_text
    if len(system := [each for each in full if each.role in SYSTEM]) > 1:
        yield [_one(system), *(each for each in full if each.role not in SYSTEM)]


def shows(rendered: str, messages: Sequence[Message]) -> bool:
    """Return True if the text of each part is in the rendered messages, and the parts are not written as lists."""
    lists = [each.content for each in messages if isinstance(each.content, list)]
    written = [text for each in lists for text in (str(each), json.dumps(each, ensure_ascii=False))]
    return not any(text in rendered for text in written) and all(
        part.get("text", "").strip() in rendered for each in lists for part in each
    )


def check_continued(message: ChatMessage) -> None:
    """Raise ``Refused`` for a message that cannot be the beginning of an answer."""
    reason = None
    if message.role != "assistant":
        reason = f"the last message has the role {shown(message.role)}: give the beginning of the assistant's answer"
    elif message.tool_calls:
        reason = "the last message has tool calls, after which no text can continue: give its beginning as content"
    elif not text_of(message.content):
        reason = "the last message has no content: leave continue_final_message out"
    if reason:
        raise Refused(f"continue_final_message continues an assistant's text, but {reason}", "continue_final_message")
