"""Renders messages and tools into a prompt with the model's chat template, and derives the grammar of the answer.
ExecuTorch's server renders the template."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

from executorch.examples.llm_server.python.protocol import ChatMessage
from transformers import PreTrainedTokenizerBase

from eagle3.runner.contract import Metadata
from eagle3.runner.serve.calls import DIALECTS, dialect_of
from eagle3.runner.serve.errors import Refused, line
from eagle3.runner.serve.limited import limited
from eagle3.runner.serve.markup import ReasoningMarks, Splitter, reasoning_marks
from eagle3.runner.serve.template import (
    OPENS_TURN,
    Ending,
    Template,
    check_continued,
    checked,
    forms,
    shows,
    text_of,
    thought_fields,
)
from eagle3.runner.text.checks import shown
from eagle3.runner.text.text import Text

TEMPLATE_SECONDS = 3.0
"""The seconds of processor time that a chat template has, since some are quadratic in the messages."""
AUTO, NONE, REQUIRED = "auto", "none", "required"
TAKEN_BY_NAME = frozenset(signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"kwargs"}
"""The names that rendering uses itself. A client's own template would be a program that runs on this server
(CVE-2025-61620)."""


@dataclass(frozen=True)
class Tools:
    """The functions of a request, and the choice among them.

    ``choice``: AUTO, NONE, REQUIRED or a function's name; ``schemas`` maps a function's name to the schema of its
    parameters.
    """

    choice: str = NONE
    schemas: dict[str, dict[str, Any]] = field(default_factory=dict)
    parallel: bool = True

    @property
    def forced(self) -> bool:
        return self.choice not in (AUTO, NONE)

    def grammar(self) -> dict[str, Any]:
        """Return the JSON schema of a forced call: a named function's parameters, or a list of calls."""
        if self.choice in self.schemas:
            return self.schemas[self.choice]
        places = {name: f"#/$defs/{number}" for number, name in enumerate(self.schemas)}
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": {"$ref": place}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for name, place in places.items()
        ]
        most = {} if self.parallel else {"maxItems": 1}
        schemas = {str(number): moved(self.schemas[name], place) for number, (name, place) in enumerate(places.items())}
        items = calls[0] if len(calls) == 1 else {"anyOf": calls}
        return {"type": "array", "minItems": 1, **most, "items": items, "$defs": schemas}


def moved(schema: Any, place: str) -> Any:  # noqa: ANN401 (JSON)
    """Return a JSON schema for insertion into another one at ``place`` (``#/$defs/0``), with its references to its own
    parts adapted."""
    if isinstance(schema, list):
        return [moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: place + value[1:] if name == "$ref" and str(value).startswith("#") else moved(value, place)
        for name, value in schema.items()
    }


@dataclass(frozen=True)
class Turn:
    """A prompt, the options of its generation, and the marks by which its answer is read."""

    prompt: list[int]
    options: dict[str, Any]
    tools: Tools
    marks: ReasoningMarks | None
    reasoning: bool
    """True if the prompt has opened the reasoning."""
    tool_marks: tuple[str, ...]
    specials: tuple[str, ...]
    form: str = "structured_outputs"
    """The field of the request that gives the grammar of the answer."""

    def splitter(self) -> Splitter:
        return Splitter(self.marks, self.reasoning, self.tool_marks, self.specials)


class Dialogue:
    """Renders conversations for one model, by its chat template."""

    def __init__(self, text: Text, metadata: Metadata, folder: Path, parser: str = AUTO):
        """``parser``: a name in DIALECTS, or AUTO for the one that the chat template calls for."""
        self._text, self._metadata, self._added = text, metadata, set(text.tokenizer.get_vocab(with_added_tokens=True))
        self._reason, self.unread = "", list[str]()
        try:
            self._template: Any = Template(str(folder))  # None if no template works; ``turn`` then raises
        except Exception as error:  # the libraries raise many types for unknown files
            self._template, self._reason = None, " ".join(str(error).split())
            return
        source = self._template.chat_template_str()
        self._source = source = source if isinstance(source, str) else json.dumps(source)
        self._marks = reasoning_marks(source)
        self.dialect = dialect_of(source) if parser == AUTO else parser
        """The name of the markup of tool calls, None if nothing here reads it."""
        if self._marks is None and thought_fields(source):
            self.unread.append("reasoning")
        if self.dialect is None:
            self.unread.append("tool calls")
        self._tool_marks = DIALECTS[self.dialect].marks if self.dialect else ()
        shown_marks = "".join((*self._tool_marks, *(self._marks.shown if self._marks else ())))
        specials = {*self._template.special_tokens(), *text.special}
        self._specials = tuple(sorted(each for each in specials if each not in shown_marks))
        ends = self._template.turn_stop_sequences()
        tokens = [text.tokenizer.token_to_id(each) for each in ends if each not in shown_marks]
        self._end_ids = [token for token in tokens if token is not None and token not in metadata.eos_ids]

    def turn(
        self,
        messages: Sequence[ChatMessage],
        options: dict[str, Any],
        given_tools: list[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        parallel: bool | None = None,
        response_format: dict[str, Any] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        ending: Ending = OPENS_TURN,
    ) -> Turn:
        """Return the prompt of the next answer. Raises ``Refused`` if the template, the tools or the response format is
        invalid."""
        if self._template is None:
            raise Refused(
                f"this model has no chat template that works, use /v1/completions: {self._reason}", "messages"
            )
        for name in template_kwargs or {}:
            if name in TAKEN_BY_NAME:
                raise Refused(f"chat_template_kwargs may not have {name}: leave it out", "chat_template_kwargs")
        tools = read_tools(given_tools, tool_choice, parallel)
        rendered = self._render(messages, given_tools if tools.choice != NONE else None, template_kwargs, ending)
        self.check_length(rendered)
        prompt = self._text.tokenizer.encode(rendered, add_special_tokens=False).ids
        marks = self._marks
        opened = marks is not None and rendered.rstrip().endswith(marks.begin.rstrip())
        closed = marks is not None and rendered.rstrip().endswith((marks.end, marks.opener or marks.end))
        if marks is not None and ending.continues:
            begun = text_of(messages[-1].content)
            opened = begun.rfind(marks.begin.strip()) > begun.rfind(marks.end.strip())
            closed = not opened
        options = dict(options)
        if self._end_ids:
            options["stop_token_ids"] = [*options.get("stop_token_ids", ()), *self._end_ids]
        asked = constraint(response_format, options.pop("structured_outputs", None), tools)
        free = asked is None or marks is None or not marks.frame  # constrained text has no frame
        if marks is not None and free and not closed and options.get("stop"):  # stop strings are of the answer
            options["reasoning"] = ("" if opened or marks.frame else marks.begin, marks.opener or marks.end)
        if asked is not None:
            options["structured_outputs"] = asked | ({} if closed else self._free_reasoning(opened))
        tool_marks = self._tool_marks if tools.choice == AUTO else ()
        specials: tuple[str, ...] = ()
        if self._marks or tool_marks:
            options["skip_special_tokens"], specials = False, self._specials
        elif self.unread and (tools.choice == AUTO or "reasoning" in self.unread):  # text in unread markup stays whole
            options["skip_special_tokens"] = False
        form = "tools" if tools.forced else "response_format" if response_format else "structured_outputs"
        return Turn(prompt, options, tools, self._marks, opened, tool_marks, specials, form)

    def _free_reasoning(self, opened: bool) -> dict[str, str]:
        """Return the options that allow reasoning before constrained text, if its marks are single tokens."""
        marks = self._marks
        if marks is None or not {marks.begin_token, marks.end_token} <= self._added:
            return {}
        return {"reasoning_end": marks.end_token} | ({} if opened else {"reasoning_begin": marks.begin_token})

    def _render(
        self,
        messages: Sequence[ChatMessage],
        tools: list | None,
        kwargs: dict[str, Any] | None,
        ending: Ending = OPENS_TURN,
    ) -> str:
        if not messages:
            raise Refused("messages must be a list of one or more", "messages")
        if ending.continues:
            check_continued(messages[-1])
        told = checked(messages, self._source)
        self.check_length("\n".join(text_of(message.content) for message in told))
        failed: Exception | None = None
        with limited(TEMPLATE_SECONDS):
            for form in forms(told):
                try:
                    rendered = self._template.render_to(ending, form, tools, kwargs)
                except Exception as error:  # a template is a program and may raise anything
                    failed = error  # the last form has the fewest parts that a template may not know
                    continue
                if shows(rendered, form):
                    return rendered
        assert failed is not None
        reason = line(failed) or type(failed).__name__
        raise Refused(f"the chat template does not take these messages: {reason}", "messages") from None

    def check_length(self, text: str) -> None:
        """Refuse a text that cannot fit into the context, without tokenizing all of it."""
        try:
            self._text.check_length(text, self._metadata.max_seq_len)
        except ValueError as error:
            raise Refused(str(error), code="context_length_exceeded") from None


def read_tools(given: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None, parallel: bool | None) -> Tools:
    """Return a request's tools. Raises ``Refused`` if they are invalid."""
    schemas: dict[str, dict[str, Any]] = {}
    for number, tool in enumerate(given or []):
        kind, function = tool.get("type"), tool.get("function") or {}
        name = _name_of(function) if kind == "function" else None
        if name is None:
            raise Refused(
                f"tools.{number} must be a function with a name, but has the type {shown(kind)}: leave it out", "tools"
            )
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(parameters, dict):
            raise Refused(f"tools.{number}.function.parameters must be a JSON schema", "tools")
        schemas[name] = parameters
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, schemas = _allowed(choice.get("allowed_tools", choice), schemas)
    if isinstance(choice, dict):
        name = _name_of(choice)
        if name not in schemas:
            raise Refused(f"tool_choice names {shown(name)}, which is none of the tools", "tool_choice")
        return Tools(name, schemas, parallel is not False)
    if choice not in (None, AUTO, NONE, REQUIRED):
        raise Refused(f"tool_choice is {shown(choice)}, but must be auto, none, required or a function", "tool_choice")
    if choice == REQUIRED and not schemas:
        raise Refused("tool_choice is required, and there are no tools", "tool_choice")
    return Tools((choice or AUTO) if schemas else NONE, schemas, parallel is not False)


def _allowed(given: object, schemas: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the mode of OpenAI's ``allowed_tools``, and the schemas of its functions."""
    mode = given.get("mode") if isinstance(given, dict) else None
    tools = given.get("tools") if isinstance(given, dict) else None
    names = [_name_of(tool) for tool in tools] if isinstance(tools, list) else []
    if mode not in (AUTO, REQUIRED) or not names or not all(name in schemas for name in names):
        raise Refused(
            f"allowed_tools must have the mode auto or required and name some of the tools, found {shown(names)}",
            "tool_choice",
        )
    return str(mode), {str(name): schemas[str(name)] for name in names}


def _name_of(tool: object) -> str | None:
    """Return the name of a function, which chat completions nest and responses do not."""
    named = tool.get("function", tool) if isinstance(tool, dict) else None
    name = named.get("name") if isinstance(named, dict) else None
    return name if isinstance(name, str) else None


def constraint(
    response_format: dict[str, Any] | None, asked: dict[str, Any] | None, tools: Tools
) -> dict[str, Any] | None:
    """Return the ``structured_outputs`` of a request, None for free text. Raises ``Refused`` for an unknown format and
    for two formats."""
    formatted = _of_format(response_format)
    if tools.forced:  # the answer has no text that could have a format
        formatted = {"json": tools.grammar()}
    found = [each for each in (formatted, asked) if each is not None]
    if found and tools.choice == AUTO:
        raise Refused(
            "response_format and tools that may be called do not go together: give tool_choice none or required",
            "response_format",
        )
    if len(found) > 1:
        raise Refused("structured_outputs and response_format or a forced tool_choice: give one of them")
    return found[0] if found else None


def _of_format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    kind = None if given is None else given.get("type")
    if given is None or kind == "text":
        return None
    described = given.get("json_schema", given)  # chat completions nest the schema, responses do not
    schema = described.get("schema", described.get("value")) if isinstance(described, dict) else None
    if kind == "json_object" and schema is None:  # llama-server and TGI may give it a schema or a value
        return {"json_object": True}
    if kind in ("json_object", "json_schema"):
        if not isinstance(schema, dict | bool):
            raise Refused("response_format.json_schema.schema must be a JSON schema", "response_format")
        return {"json": schema}
    if kind == "grammar" and isinstance(given.get("grammar"), str):
        return {"grammar": given["grammar"]}
    raise Refused(
        f"response_format.type is {shown(kind)}, but must be text, json_object or json_schema", "response_format"
    )
