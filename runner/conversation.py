"""A dialogue with a model, whose turns stay in the KV cache."""

import weakref
from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import Any

from eagle3.runner.model import Model, Piece, Result, Stream


class Conversation:
    """``messages`` are what was said, as the chat template takes them. Each turn puts all of them into the template, so
    that a turn is what any server would compute; what the caches hold of it is not computed again."""

    def __init__(self, model: Model, system: str | None = None, **options: Any):
        """``options`` (``eagle3.runner.options``) are every turn's, unless it has its own."""
        self._model, self._options = model, options
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, Any]] = list(self._system)
        self.result: Result | None = None
        """Of the last turn; None where it ended before it began."""
        self._answering: weakref.ref[Generator] | None = None

    def say(self, text: str, **options: Any) -> Iterator[Piece]:
        """The answer as it comes.

        A loop over it that is left by ``break`` or an exception ends the answer: what was said so far is the answer.
        One that a variable holds ends when it is closed or let go of, and with the next ``say`` or ``reset``.

        Raises as ``Model.stream``; a turn that fails before it begins leaves the conversation as it was.
        """
        self._end_answer()
        self.result = None
        turn = {"role": "user", "content": text}
        stream = self._model.stream([*self.messages, turn], **self._options | options)
        answer = self._answer(turn, stream)
        self._answering = weakref.ref(answer)
        return answer

    def ask(self, text: str, **options: Any) -> Result:
        """``say`` to its end."""
        for _ in self.say(text, **options):
            pass
        assert self.result is not None  # the loop went to its end
        return self.result

    def reset(self) -> None:
        """Forget all but the system prompt."""
        self._end_answer()
        self.messages = list(self._system)

    def _end_answer(self) -> None:
        """Close the answer before, where it may still be asked for more."""
        answer = None if self._answering is None else self._answering()
        if answer is not None:
            with suppress(ValueError):  # "generator already executing", in another thread
                answer.close()

    def _answer(self, turn: dict[str, str], stream: Stream) -> Generator[Piece, None, None]:
        try:
            with stream:
                yield from stream
        finally:
            self.result = stream.result
            if self.result.token_ids:
                self.messages += [turn, {"role": "assistant", "content": self.result.text}]
