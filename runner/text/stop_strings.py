"""Stop strings: a generated text ends before the first of them."""

from collections.abc import Sequence

from eagle3.runner.text.checks import check_unicode, shown

REPLACEMENT = "\ufffd"
"""A decoder's output for invalid UTF-8, and for a character whose bytes are not all there yet."""


class StopStrings:
    """Searches a text for one or several stop strings.

    Raises ValueError for a string that is empty, is not Unicode text, or contains U+FFFD. That character may stand in
    an unfinished text and be replaced later.
    """

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
        """Return (index, stop string) of the first stop string in ``text``, None if there is none.

        Of several that begin at the same index, the shortest is returned.
        """
        return min(((text.find(string), string) for string in self._strings if string in text), default=None)

    def unfinished(self, text: str) -> int:
        """Return how many characters at the end of ``text`` could be the beginning of a stop string. ``text`` must not
        contain a whole stop string."""
        return max((_overlap(text, string) for string in self._strings), default=0)


class Reasoning:
    """Follows the reasoning at the beginning of a text, in which stop strings do not count.

    ``begin`` and ``end`` are its marks; ``begin`` is empty if the prompt has opened it. Line feeds after ``end`` belong
    to it.
    """

    def __init__(self, begin: str, end: str):
        self._begin, self._end = begin, end
        self._inside, self._ended = not begin, False
        self.over = False
        """True if the text after what ``passed`` returned is an answer."""

    def passed(self, text: str) -> int:
        """Return how many characters at the beginning of ``text`` belong to the reasoning. ``text`` is all certain text
        after the characters that earlier calls returned."""
        place = 0
        if self.over:
            return 0
        if not self._inside and not self._ended:
            begun = text.lstrip()
            if not begun.startswith(self._begin):
                self.over = not self._begin.startswith(begun)
                return 0
            place, self._inside = len(text) - len(begun) + len(self._begin), True
        if self._inside:
            found = text.find(self._end, place)
            if found < 0:
                return len(text) - _overlap(text[place:], self._end)
            place, self._inside, self._ended = found + len(self._end), False, True
        rest = text[place:].lstrip("\n")
        self.over = bool(rest)
        return len(text) - len(rest)


def _overlap(text: str, string: str) -> int:
    """Return the length of the longest proper prefix of ``string`` that ``text`` ends with."""
    for size in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:size]):
            return size
    return 0
