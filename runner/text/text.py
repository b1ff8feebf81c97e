"""Text at the edge: the artifact's tokenizer, and nothing of it further in."""

import re
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path

from eagle3.runner.text.chat import ChatTemplate, Message
from eagle3.runner.text.checks import check_unicode
from eagle3.runner.text.stop_strings import REPLACEMENT, StopStrings

TOKENIZER_FILE = "tokenizer.json"
FITTING = 16
"""Characters for each token of the context: a longer text is looked at before it is tokenized."""
BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


class Text:
    """The tokenizer of an artifact's folder. Raises FileNotFoundError where it has none."""

    def __init__(self, folder: Path):
        from tokenizers import Tokenizer

        file = folder / TOKENIZER_FILE
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing: without a tokenizer, type --prompt-tokens 1,2,3")
        self.folder = folder
        self.tokenizer = Tokenizer.from_file(str(file))
        added = self.tokenizer.get_added_tokens_decoder().values()
        self._special = {token.content for token in added if token.special}

    def encode(self, prompt: str) -> list[int]:
        """Return token ids with the tokenizer's own special tokens (``<bos>``, where it has one). Raises ValueError for
        what is no text."""
        return self.tokenizer.encode(check_unicode(prompt, "the prompt")).ids

    def check_length(self, prompt: str, context: int) -> None:
        """Raises ValueError, one line, for a text that cannot fit into ``context`` tokens.

        That is seen before all of it is tokenized, which takes up to 140 bytes of memory a character: no token stands
        for more characters than the longest of the vocabulary; and of what could still fit, the beginning is tokenized.
        """
        if len(prompt) <= FITTING * context:
            return
        longest, advice = self._longest_token, "shorten the prompt, or export with a larger --max-seq-len"
        if len(prompt) > longest * context:
            raise ValueError(
                f"the prompt has {len(prompt):,} characters, the artifact's context {context} tokens of {longest} "
                f"characters at most: {advice}"
            )
        beginning = prompt[: FITTING * context]
        tokens = len(self.encode(beginning))
        if tokens > 2 * context:
            raise ValueError(
                f"the prompt has {tokens:,} tokens in the first {len(beginning):,} of its {len(prompt):,} characters, "
                f"the artifact's context {context}: {advice}"
            )

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token, as the vocabulary writes it: no fewer than it has in a text."""
        return max(map(len, self.tokenizer.get_vocab()))

    def encode_messages(self, messages: list[Message]) -> list[int]:
        """Return a conversation in the model's chat template, up to where its next turn begins. Raises ValueError where
        the model has no template, for what is no conversation, and for what the template does not take."""
        return self._chat_template.encode(messages)

    @property
    def turn_end_ids(self) -> tuple[int, ...]:
        """The tokens that end a reply in the chat template. Raises as ``encode_messages``."""
        return self._chat_template.end_ids

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        return ChatTemplate(self.folder)

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special)

    def written(self, token: int, skip_special: bool = True) -> str | None:
        """Return a token as the vocabulary writes it; None for one that ``decode`` leaves out."""
        written = self.tokenizer.id_to_token(token)
        return None if skip_special and written in self._special else written

    def token_bytes(self, token: int) -> bytes | None:
        """Return the bytes of a token that is part of a character, as byte fallback (``<0xE2>``) or a byte-level
        vocabulary writes them; None for a token of another kind."""
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        written, octets = (
            self.tokenizer.id_to_token(token) or "",
            {char: byte for byte, char in bytes_to_unicode().items()},
        )
        if BYTE_TOKEN.fullmatch(written):
            return bytes.fromhex(written[3:5])
        return bytes(octets[char] for char in written) if written and octets.keys() >= set(written) else None


class TextStream:
    """Ids in, text out as soon as it is certain; it ends before the first of the ``stop`` strings to complete.

    What is given joins to ``decode`` of all ids that belong to the text, cut where the stop string begins; of several
    that complete with the same id it is the one that begins first. So a character split over tokens waits for its last
    byte, and an end that could still become a stop string for what follows.

    Ids are decoded behind one id of context, since decoders drop the space before a text's first word, and once they
    are certain no more: a long text costs no more per token than a short one. Bytes that are tokens of their own
    (``<0xE2>``) wait for the end of their run, which is characters as a whole or not at all; ``DecodeStream`` of
    tokenizers gives them at once, fails where that was wrong, and never gives what it holds at the end.

    Attributes:
        stopped: the stop string that ended the text, or None
        kept: how many of all ids pushed belong to the text, the one that completed the stop string included

    ``skip_special`` False: special tokens are shown, but for ``end_ids``. The first ``least`` ids complete no stop
    string, and their certain text begins none. Raises ValueError as ``StopStrings``.
    """

    def __init__(
        self,
        text: Text,
        stop: Sequence[str] = (),
        skip_special: bool = True,
        end_ids: Collection[int] = (),
        least: int = 0,
    ):
        self.text, self._skip, self._end_ids, self._least = text, skip_special, end_ids, least
        self.stopped: str | None = None
        self.kept = 0
        self._stop = StopStrings(stop)
        self._ids: list[int] = []  # the context and all ids since
        self._certain = 0  # characters of their text
        self._held = ""  # certain, but perhaps a stop string's beginning
        self._uncertain = ""  # what follows it so far

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that became certain. Ids behind a stop string are ignored."""
        fresh = ""
        for token in ids:
            if self.stopped is not None:
                break
            self.kept += 1
            written = self.text.written(token, self._skip or token in self._end_ids)
            if written is not None:
                fresh += self._add(token, is_byte=BYTE_TOKEN.fullmatch(written) is not None)
        return fresh

    def finish(self) -> str:
        """Return what was held back: the beginning of a stop string, or of a character, that never came whole."""
        return self._held + self._uncertain

    def _add(self, token: int, is_byte: bool) -> str:
        self._ids.append(token)
        rest = self.text.decode(self._ids, self._skip)[self._certain :]
        found = None if self.kept <= self._least else self._stop.first(self._held + rest)
        if found:
            start, self.stopped = found
            fresh, self._held, self._uncertain = (self._held + rest)[:start], "", ""
            return fresh
        certain = "" if is_byte else rest.rstrip(REPLACEMENT)
        self._uncertain = rest[len(certain) :]
        if is_byte or self._uncertain:
            self._certain += len(certain)
        else:
            self._ids, self._certain = [token], len(self.text.decode([token], self._skip))
        return self._release(self._held + certain)

    def _release(self, text: str) -> str:
        """Return all of ``text`` but what could still become a stop string, which is held."""
        ready = len(text) - (0 if self.kept <= self._least else self._stop.unfinished(text))
        self._held = text[ready:]
        return text[:ready]
