"""Limits the size of a request before it is validated, rendered or tokenized.

Limits that OpenAI publishes are used: 4 stop sequences, 128 tools, 128 choices, and for structured outputs 1,000 enum
values and 120,000 characters, with 15,000 for one list of enum values. The bounds of ``logit_bias`` and
``stop_token_ids`` are those of vLLM's sampler.
"""

import json
from typing import Any

from eagle3.runner.serve.errors import ContextLengthExceeded, Refused
from eagle3.runner.text.checks import check_unicode

MOST_BODY = 4 << 20
MOST_CHOICES, MOST_LOGPROBS = 128, 20
MOST_ENTRIES = {"stop": 4, "stop_token_ids": 128, "logit_bias": 1024, "tools": 128}
MOST_STOP_CHARACTERS = 1000
MOST_ENUM_VALUES = 1000
MOST_STRING, MOST_CHARACTERS = 15_000, 120_000
MOST_DEPTH, MOST_NODES = 64, 20_000
MOST_VALUES, MOST_VALUES_A_TOKEN = 1 << 16, 4
"""The most values of a body: a constant, plus a number per token of the context, since a prompt may be a list of
ids."""

SCHEMAS = ("response_format", "structured_outputs", "text", "tools")
PROSE = frozenset(("description", "title", "$comment", "examples", "default"))
"""Keys of a schema that do not affect the grammar."""


def check_values(given: bytes, context: int) -> None:
    """Raise ``Refused`` for a body with too many commas and brackets, which bound its values. Parsing a million values
    takes seconds in which no other thread runs."""
    most = MOST_VALUES + MOST_VALUES_A_TOKEN * context
    values = sum(map(given.count, (b",", b"[", b"{")))
    if values > most:
        raise Refused(f"the body has {values:,} commas and brackets, but at most {most:,} are read", status=413)


def check_sizes(given: object, context: int) -> None:
    """Raise ``Refused`` or ContextLengthExceeded for a parsed JSON body that is beyond a limit or not Unicode text.
    ``context`` is the model's, in tokens; each message takes at least one."""
    if not isinstance(given, dict):
        return
    _check_text(given)
    for name, most in MOST_ENTRIES.items():
        _check_count(given.get(name), most, name)
    for name in ("messages", "input"):
        _check_count(given.get(name), context, name)
    stops = given.get("stop")
    for stop in [stops] if isinstance(stops, str) else stops or []:
        if isinstance(stop, str) and len(stop) > MOST_STOP_CHARACTERS:
            raise Refused(f"stop has a string of {len(stop):,} characters, at most {MOST_STOP_CHARACTERS} work", "stop")
    _check_prompt(given.get("prompt"), context)
    for name in SCHEMAS:
        if isinstance(value := given.get(name), dict | list):
            _check_schema(value, name)


def _check_count(value: object, most: int, name: str) -> None:
    if isinstance(value, list | dict) and len(value) > most:
        raise Refused(f"{name} has {len(value):,} entries, but at most {most:,} are taken", name)


def _check_text(given: dict[str, Any]) -> None:
    """Raise ``Refused``, with the place, if a body has a lone surrogate, which no tokenizer accepts."""
    try:
        json.dumps(given, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        pass
    else:
        return
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
            stack += [(f"{place}.{name}".lstrip("."), each) for name, each in value.items()]
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


def _check_schema(given: object, field: str) -> None:
    """Raise ``Refused`` for a schema beyond a limit on depth, number of parts, enum values, longest string or total
    characters."""
    characters = nodes = values = 0
    stack: list[tuple[Any, int, str]] = [(given, 0, "")]
    while stack:
        value, depth, key = stack.pop()
        nodes += 1
        if isinstance(value, str):
            if key == "json":  # the schema is JSON text
                value = _read(value)
            else:
                characters += len(value)
                _most(len(value), MOST_STRING, "a string of {} characters", field)
        if isinstance(value, dict):
            characters += sum(map(len, value))
            stack += [(each, depth + 1, name) for name, each in value.items() if name not in PROSE or key == PROPERTIES]
        elif isinstance(value, list):
            if key in ("enum", "choice"):
                values += len(value)
            stack += [(each, depth + 1, "") for each in value]
        _most(depth, MOST_DEPTH, "{} levels", field)
        _most(nodes, MOST_NODES, "{} parts", field)
        _most(values, MOST_ENUM_VALUES, "{} values to choose from", field)
        _most(characters, MOST_CHARACTERS, "{} characters", field)


PROPERTIES = "properties"


def _read(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None  # compiling reports the error


def _most(found: int, most: int, what: str, field: str) -> None:
    if found > most:
        raise Refused(f"{field} has {what.format(f'{found:,} or more')}, but at most {most:,} are taken", field)
