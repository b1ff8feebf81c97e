"""Strings that end a text where they complete in it."""

from collections.abc import Sequence

from eagle3.runner.console.text_input import check_unicode, shown

REPLACEMENT = "\ufffd"
"""What a decoder puts for bytes that are no character, and for those of one that is not whole yet."""


class StopStrings:
    """Of one string or several. Raises ValueError for one that is empty, no Unicode text, or has a U+FFFD, which a text
    shows in places where it does not stay."""

    def __init__(self, strings: Sequence[str]):
        self._strings = (strings,) if isinstance(strings, str) else tuple(strings)
        for string in self._strings:
            name = f"stop string {shown(string)}"
            if not isinstance(string, str):
                raise ValueError(f"{name} is no text")
            if not string:
                raise ValueError("a stop string is empty: it would end every text at once, leave it out")
            if REPLACEMENT in check_unicode(string, name):
                raise ValueError(f"{name} has a U+FFFD, which stands for bytes that are no character")

    def first(self, text: str) -> tuple[int, str] | None:
        """Where the stop string that begins first begins, and which it is (the shortest of those that begin there);
        None where ``text`` has none."""
        return min(((text.find(string), string) for string in self._strings if string in text), default=None)

    def unfinished(self, text: str) -> int:
        """How many of the last characters of ``text``, which has no stop string, could still become one."""
        return max((_overlap(text, string) for string in self._strings), default=0)


def _overlap(text: str, string: str) -> int:
    """The length of the longest end of ``text`` with which ``string`` begins."""
    for size in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:size]):
            return size
    return 0
