"""Text from outside, an argument, a file or stdin: UTF-8, or refused in a line."""

import codecs
import os
import sys
from pathlib import Path

LONGEST_VALUE = 60  # characters of a value in a message


def argument_text(argument: str) -> str:
    """An argument of a command line as the UTF-8 that it is, also where the locale's encoding could not decode it and
    Python kept its bytes as surrogates. Raises ValueError naming the byte that is not UTF-8, and its place."""
    try:
        if any("\ud800" <= character <= "\udfff" for character in argument):
            argument = os.fsencode(argument).decode("utf-8")
    except UnicodeError as error:
        raise ValueError(f"not UTF-8 text ({error}): type it in UTF-8") from error
    return argument


def read_text(file: Path | None) -> str:
    """A file's text, or stdin's (None), with ``\\n`` for every kind of line end. Raises ValueError as ``read_bytes``,
    and naming the byte that is not UTF-8."""
    try:
        text = read_bytes(file).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source_name(file)} is not UTF-8 text ({error})") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_bytes(file: Path | None) -> bytes:
    """A file's bytes, or stdin's (None), without the mark that some editors put before UTF-8. Raises ValueError for a
    stdin that is closed."""
    if file is None and sys.stdin is None:
        raise ValueError("stdin is closed: there is nothing to read from it")
    data = sys.stdin.buffer.read() if file is None else file.read_bytes()
    return data.removeprefix(codecs.BOM_UTF8)


def source_name(file: Path | None) -> str:
    """What a message calls it."""
    return "stdin" if file is None else str(file)


def shown(value: object) -> str:
    """A value as a message has it: its ``repr`` in one line, cut where it is long."""
    try:
        text = " ".join(repr(value).split())
    except (RecursionError, ValueError):  # nested too deeply; an integer of more digits than Python prints
        text = f"of type {type(value).__name__}"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def check_unicode(text: str, name: str) -> str:
    """``text`` itself. Raises ValueError, calling it ``name``, for half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not Unicode text ({error}): leave that character out") from error
    return text
