"""Attributes the characters of an answer to the draft, whose proposals the target accepted, or to the target itself."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from eagle3.runner.model import Model
from eagle3.runner.options import Options
from eagle3.runner.serve.engine import Delta
from eagle3.runner.serve.markup import FIELDS, Part
from eagle3.runner.text.text import TextStream


class Authors:
    """The author of each token of one generation with ``options``: draft or target. A character of several tokens
    belongs to the last of them."""

    def __init__(self, model: Model, options: dict[str, Any]):
        asked = Options.of(**options)
        self._stream = TextStream(model.text, (), asked.skip_special_tokens, asked.stop_ids(model.metadata))
        self._ends, self._drafted = [0], [False]  # for each token: the end of its text, and True if the draft wrote it

    def told(self, parts: Sequence[Part], delta: Delta | None) -> dict[str, Any]:
        """Return the report on a round for its chunk: ``proposed`` and ``accepted``, and under each field's name the
        tokens of that field of the delta. With ``delta`` None the report is on the text that was held back until the
        end."""
        said: dict[str, Any] = {}
        if delta is not None:
            said = {"proposed": delta.proposed, "accepted": delta.accepted}
            self._push(delta)
        for part in parts:
            said.setdefault(FIELDS[part.kind], []).extend(self._tokens(part))
        return said

    def _push(self, delta: Delta) -> None:
        for number, token in enumerate(delta.token_ids):
            self._ends.append(self._ends[-1] + len(self._stream.push([token])))
            self._drafted.append(number < delta.accepted)

    def _tokens(self, part: Part) -> list[dict[str, Any]]:
        """Return a part cut into its tokens; ``drafted`` is None if it is unknown."""
        if part.start is None:
            return [{"text": part.text, "drafted": None}]
        found, place, end = [], part.start, part.start + len(part.text)
        while place < end:
            token = bisect_right(self._ends, place)
            last = token >= len(self._ends)  # the last bytes never became a character
            until = end if last else min(end, self._ends[token])
            text = part.text[place - part.start : until - part.start]
            found.append({"text": text, "drafted": self._drafted[-1 if last else token]})
            place = until
        return found
