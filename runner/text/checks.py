"""Checks text, and shortens values for messages."""

LONGEST_VALUE = 60  # characters of a value in a message


def shown(value: object) -> str:
    """Format a value for a message: its ``repr`` in one line, cut if it is long."""
    try:
        text = " ".join(repr(value).split())
    except (RecursionError, ValueError):  # a value nested too deeply, or an integer with more digits than Python prints
        text = f"of type {type(value).__name__}"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def is_unicode(text: str) -> bool:
    """Return False for a text with a lone surrogate."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def check_unicode(text: str, name: str) -> str:
    """Return ``text``. Raises ValueError, which names it ``name``, for a lone surrogate, which no tokenizer accepts."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not Unicode text ({error}): leave that character out") from error
    return text
