"""Reads text from an argument, a file or stdin. Text that is not UTF-8 is refused with one line."""

import codecs
import os
import sys
from pathlib import Path


def argument_text(argument: str) -> str:
    """Return a command-line argument decoded as UTF-8, even if the locale's encoding could not decode it and Python
    kept its bytes as surrogates. Raises ValueError, which names the byte that is not UTF-8 and its place."""
    try:
        if any("\ud800" <= character <= "\udfff" for character in argument):
            argument = os.fsencode(argument).decode("utf-8")
    except UnicodeError as error:
        raise ValueError(f"not UTF-8 text ({error}): type it in UTF-8") from error
    return argument


def read_text(file: Path | None) -> str:
    """Return the text of a file, or of stdin (None), with ``\\n`` for every kind of line end.

    Raises the errors of ``read_bytes``, and ValueError with the place of a byte that is not UTF-8.
    """
    try:
        text = read_bytes(file).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source_name(file)} is not UTF-8 text ({error})") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_bytes(file: Path | None) -> bytes:
    """Return the bytes of a file, or of stdin (None), without a UTF-8 byte order mark. Raises ValueError if stdin is
    closed."""
    if file is None and sys.stdin is None:
        raise ValueError("stdin is closed: there is nothing to read from it")
    data = sys.stdin.buffer.read() if file is None else file.read_bytes()
    return data.removeprefix(codecs.BOM_UTF8)


def source_name(file: Path | None) -> str:
    """Return the name of a source for messages: the file, or stdin (None)."""
    return "stdin" if file is None else str(file)
