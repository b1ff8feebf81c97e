"""Reads tool calls in the markups of models. Each markup is an entry of DIALECTS.

ExecuTorch's and transformers' readers are used where they keep every argument as the model wrote it: ExecuTorch's for
Gemma 4, transformers' for LFM2. Two readers of this file serve the others: of JSON after a head, and of tagged text.
"""

import json
import re
from collections.abc import Callable, Mapping
from html import unescape
from typing import Any, NamedTuple

from executorch.examples.llm_server.python.tool_parsers import GemmaToolCallDetector
from transformers.utils.chat_parsing.content_parsers import parse_content

from eagle3.runner.text.checks import check_unicode

Schemas = Mapping[str, dict[str, Any]]
"""The schema of the parameters of each function."""
Found = tuple[list[tuple[Any, Any]], str]
"""The name and the arguments of each call, unchecked, and the text after the last call."""

KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
WORDS = {"True": "true", "False": "false", "None": "null"}
"""Maps the Python literals that some chat templates write for booleans and null to their JSON."""


class Dialect(NamedTuple):
    """A markup of tool calls. ``marks``: the texts with which a call may begin; ``template``: a regular expression that
    chat templates with this markup contain; ``read`` raises ValueError for text that is no call of this markup."""

    marks: tuple[str, ...]
    template: str
    read: Callable[[str, Schemas], Found]


def read_calls(dialect: str, text: str, schemas: Schemas) -> tuple[list[tuple[str, str]], str]:
    """Return the calls in ``text`` as names and JSON objects, and the text after the last. A text with a part that is
    no complete call of a function in ``schemas`` is returned whole, without calls."""
    try:
        found, rest = DIALECTS[dialect].read(text, schemas)
        calls = [(name, _object(arguments)) for name, arguments in found if schemas[name] is not None]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return [], text
    return (calls, rest.strip()) if calls else ([], text)


def _object(arguments: object) -> str:
    if isinstance(arguments, str):  # JSON within JSON
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict | None):
        raise ValueError("arguments that are no object")
    text = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
    try:
        return check_unicode(text, "a call")
    except ValueError:  # a lone surrogate, which JSON can escape
        return json.dumps(arguments, allow_nan=False)


def types_of(schema: object, root: dict[str, Any], seen: tuple[str, ...] = ()) -> set[str]:
    """Return the JSON types that a schema allows; an empty set if it does not limit them. References are looked up in
    ``root``."""
    if not isinstance(schema, dict):
        return set()
    place = schema.get("$ref")
    if isinstance(place, str) and place.startswith("#") and place not in seen:
        found: Any = root
        for name in place[1:].split("/")[1:]:
            found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        return types_of(found, root, (*seen, place))
    given = schema.get("type")
    types = {given} if isinstance(given, str) else set(given or ())
    values = [schema["const"]] if "const" in schema else schema.get("enum", ())
    types = types or {KINDS.get(type(value), "null") for value in values}
    for name in ("anyOf", "oneOf", "allOf"):
        each = [types_of(option, root, seen) for option in schema.get(name) or ()]
        if not types and (name == "allOf" or all(each)):
            types = set().union(*each)
    return types | {"null"} if types and schema.get("nullable") else types


def typed(text: str, types: set[str]) -> Any:  # noqa: ANN401 (JSON)
    """Return the value of an argument that the model wrote as bare text. It is JSON if its type is one of ``types``,
    otherwise the text. If a string is allowed, a number or a boolean stays text."""
    if types == {"string"}:
        return text
    try:
        value = json.loads(WORDS.get(text.strip(), text), parse_constant=_refuse)
    except ValueError:
        return text
    kind = KINDS.get(type(value), "null")
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    return value if fits and not ("string" in types and kind in ("integer", "number", "boolean")) else text


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _json(head: str, tail: str) -> Callable[[str, Schemas], Found]:
    """Return a reader of calls that are JSON between ``head`` and ``tail``. The function's name is the group ``name``
    of the head, or in the JSON, which may also be a list of calls."""
    before, after, decoder = re.compile(head), re.compile(tail), json.JSONDecoder(parse_constant=_refuse)

    def read(text: str, _schemas: Schemas) -> Found:
        found: list[tuple[Any, Any]] = []
        place = 0
        while match := before.match(text, place):
            value, place = decoder.raw_decode(text, match.end())
            if name := match.groupdict().get("name"):
                found.append((name, value))
            else:
                for call in value if isinstance(value, list) else [value]:
                    arguments = call.get("arguments")
                    found.append((call["name"], call.get("parameters") if arguments is None else arguments))
            end = after.match(text, place)
            if end is None:
                raise ValueError("text after the JSON of a call")
            place = end.end()
        return found, text[place:]

    return read


def _tagged(call: str, argument: str) -> Callable[[str, Schemas], Found]:
    """Return a reader of calls whose arguments are texts between tags. ``call`` has the groups ``name`` and ``body``,
    ``argument`` has ``key``, ``value`` and, if the markup gives it, ``type``."""
    calls, arguments = re.compile(call, re.DOTALL), re.compile(argument, re.DOTALL)

    def read(text: str, schemas: Schemas) -> Found:
        found, place = [], 0
        while match := calls.match(text, place):
            schema, given = schemas[match["name"]], {}
            for each in arguments.finditer(match["body"]):
                kind, key = each.groupdict().get("type"), each["key"]
                if kind:
                    given[unescape(key)] = typed(each["value"], {kind})
                else:
                    given[key] = typed(each["value"], types_of((schema.get("properties") or {}).get(key), schema))
            if arguments.sub("", match["body"]).strip():
                raise ValueError("text between arguments")
            found.append((match["name"], given))
            place = match.end()
        return found, text[place:]

    return read


def _gemma(text: str, schemas: Schemas) -> Found:
    """Read Gemma's calls. Its quotes tell strings from other values, so the detector is told only of plain strings."""
    told = {
        name: {
            "properties": {
                key: {"type": "string"}
                for key, each in (schema.get("properties") or {}).items()
                if types_of(each, schema) == {"string"}
            }
        }
        for name, schema in schemas.items()
    }
    calls = GemmaToolCallDetector().detect_and_parse(text, told).calls
    rest = text.rpartition("<tool_call|>")[2].removesuffix("<|tool_response>")
    return [(call.name, json.loads(call.arguments)) for call in calls], rest


LFM2_BLOCK = re.compile(r"\s*<\|tool_call_start\|>(.*?)<\|tool_call_end\|>", re.DOTALL)


def _lfm2(text: str, schemas: Schemas) -> Found:
    """Read LFM2's lists of calls, written as Python or as JSON."""
    found, place = list[tuple[Any, Any]](), 0
    while match := LFM2_BLOCK.match(text, place):
        body, place = match[1].strip(), match.end()
        if body.startswith(("{", "[{")):
            found += _json(r"(?=[\[{])", r"\s*\Z")(body, schemas)[0]
        else:
            found += [(call["name"], call["arguments"]) for call in parse_content(body, "python-call-list", {})]
    return found, text[place:]


DIALECTS = {
    "gemma": Dialect(("<|tool_call>",), re.escape("<|tool_call>"), _gemma),
    "gpt-oss": Dialect(
        ("<|channel|>commentary to=", "<|channel|>analysis to=", " to=functions."),
        re.escape("<|channel|>"),
        _json(
            r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)? to=(?:functions\.)?(?P<name>[\w.-]+)"
            r"(?:<\|channel\|>\w+)?\s*(?:(?:<\|constrain\|>)?\w+)?<\|message\|>",
            r"\s*(?:<\|call\|>|<\|end\|>|\Z)",
        ),
    ),
    "mistral": Dialect(
        ("[TOOL_CALLS]",),
        re.escape("[TOOL_CALLS]"),
        _json(
            r"\s*\[TOOL_CALLS\]\s*(?:(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)|(?=\[))",
            r"\s*(?=\[TOOL_CALLS\]|\Z)",
        ),
    ),
    "kimi": Dialect(
        ("<|tool_calls_section_begin|>",),
        re.escape("<|tool_calls_section_begin|>"),
        _json(
            r"\s*(?:<\|tool_calls_section_begin\|>)?\s*<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[\w.-]+)"
            r"(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*",
            r"\s*<\|tool_call_end\|>\s*(?:<\|tool_calls_section_end\|>)?",
        ),
    ),
    "kimi-k3": Dialect(
        ("<|open|>tools<|sep|>",),
        re.escape("<|open|>"),
        _tagged(
            r'(?:<\|open\|>tools<\|sep\|>)?<\|open\|>call tool="(?P<name>[^"]*)"[^<]*<\|sep\|>(?P<body>.*?)'
            r"<\|close\|>call<\|sep\|>(?:<\|close\|>tools<\|sep\|>(?:<\|close\|>message<\|sep\|>)?)?",
            r'<\|open\|>argument key="(?P<key>[^"]*)" type="(?P<type>\w+)"<\|sep\|>(?P<value>.*?)'
            r"<\|close\|>argument<\|sep\|>",
        ),
    ),
    "lfm2": Dialect(("<|tool_call_start|>",), r"<\|tool_(?:call|list)_start\|>", _lfm2),
    "qwen": Dialect(
        ("<tool_call>", "<function="),
        "<function=",
        _tagged(
            r"\s*(?:<tool_call>\s*)?<function=(?P<name>[^>\s]+)\s*>(?P<body>(?:\s*<parameter=.*?</parameter>)?)"
            r"\s*</function>\s*(?:</tool_call>|(?=<function=|\Z))",
            r"\s*<parameter=(?P<key>[^>]+)>\n?(?P<value>.*?)\n?</parameter>\s*(?=<parameter=|\Z)",
        ),
    ),
    "glm": Dialect(
        ("<tool_call>",),
        "<arg_key>",
        _tagged(
            r"\s*<tool_call>\s*(?P<name>[^\s<]+)(?P<body>(?:\s*<arg_key>.*?</arg_value>)?)\s*</tool_call>",
            r"\s*<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>\s*(?=<arg_key>|\Z)",
        ),
    ),
    "nemotron-2": Dialect(("<TOOLCALL>",), "<TOOLCALL>", _json(r"\s*<TOOLCALL>\s*", r"\s*(?:</TOOLCALL>|\Z)")),
    "hermes": Dialect(("<tool_call>",), "<tool_call>", _json(r"\s*<tool_call>\s*", r"\s*(?:</tool_call>|\Z)")),
    "llama": Dialect(
        ("<|python_tag|>", '{"name":', '{"type": "function",'),
        r'<\|python_tag\|>|"name": .{0,99}"parameters": ',
        _json(r"\s*(?:<\|python_tag\|>)?\s*(?=\{)", r"\s*(?:;|\Z|(?=\{))"),
    ),
}
"""The markups by name. The first whose ``template`` a chat template contains is its markup."""


def dialect_of(template: str) -> str | None:
    """Return the name in DIALECTS of the markup of calls in a chat template; None if none is known. A template without
    calls has none of its own, and the most common one is read."""
    found = next((name for name, each in DIALECTS.items() if re.search(each.template, template, re.DOTALL)), None)
    return found or (None if "tool_calls" in template else "hermes")
