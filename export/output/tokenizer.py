"""Makes the artifact's ``tokenizer.json`` the tokenizer that transformers makes of a checkpoint.

transformers does not take ``tokenizer.json`` as it is. The class that ``tokenizer_config.json`` names may build the
tokenizer anew from its vocabulary (then ``add_prefix_space`` and other arguments of that class count), and other fields
change it: ``fix_mistral_regex`` the pre-tokenizer; ``added_tokens_decoder``, ``extra_special_tokens``, the named
special tokens and ``special_tokens_map.json`` the added tokens (``TokenizersBackend`` of transformers 5.24, which
ignores ``add_bos_token`` and ``add_eos_token`` beside a ``tokenizer.json``). A runner reads that file alone, so
the result is written there. ``split_special_tokens`` is no part of that file; ``Text`` reads it.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.export.output.contents import SETTINGS, TOKENIZER

if TYPE_CHECKING:
    from tokenizers import Tokenizer

OF_CALLS = ("truncation", "padding")
"""The parts of ``tokenizer.json`` that transformers and ``Text`` leave out unless a call asks for them."""
TEXTS = (
    "Hello world, HelloWorld! It isn't 123 or 4567.",
    "eBay sells  NaOH\n\n\tdef f(x):\r\n    return x  ",
    " Größe été ﬁn 日本語 Привет 😀",
    "",
)
"""Texts that show whether two tokenizers differ."""


def read_by_transformers(folder: Path) -> "tuple[Tokenizer, Tokenizer | None, str]":
    """Return the tokenizer in ``tokenizer.json`` of ``folder``, the one that transformers makes, None if it is the same
    or does not load, and the reason why it does not load, or an empty text. Without ``tokenizer_config.json`` there is
    nothing that could change the first. No code of the checkpoint is run, and nothing is downloaded."""
    from tokenizers import Tokenizer

    own = Tokenizer.from_file(str(folder / TOKENIZER))
    if not (folder / SETTINGS).is_file():
        return own, None, ""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - the library raises many types for files that it does not know
        return own, None, " ".join(str(error).split())[:200] or type(error).__name__
    made = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(made, Tokenizer):
        return own, None, f"{type(loaded).__name__} does not use {TOKENIZER}"
    return own, None if _parts(made) == _parts(own) else made, ""


def write_tokenizer(checkpoint: Path, folder: Path) -> Iterator[str]:
    """Write the tokenizer that transformers makes of ``checkpoint`` into ``folder``, the artifact, if it differs from
    the file there. Yield a line if ids differ, and if transformers does not load the tokenizer."""
    if not (checkpoint / TOKENIZER).is_file():
        return
    own, made, reason = read_by_transformers(checkpoint)
    if reason:
        yield (
            f"Warning: transformers does not load the tokenizer in {checkpoint} ({reason}): the artifact has "
            f"{TOKENIZER} as it is, and fields of {SETTINGS} that change ids are not applied"
        )
    if made is None:
        return
    (folder / TOKENIZER).write_text(made.to_str(), encoding="utf-8")
    before, after = ([each.encode(text).ids for text in TEXTS] for each in (own, made))
    if before != after:
        own_parts = _parts(own)  # tens of megabytes of JSON
        parts = ", ".join(part for part, value in _parts(made).items() if own_parts.get(part) != value)
        yield (
            f"tokenizer: by {SETTINGS} transformers makes other ids than {TOKENIZER} alone gives ({parts}); the "
            "artifact has the tokenizer of transformers"
        )


def _parts(tokenizer: "Tokenizer") -> dict[str, object]:
    return {part: value for part, value in json.loads(tokenizer.to_str()).items() if part not in OF_CALLS}
