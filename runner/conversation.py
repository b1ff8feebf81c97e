"""A dialogue with a model; its turns stay in the KV cache."""

import weakref
from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import Any, Unpack

from eagle3.runner.model import Model, Piece, Result, Stream
from eagle3.runner.options import OptionFields


class Conversation:
    """A dialogue. ``messages`` holds all turns in the form that the chat template takes.

    Each turn puts all messages into the template, so it computes what any server would compute. Positions that the
    caches already hold are not computed again.
    """

    def __init__(self, model: Model, system: str | None = None, **options: Unpack[OptionFields]):
        """``options`` (``eagle3.runner.options``) apply to every turn that does not set its own."""
        self.model, self._options = model, options
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, Any]] = list(self._system)
        self.result: Result | None = None
        """The result of the last turn; None if that turn never started."""
        self._replying: weakref.ref[Generator] | None = None

    def say(self, text: str, **options: Unpack[OptionFields]) -> Iterator[Piece]:
        """Send ``text`` and yield the pieces of the reply while it is generated.

        Leaving the loop by ``break`` or an exception ends the reply; the conversation keeps what was generated so far.
        A generator that a variable holds ends when it is closed or deleted, or with the next ``say`` or ``reset``.

        Raises the errors of ``Model.stream``. A turn that fails before it starts leaves the conversation unchanged.
        """
        self._end_reply()
        self.result = None
        turn = {"role": "user", "content": text}
        stream = self.model.stream([*self.messages, turn], **self._options | options)
        reply = self._reply(turn, stream)
        self._replying = weakref.ref(reply)
        return reply

    def ask(self, text: str, **options: Unpack[OptionFields]) -> Result:
        """Send ``text`` and return the result of the complete reply."""
        for _ in self.say(text, **options):
            pass
        assert self.result is not None  # set, since the loop ran to its end
        return self.result

    def reset(self) -> None:
        """Forget all messages but the system prompt."""
        self._end_reply()
        self.messages = list(self._system)

    def _end_reply(self) -> None:
        """Close the generator of the previous reply, if it is still alive."""
        reply = None if self._replying is None else self._replying()
        if reply is not None:
            with suppress(ValueError):  # another thread is executing the generator
                reply.close()

    def _reply(self, turn: dict[str, str], stream: Stream) -> Generator[Piece, None, None]:
        try:
            with stream:
                yield from stream
        finally:
            self.result = stream.result
            if self.result.token_ids:
                self.messages += [turn, {"role": "assistant", "content": self.result.text}]
