"""Limits what the values of a request cost, wherever they stand, before it is validated, rendered or tokenized.

Limits that OpenAI publishes are used: 4 stop sequences, 128 tools, 128 choices, and for structured outputs 1,000 enum
values and 120,000 characters, with 15,000 for one list of enum values. The bounds of ``logit_bias`` and
``stop_token_ids`` are those of vLLM's sampler.
"""

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

from eagle3.runner.serve.errors import ContextLengthExceeded, Refused
from eagle3.runner.text.checks import check_unicode

MOST_BODY = 4 << 20
MOST_CHOICES, MOST_LOGPROBS = 128, 20
MOST_ENTRIES = {
    "stop": 4, "stop_sequences": 4, "stop_token_ids": 128, "logit_bias": 1024, "tools": 128, "metadata": 16,
    "include": 16,
}  # fmt: skip
MOST_STOP_CHARACTERS = 1000
MOST_ENUM_VALUES = 1000
MOST_STRING, MOST_CHARACTERS = 15_000, 120_000
MOST_DEPTH, MOST_NODES = 64, 20_000
MOST_DIGITS = 400
"""The most characters of a number; a double in full has 309 before its point."""
MOST_LEVELS = 100
MOST_VALUES, MOST_VALUES_A_TOKEN = 1 << 16, 4
"""The most values of a body: a constant, plus a number per token of the context, since a prompt may be a list of
ids."""

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
T = TypeVar("T")


def read_body(given: bytes, context: int) -> Any:  # noqa: ANN401 (JSON)
    """Return the JSON of a body. Raises ``Refused`` or ContextLengthExceeded for one that is beyond a limit or no
    Unicode text. ``context`` is the model's, in tokens; each message takes at least one."""
    read = _json(given, "the body", MOST_VALUES + MOST_VALUES_A_TOKEN * context)
    if isinstance(read, dict):
        if SURROGATE.search(given):
            _check_text(read)
        for name, value in read.items():
            _weigh(value, _shown(name))
        _check_fields(read, context)
    return read


def _json(given: bytes, name: str, most: int) -> Any:  # noqa: ANN401
    """Parse JSON whose numbers are limited. Raises ``Refused``.

    Commas and brackets bound the values, and are counted first: parsing a million values takes seconds in which no
    other thread runs.
    """
    values = sum(map(given.count, (b",", b"[", b"{")))
    if values > most:
        raise Refused(f"{name} has {values:,} commas and brackets, but at most {most:,} are read", status=413)
    try:
        return json.loads(given, parse_int=_short(int), parse_float=_short(float), parse_constant=_no)
    except (ValueError, RecursionError) as error:
        raise Refused(f"{name} is no JSON: {error}") from None


def _short(number: Callable[[str], T]) -> Callable[[str], T]:
    def parsed(text: str) -> T:
        if len(text) > MOST_DIGITS:
            raise Refused(f"the body has a number of {len(text):,} characters, but at most {MOST_DIGITS} are read")
        return number(text)

    return parsed


def _no(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _shown(name: str) -> str:
    return name if len(name) <= 60 else f"{name[:60]}..."


def _weigh(given: object, field: str) -> None:
    """Raise ``Refused`` for a value with too many levels or a name that is too long."""
    level = [given]
    for depth in range(MOST_LEVELS + 1):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += value.values()
                if any(len(name) > MOST_STRING for name in value):
                    raise Refused(f"{field} has a name of more than {MOST_STRING:,} characters", field)
            elif isinstance(value, list):
                inner += value
        level = [value for value in inner if isinstance(value, dict | list)]
        if not level:
            return
        _most(depth + 1, MOST_LEVELS, "{} levels", field)


def _check_fields(given: dict[str, Any], context: int) -> None:
    for name, most in MOST_ENTRIES.items():
        _check_count(given.get(name), most, name)
    for name in ("messages", "input"):
        _check_count(given.get(name), context, name)
    for name in ("stop", "stop_sequences"):
        stops = given.get(name)
        for stop in stops if isinstance(stops, list) else [stops]:
            if isinstance(stop, str):
                _most(len(stop), MOST_STOP_CHARACTERS, "a string of {} characters", name)
    _check_prompt(given.get("prompt"), context)
    for name in ("response_format", "structured_outputs", "text", "output_config"):
        _check_schema([given.get(name)], name)
    tools = given.get("tools")
    if isinstance(tools, list):  # what a tool says of itself is no part of a grammar
        bare = [{name: each[name] for name in each if name != "description"} for each in map(_function, tools)]
        _check_schema(bare, "tools")


def _function(tool: object) -> dict[str, Any]:
    """Return the part of a tool that describes its function: chat completions nest it, responses do not."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return function if isinstance(function, dict) else {}


def _check_count(value: object, most: int, name: str) -> None:
    if isinstance(value, list | dict) and len(value) > most:
        raise Refused(f"{name} has {len(value):,} entries, but at most {most:,} are taken", name)


def _check_text(given: dict[str, Any]) -> None:
    """Raise ``Refused``, with the place, if a body has a lone surrogate, which no tokenizer accepts."""
    stack: list[tuple[str, Any]] = [("", given)]
    while stack:
        place, value = stack.pop()
        if isinstance(value, str):
            try:
                check_unicode(value, place)
            except ValueError as error:
                raise Refused(str(error), place) from None
        elif isinstance(value, dict):
            stack += [(place or "a name", name) for name in value]
            stack += [(f"{place}.{_shown(name)}".lstrip("."), each) for name, each in value.items()]
        elif isinstance(value, list):
            stack += [(f"{place}.{number}", each) for number, each in enumerate(value)]


def _check_prompt(prompt: object, context: int) -> None:
    if not isinstance(prompt, list) or not prompt:
        return
    if not isinstance(prompt[0], str | list):
        if len(prompt) >= context:
            raise ContextLengthExceeded(len(prompt), context)
        return
    _check_count(prompt, MOST_CHOICES, "prompt")
    for each in prompt:
        if isinstance(each, list) and len(each) >= context:
            raise ContextLengthExceeded(len(each), context)


def _check_schema(given: list[Any], field: str) -> None:
    """Raise ``Refused`` for a schema or grammar beyond a limit on depth, number of parts, values to choose from,
    longest string or total characters. Every name and value counts, whatever it is called: what is prose in one place
    of a schema is a schema in another."""
    characters = nodes = values = 0
    stack: list[tuple[Any, int, str]] = [(given, -1, "")]
    while stack:
        value, depth, key = stack.pop()
        nodes += 1
        if isinstance(value, str) and key == "json":  # the schema is JSON text
            value = _json(value.encode(), field, MOST_NODES)
        if isinstance(value, str):
            characters += len(value)
            _most(len(value), MOST_STRING, "a string of {} characters", field)
        elif isinstance(value, dict):
            characters += sum(map(len, value))
            stack += [(each, depth + 1, name) for name, each in value.items()]
        elif isinstance(value, list):
            if key in ("enum", "choice"):
                values += len(value)
            stack += [(each, depth + 1, "") for each in value]
        _most(depth, MOST_DEPTH, "{} levels", field)
        _most(nodes, MOST_NODES, "{} parts", field)
        _most(values, MOST_ENUM_VALUES, "{} values to choose from", field)
        _most(characters, MOST_CHARACTERS, "{} characters", field)


def _most(found: int, most: int, what: str, field: str) -> None:
    if found > most:
        raise Refused(f"{field} has {what.format(f'{found:,} or more')}, but at most {most:,} are taken", field)
