"""Converts between text and token ids with the artifact's tokenizer. The loop itself handles only token ids."""

import json
import re
from collections.abc import Collection, Sequence
from functools import cache, cached_property
from pathlib import Path

from eagle3.runner.text.chat import ChatTemplate, Message
from eagle3.runner.text.checks import check_unicode
from eagle3.runner.text.stop_strings import REPLACEMENT, Reasoning, StopStrings

TOKENIZER_FILE, SETTINGS_FILE = "tokenizer.json", "tokenizer_config.json"
FITTING = 16
"""Characters per token of the context. The length of a text with more characters is checked before it is tokenized."""
BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


class Text:
    """The tokenizer of an artifact's folder. Raises FileNotFoundError if the folder has none."""

    def __init__(self, folder: Path):
        from tokenizers import Tokenizer

        file = folder / TOKENIZER_FILE
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing: without a tokenizer, type --prompt-tokens 1,2,3")
        self.folder = folder
        self.tokenizer = Tokenizer.from_file(str(file))
        # as transformers, which truncates and pads only in calls that ask for it
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = _splits_special_tokens(folder)
        added = self.tokenizer.get_added_tokens_decoder().values()
        self.special = {token.content for token in added if token.special}

    def encode(self, prompt: str) -> list[int]:
        """Return token ids with the tokenizer's own special tokens (``<bos>``, if it has one). Raises ValueError if the
        prompt is not Unicode text."""
        return self.tokenizer.encode(check_unicode(prompt, "the prompt")).ids

    def check_length(self, prompt: str, context: int) -> None:
        """Raise ValueError with one line for a text that cannot fit into ``context`` tokens.

        This is checked without tokenizing the whole text, which takes up to 140 bytes of memory per character. The text
        has too many characters for the longest token of the vocabulary, or its beginning alone has too many tokens.
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
        """The characters of the longest token as the vocabulary writes it, which are at least as many as in a text."""
        return max(map(len, self.tokenizer.get_vocab()))

    def encode_messages(self, messages: list[Message]) -> list[int]:
        """Return a conversation in the model's chat template, up to the beginning of the assistant's next turn. Raises
        ValueError if the model has no template, or if the messages are no conversation or the template rejects them."""
        rendered = self._chat_template.render(messages)
        return self.tokenizer.encode(rendered, add_special_tokens=False).ids

    @property
    def turn_end_ids(self) -> tuple[int, ...]:
        """The tokens that end a reply in the chat template. Raises the errors of ``encode_messages``."""
        return self._chat_template.end_ids

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        return ChatTemplate(self.folder)

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special)

    def written(self, token: int, skip_special: bool = True) -> str | None:
        """Return a token as the vocabulary writes it; None for a token that ``decode`` leaves out."""
        written = self.tokenizer.id_to_token(token)
        return None if skip_special and written in self.special else written

    def token_bytes(self, token: int) -> bytes | None:
        """Return the bytes of a token that is part of a character, as byte fallback (``<0xE2>``) or a byte-level
        vocabulary writes them; None for a token of another kind."""
        written, octets = self.tokenizer.id_to_token(token) or "", _octets()
        if BYTE_TOKEN.fullmatch(written):
            return bytes.fromhex(written[3:5])
        return bytes(octets[char] for char in written) if written and octets.keys() >= set(written) else None


@cache
def _octets() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {char: byte for byte, char in bytes_to_unicode().items()}


def _splits_special_tokens(folder: Path) -> bool:
    """Return True if special tokens in a text are tokenized as other text is: a setting beside ``tokenizer.json``."""
    file = folder / SETTINGS_FILE
    return file.is_file() and json.loads(file.read_text(encoding="utf-8")).get("split_special_tokens") is True


class TextStream:
    """Decodes ids to text as soon as the text is certain. The text ends before the first of the ``stop`` strings.

    The returned pieces join to ``decode`` of all ids that belong to the text, cut where the stop string begins. If one
    id completes several stop strings, the text is cut at the one that begins first. A character split over tokens is
    held back until its last byte, and an end that could become a stop string until the following text decides.

    Ids are decoded after one id of context, since decoders drop the space before a text's first word. Ids whose text is
    certain are not decoded again, so the cost per token does not grow with the text. Tokens of single bytes
    (``<0xE2>``) are held back until the end of their run, which is decoded as a whole. ``DecodeStream`` of tokenizers
    returns them at once, fails if that was wrong, and never returns the text that it holds at the end.

    Attributes:
        stopped: the stop string that ended the text, or None
        kept: how many of all pushed ids belong to the text, including the one that completed the stop string

    With ``skip_special`` False, special tokens are shown, except ``end_ids``. The first ``least`` ids complete no stop
    string, and no stop string begins in their certain text. ``reasoning``: the marks (begin, end) of reasoning at the
    beginning, in which stop strings do not count (``Reasoning``). Raises the errors of ``StopStrings``.
    """

    def __init__(
        self,
        text: Text,
        stop: Sequence[str] = (),
        skip_special: bool = True,
        end_ids: Collection[int] = (),
        least: int = 0,
        reasoning: Sequence[str] = (),
    ):
        self.text, self._skip, self._end_ids, self._least = text, skip_special, end_ids, least
        self.stopped: str | None = None
        self.kept = 0
        self._stop = StopStrings(stop)
        self._reasoning = Reasoning(*reasoning) if stop and reasoning else None
        self._ids: list[int] = []  # the id of context and all ids after it
        self._certain = 0  # the characters of their text that are certain
        self._held = ""  # certain text that may begin a stop string
        self._uncertain = ""  # the text after it, which may still change

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that became certain. Ids after a stop string are ignored."""
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
        """Return the text that was held back: an incomplete stop string or character."""
        return self._held + self._uncertain

    def _add(self, token: int, is_byte: bool) -> str:
        self._ids.append(token)
        rest = self.text.decode(self._ids, self._skip)[self._certain :]
        certain = "" if is_byte else rest.rstrip(REPLACEMENT)
        held = self._held + certain
        passed = 0 if self._reasoning is None else self._reasoning.passed(held)
        out, self._held = held[:passed], held[passed:]
        text = self._held + rest[len(certain) :]
        found = self._stop.first(text) if self._searches else None
        if found:
            start, self.stopped = found
            self._held, self._uncertain = "", ""
            return out + text[:start]
        self._uncertain = rest[len(certain) :]
        if is_byte or self._uncertain:
            self._certain += len(certain)
        else:
            self._ids, self._certain = [token], len(self.text.decode([token], self._skip))
        return out + self._release()

    @property
    def _searches(self) -> bool:
        return self.kept > self._least and (self._reasoning is None or self._reasoning.over)

    def _release(self) -> str:
        """Return the held text without an end that could still become a stop string or a mark of reasoning."""
        if self._reasoning is not None and not self._reasoning.over:
            return ""
        ready = len(self._held) - (self._stop.unfinished(self._held) if self._searches else 0)
        text, self._held = self._held[:ready], self._held[ready:]
        return text
