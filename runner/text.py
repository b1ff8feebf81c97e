"""Text at the edge: the artifact's tokenizer, and nothing of it further in."""

import os
from pathlib import Path


def argument_text(argument: str) -> str:
    """An argument of a command line as the UTF-8 that it is, also where the locale's encoding could not decode it and
    Python kept its bytes as surrogates. Raises ValueError naming the byte that is not UTF-8, and its place."""
    try:
        if any("\ud800" <= character <= "\udfff" for character in argument):
            argument = os.fsencode(argument).decode("utf-8")
    except UnicodeError as error:
        raise ValueError(f"not UTF-8 text ({error}): type it in UTF-8") from error
    return argument


def _checked(prompt: str) -> str:
    """Raises ValueError for half a surrogate pair, which no tokenizer takes."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not Unicode text ({error}): leave that character out") from error
    return prompt


class Text:
    """The tokenizer of an artifact's folder. Raises FileNotFoundError where it has none."""

    def __init__(self, folder: Path):
        from tokenizers import Tokenizer

        file = folder / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing: without a tokenizer, type --prompt-tokens 1,2,3")
        self.folder = folder
        self.tokenizer = Tokenizer.from_file(str(file))

    def encode(self, prompt: str) -> list[int]:
        """With the tokenizer's own special tokens (``<bos>``, where it has one). ValueError for what is no text."""
        return self.tokenizer.encode(_checked(prompt)).ids

    def encode_chat(self, prompt: str) -> list[int]:
        """One user turn in the model's chat template. Raises ValueError where it has none, and for what is no text."""
        from transformers import AutoTokenizer

        prompt = _checked(prompt)
        tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        if tokenizer.chat_template is None:
            raise ValueError(f"the tokenizer in {self.folder} has no chat template: leave --chat out")
        turn = [{"role": "user", "content": prompt}]
        return tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


class TextStream:
    """Ids in, text out as soon as it is whole: a character split over tokens waits for its last byte.

    A line that has ended is never decoded again, so a long text costs no more per token than a short one.
    """

    def __init__(self, text: Text):
        self.text = text
        self.line: list[int] = []
        self.printed = 0

    def push(self, ids: list[int]) -> str:
        self.line += ids
        line = self.text.decode(self.line)
        whole = line.rstrip("\ufffd")
        fresh, self.printed = whole[self.printed :], max(self.printed, len(whole))
        if line.endswith("\n"):
            self.line, self.printed = [], 0
        return fresh

    def finish(self) -> str:
        """What was held back: the first bytes of a character that never came whole."""
        return self.text.decode(self.line)[self.printed :]
