"""The output file of a batch: JSON lines that a later run of the same batch continues."""

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

from eagle3.runner.contract import Metadata
from eagle3.runner.options import Options
from eagle3.runner.text.checks import shown
from eagle3.runner.text.prompts import Prompt

BEGINNING = b'{"line": '
"""The first bytes of every result."""


@dataclass(frozen=True)
class Earlier:
    """The results that a file already holds.

    ``texts`` maps the line of a prompt to the text of each finished turn; a text is None if the artifact has no
    tokenizer. ``size`` is the number of bytes up to the end of the last complete result. ``ends_line``: these bytes end
    with a line end.
    """

    texts: dict[int, list[str | None]] = field(default_factory=dict)
    size: int = 0
    ends_line: bool = True


def request_digest(
    metadata: Metadata, prompt: Prompt, template: list[bool | str | None] | None, options: Options
) -> str:
    """Return 16 hexadecimal digits that identify all inputs of a prompt's results: its text, options and artifact.

    ``template`` describes how the text is put into the chat template. The chain length and the lookup are left out,
    because the tokens do not depend on them.
    """
    asked = asdict(prompt) | {"line": None, "id": None, "category": None, "options": None}
    given = {name: value for name, value in asdict(options).items() if name != "ngram"} | {"chain_len": None}
    record = json.dumps([asked, template, given, metadata.manifest], sort_keys=True)
    return hashlib.sha256(record.encode()).hexdigest()[:16]


def read_earlier(output: Path | None, digests: dict[int, str]) -> Earlier:
    """Read the results in ``output`` of a batch whose prompts have these ``digests`` by line.

    The result is empty if there is no such file. An incomplete last line of an interrupted run is left out. Raises
    ValueError with one line for a result of another batch, which would be lost or be mistaken for one of this batch.
    """
    if output is None or not output.is_file():
        return Earlier()
    data = output.read_bytes()
    lines = data.split(b"\n")
    if _is_incomplete(lines[-1]):
        lines[-1] = b""
    earlier = Earlier(size=sum(map(len, lines)) + len(lines) - 1, ends_line=not lines[-1])
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                _add(earlier.texts, json.loads(line), digests)
            except (ValueError, RecursionError) as error:
                reason = "it is not JSON" if isinstance(error, json.JSONDecodeError | RecursionError) else error
                raise ValueError(
                    f"{output} line {number} is no result of this batch ({reason}): give another --output, or remove "
                    "that file"
                ) from error
    return earlier


def _add(texts: dict[int, list[str | None]], record: object, digests: dict[int, str]) -> None:
    """Add a result to ``texts``. Raises ValueError, with the reason alone, if it is not a result of the batch."""
    if not isinstance(record, dict) or not all(type(record.get(name)) is int for name in ("line", "turn")):
        raise ValueError("it has no line and turn")
    line, turns = record["line"], texts.setdefault(record["line"], [])
    if line not in digests:
        raise ValueError(f"line {line} has no prompt that can be run")
    if record.get("request", digests[line]) != digests[line]:
        raise ValueError(f"the prompt of line {line}, its options or the artifact were different")
    if record["turn"] != len(turns):
        raise ValueError(f"turn {shown(record['turn'])} of line {line} follows {len(turns)} turns")
    if not isinstance(text := record.get("text"), str | None):
        raise ValueError(f"its text is {shown(text)}")
    turns.append(text)


def _is_incomplete(line: bytes) -> bool:
    """Return True if ``line`` is the beginning of a result but not a complete one."""
    if not (line.startswith(BEGINNING) or BEGINNING.startswith(line)):
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False


@contextmanager
def opened(output: Path | None, earlier: Earlier) -> Iterator[TextIO]:
    """Open ``output`` to append results, after cutting off an incomplete last line. None is stdout."""
    if output is None:
        yield sys.stdout
        return
    with output.open("a", encoding="utf-8") as file:
        if output.is_file():  # /dev/null and pipes cannot be truncated
            file.truncate(earlier.size)
            file.write("" if earlier.ends_line else "\n")
        yield file
