"""Checks text and token ids, and shortens values for messages."""

from collections.abc import Iterable

LONGEST_VALUE = 60  # characters of a value in a message


def shown(value: object) -> str:
    """Format a value for a message: its ``repr`` in one line, cut if it is long."""
    try:
        text = " ".join(repr(value).split())
    except (RecursionError, ValueError):  # a value nested too deeply, or an integer with more digits than Python prints
        text = f"of type {type(value).__name__}"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def check_unicode(text: str, name: str) -> str:
    """Return ``text``. Raises ValueError, which names it ``name``, for a lone surrogate, which no tokenizer accepts."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not Unicode text ({error}): leave that character out") from error
    return text


def check_ids(tokens: Iterable[int], vocab_size: int) -> None:
    """Raise ValueError, which names it, for a token id outside the vocabulary."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary 0..{vocab_size - 1}")
