"""A dialogue with a model; its turns stay in the KV cache."""

import json
import weakref
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Unpack

from eagle3.runner.model import Model, Piece, Result, Stream
from eagle3.runner.options import OptionFields
from eagle3.runner.session_file import Saved
from eagle3.runner.text.chat import check_messages


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

    def save(self, path: str | Path) -> Saved:
        """Write the messages and the state of the caches into a file, for ``resume``. Raises the errors of
        ``Model.save``."""
        self._end_reply()
        return self.model.save(path, json.dumps(self.messages, ensure_ascii=False))

    def resume(self, path: str | Path) -> Saved:
        """Take up the conversation that ``save`` wrote in place of this one. The options stay those of this one.

        Raises the errors of ``Model.resume``, and ValueError for a file without messages or with another system prompt
        than this conversation's; the conversation is then unchanged.
        """
        self._end_reply()
        saved = self.model.resume(path)
        try:
            self.messages, self._system = _messages_in(saved.note, path, self._system)
        except ValueError:
            self.model.forget()
            raise
        return saved

    def add(self, text: str, result: Result) -> None:
        """Append a turn: what the user said, and the answer, unless it is empty."""
        self.result = result
        if result.token_ids:
            self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": result.text}]

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
            self.add(turn["content"], stream.result)


def _messages_in(
    note: str, path: str | Path, system: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the messages in the note of a file, and the system prompt among them, as a list of one or none."""
    try:
        messages = check_messages(json.loads(note))
    except ValueError as error:
        raise ValueError(f"{path} holds no messages: Model.resume takes it up, or give another file") from error
    found = [message for message in messages[:1] if message["role"] == "system"]
    if system and found != system:
        raise ValueError(f"{path} has another system prompt: leave yours out, or give another file")
    return messages, found
