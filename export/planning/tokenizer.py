"""Reads the tokenizer files that the artifact will contain, before any weight is read."""

from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.export.checkpoints.json_fields import read_object
from eagle3.export.output.contents import CHAT_TEMPLATE, TOKENIZER, TOKENIZER_FILES

if TYPE_CHECKING:
    from tokenizers import Tokenizer

OTHER_FORMS = ("tekken.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
"""Files that hold a tokenizer in another format than ``tokenizer.json``. They are not read."""


def read_tokenizer(file: Path) -> "Tokenizer":
    """Return the tokenizer in a ``tokenizer.json``. Raises ValueError for an invalid file."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises a bare Exception
        raise ValueError(f"{file} cannot be read by the tokenizers library ({error}): copy it again") from error
    if not tokenizer.get_vocab_size():
        raise ValueError(f"{file} is a tokenizer without tokens: copy it again")
    return tokenizer


def check_tokenizer(folder: Path) -> None:
    """Read the tokenizer files in ``folder``. Raises ValueError for the first file that a runner could not read."""
    for file in (folder / name for name in TOKENIZER_FILES):
        if not file.is_file():
            continue
        if file.name == TOKENIZER:
            read_tokenizer(file)
        elif file.name == CHAT_TEMPLATE:
            _read_text(file)
        else:
            read_object(file)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text ({error}): copy it again") from error


def no_tokenizer(folder: Path, name: str) -> str:
    """Return a warning about a checkpoint without ``tokenizer.json``. ``folder`` may hold the tokenizer in another
    form; ``name`` is the user's name of the checkpoint."""
    found = [name for name in OTHER_FORMS if (folder / name).is_file()]
    has = f" (it has {' and '.join(found)}, which is not read)" if found else ""
    return (
        f"{name} has no {TOKENIZER}{has}: eagle3-run will take only --prompt-tokens, and eagle3-serve will not "
        f"start: copy the {TOKENIZER} of this model from a checkpoint that transformers saved"
    )
