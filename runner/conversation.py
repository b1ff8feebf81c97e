"""A dialogue with a model, whose turns stay in the KV cache."""

from collections.abc import Iterator
from typing import Any

from eagle3.runner.model import Model, Piece, Result, Stream


class Conversation:
    """``messages`` are what was said, as the chat template takes them. Each turn puts all of them into the template, so
    that a turn is what any server would compute; what the caches hold of it is not computed again."""

    def __init__(self, model: Model, system: str | None = None, **options: Any):
        """``options`` (``eagle3.runner.options``) are every turn's, unless it has its own."""
        self._model, self._options = model, options
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._system)
        self.result: Result | None = None
        """Of the last turn; None where it ended before it began."""

    def say(self, text: str, **options: Any) -> Iterator[Piece]:
        """The answer as it comes; left early, what was said so far is the answer.

        Raises as ``Model.stream``; a turn that fails before it begins leaves the conversation as it was.
        """
        self.result = None
        turn = {"role": "user", "content": text}
        stream = self._model.stream([*self.messages, turn], **self._options | options)
        return self._answer(turn, stream)

    def ask(self, text: str, **options: Any) -> Result:
        """``say`` to its end."""
        for _ in self.say(text, **options):
            pass
        return self.result

    def reset(self) -> None:
        """Forget all but the system prompt."""
        self.messages = list(self._system)

    def _answer(self, turn: dict[str, str], stream: Stream) -> Iterator[Piece]:
        try:
            with stream:
                yield from stream
        finally:
            self.result = stream.result
            if self.result.token_ids:
                self.messages += [turn, {"role": "assistant", "content": self.result.text}]
