"""Reads files of prompts, one JSON object per line, in our own format or those of MT-Bench, SpecBench, GSM8K and
HumanEval."""

import hashlib
import json
import struct
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3.runner.system.text_input import read_bytes, source_name
from eagle3.runner.text.chat import Message, check_messages
from eagle3.runner.text.checks import check_unicode, shown

FIELDS = {
    # our own format, and HumanEval's
    "prompt": ("id", "category", "task_id", "canonical_solution", "test", "entry_point"),
    "prompt_tokens": ("id", "category"),
    "messages": ("id", "category"),
    "turns": ("id", "category", "question_id", "reference"),  # MT-Bench and SpecBench
    "question": ("id", "category", "answer"),  # GSM8K
}
"""Maps the field that holds a prompt to the other fields that may accompany it."""

TYPES = {str: "text", int: "a whole number", list: "a list"}

IDS = ("id", "question_id", "task_id")

OPTIONS = (
    "max_new_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "structured_outputs",
)
"""Fields that may accompany any prompt, as options of its own generation."""


@dataclass(frozen=True)
class Prompt:
    """A prompt of a file: one of ``text``, ``tokens`` and ``messages``.

    ``further_turns`` are the user's later turns, each sent after the answer to the one before. ``options`` maps names
    in OPTIONS to the values as they were read.
    """

    line: int
    text: str | None = None
    tokens: list[int] | None = None
    messages: list[Message] | None = None
    further_turns: tuple[str, ...] = ()
    category: str | None = None
    id: str | int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def own_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return ``options``, those of all prompts, overridden by the prompt's own.

        A seed for all prompts is mixed with the line's number. Otherwise tokens at the same position of different
        prompts would be drawn by the same noise. The prompt's own seed is used unchanged.
        """
        merged = options | self.options
        if self.options.get("seed") is None and options.get("seed") is not None:
            merged["seed"] = mixed_seed(options["seed"], self.line)
        return merged

    @property
    def first_turn(self) -> str | list[int] | list[Message]:
        """The first turn, in the form that ``Model.encode`` and ``Model.stream`` accept."""
        return next(given for given in (self.text, self.tokens, self.messages) if given is not None)


@dataclass(frozen=True)
class Fault:
    """The reason why a line cannot be run."""

    line: int
    reason: str


def mixed_seed(seed: int, line: int) -> int:
    """Return the seed of the prompt on ``line`` (from 1), 63 bits of a hash of the line and of ``seed``, the file's
    seed."""
    return int.from_bytes(hashlib.shake_128(b"line" + struct.pack("<QQ", seed, line)).digest(8), "little") >> 1


def read_prompts(file: Path | None) -> list[Prompt]:
    """Return the prompts of a JSONL file, or of stdin (None), in their order; blank lines are skipped.

    Raises ValueError for a file without prompts, and, with its number, for the first line that is no prompt.
    """
    prompts = []
    for each in read_lines(file):
        if isinstance(each, Fault):
            raise ValueError(f"{source_name(file)} line {each.line}: {each.reason}")
        prompts.append(each)
    return prompts


def read_lines(file: Path | None) -> list[Prompt | Fault]:
    """Read prompts as ``read_prompts`` does, with a ``Fault`` for each line that is no prompt."""
    found: list[Prompt | Fault] = []
    for number, line in enumerate(read_bytes(file).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            found.append(_prompt(number, _entry(line)))
        except ValueError as error:
            found.append(Fault(number, str(error)))
    if not found:
        raise ValueError(f'{source_name(file)} has no prompts: give a line {{"prompt": "text"}} for each')
    return found


def _entry(line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line.decode("utf-8"), object_pairs_hook=_once)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text ({error})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f'not JSON ({error.msg} at column {error.colno}), expected {{"prompt": "text"}}') from error
    except RecursionError as error:
        raise ValueError("not JSON that can be read: nested too deeply") from error
    if not isinstance(entry, dict):
        raise ValueError(f'no JSON object, expected {{"prompt": "text"}}, found {shown(entry)}')
    return entry


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of a JSON object. Raises ValueError for a repeated field, of which Python would take the
    last."""
    entry = dict(pairs)
    if len(entry) != len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the field {shown(name)} occurs twice")
    return entry


def _prompt(line: int, entry: dict[str, Any]) -> Prompt:
    kind = _one_of(tuple(FIELDS), entry)
    if kind is None:
        found = ", ".join(map(shown, entry)) or "no field"
        raise ValueError(f"no prompt: one of {', '.join(FIELDS)} is needed, found {found}")
    known = (*FIELDS[kind], *OPTIONS)
    for name in entry:
        if name not in (kind, *known):
            raise ValueError(f"unknown field {shown(name)}: known beside {kind} are {', '.join(known)}")
    return Prompt(
        line,
        **_given(kind, entry[kind]),
        category=_optional(entry, "category", (str,)),
        id=_optional(entry, _one_of(IDS, entry), (str, int)),
        options={name: value for name, value in entry.items() if name in OPTIONS},
    )


def _given(kind: str, value: object) -> dict[str, Any]:
    """Return a prompt's own field as fields of ``Prompt``."""
    if kind == "messages":
        return {"messages": check_messages(value)}
    if kind == "prompt_tokens":
        return {"tokens": _items(kind, value, int)}
    turns = _items(kind, value, str) if kind == "turns" else [_typed(kind, value, (str,))]
    for turn in turns:
        if not check_unicode(turn, kind):
            raise ValueError(f"{kind} is empty: give some text")
    return {"text": turns[0], "further_turns": tuple(turns[1:])}


def _items(name: str, value: object, item: type) -> list[Any]:
    """Return ``value``, a list with at least one item, all of type ``item``. Raises ValueError for anything else."""
    elements = _typed(name, value, (list,))
    if not elements:
        raise ValueError(f"{name} is empty: give at least one")
    return [_typed(f"{name}[{index}]", element, (item,)) for index, element in enumerate(elements)]


def _typed(name: str, value: object, types: tuple[type, ...]) -> Any:  # noqa: ANN401 - one of ``types``
    if type(value) not in types:  # not isinstance: a bool would be an int
        raise ValueError(f"{name} is {shown(value)}, but must be {' or '.join(TYPES[kind] for kind in types)}")
    return value


def _optional(entry: dict[str, Any], name: str | None, types: tuple[type, ...]) -> Any:  # noqa: ANN401 - as above
    """Return the value of a field, None if there is no such field or it is null."""
    return None if name is None or entry.get(name) is None else _typed(name, entry[name], types)


def _one_of(names: tuple[str, ...], entry: dict[str, Any]) -> str | None:
    """Return the one of ``names`` that ``entry`` has, or None. Raises ValueError for two."""
    found = [name for name in names if name in entry]
    if len(found) > 1:
        raise ValueError(f"{' and '.join(found)} mean the same: leave all but one out")
    return found[0] if found else None
