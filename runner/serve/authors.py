"""Who wrote which characters of an answer: the draft, whose proposals the target accepted, or the target itself."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from eagle3.runner.model import Model
from eagle3.runner.options import Options
from eagle3.runner.serve.engine import Delta
from eagle3.runner.serve.markup import FIELDS, Part
from eagle3.runner.text.text import TextStream


class Authors:
    """The authors of the tokens of one generation by these ``options``, target or draft. A character that several
    tokens spell belongs to the last of them."""

    def __init__(self, model: Model, options: dict[str, Any]):
        asked = Options.of(**options)
        self._stream = TextStream(model.text, (), asked.skip_special_tokens, asked.stop_ids(model.metadata))
        self._ends, self._drafted = [0], [False]  # of each token: where its text ends, and whether the draft wrote it

    def told(self, parts: Sequence[Part], delta: Delta | None) -> dict[str, Any]:
        """Return a chunk's report of its round: ``proposed`` and ``accepted``, and the tokens of each field of its
        delta under the field's name. ``delta`` None: the report of what was held back until the end."""
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
        """Return a part cut into its tokens; ``drafted`` is None where that is not known."""
        if part.start is None:
            return [{"text": part.text, "drafted": None}]
        found, place, end = [], part.start, part.start + len(part.text)
        while place < end:
            token = bisect_right(self._ends, place)
            last = token >= len(self._ends)  # bytes that never became a character
            until = end if last else min(end, self._ends[token])
            text = part.text[place - part.start : until - part.start]
            found.append({"text": text, "drafted": self._drafted[-1 if last else token]})
            place = until
        return found
