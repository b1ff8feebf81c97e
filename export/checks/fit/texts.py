"""The texts of a measurement, as token ids: code, prose and a dialogue, which lie beside this file."""

import json
from pathlib import Path

import torch

from eagle3.export.output.tokenizer import read_by_transformers

SEGMENTS, PROMPT, WRITTEN = 6, 32, 64
"""The number of pieces of text, the tokens that each begins with, and the greedy tokens that a small target writes
after them."""
STREAMED = 3
"""The number of pieces for a target that does not fit into memory: one of each text."""
GIVEN = 128
"""The number of tokens of a piece that is computed as given."""

Piece = tuple[str, list[int]]
"""A piece of text: its name for a person, and its token ids."""


def pieces(
    folder: Path, vocabulary: int, length: int, count: int, seed: int = 0, text: Path | None = None
) -> list[Piece]:
    """Return ``count`` pieces of up to ``length`` tokens: of the texts in turn, or of the file ``text``.

    Args:
        folder: has the tokenizer and the chat template; without a tokenizer the tokens are drawn at random
        seed: which places of the texts
        text: a text, or a file of ``.jsonl`` with ``prompt`` in each line, of which each is a piece

    Raises ValueError for a file that has no text, or is not to be read without a tokenizer.
    """
    generator = torch.Generator().manual_seed(seed)
    if not (folder / "tokenizer.json").is_file():
        if text is not None:
            raise ValueError(f"{folder} has no tokenizer.json, which --text {text} needs")
        drawn = (torch.randint(vocabulary, (length,), generator=generator) for _ in range(count))
        return [("random ids", ids.tolist()) for ids in drawn]
    own, made, _ = read_by_transformers(folder)
    tokenizer = made or own
    tokenizer.no_truncation()
    tokenizer.no_padding()
    sources = [(kind, tokenizer.encode(whole).ids) for kind, whole in _sources(folder, text)]
    if text is not None and text.suffix == ".jsonl":
        return [each for each in sources if each[1]]
    found = []
    for index in range(count):
        kind, ids = sources[index % len(sources)]
        start = int(torch.randint(max(1, len(ids) - length + 1), (1,), generator=generator))
        if index < len(sources) and seed == 0:
            start = 0
        found.append((kind, ids[start : start + length]))
    return [each for each in found if len(each[1]) > 1]


def _sources(folder: Path, text: Path | None) -> list[tuple[str, str]]:
    """Return the texts with their names; of a ``.jsonl`` its prompts."""
    if text is None:
        shipped = [(kind, Path(__file__).with_name(f"{kind}.txt").read_text()) for kind in ("code", "prose")]
        return [*shipped, ("dialogue", _dialogue(folder))]
    try:
        given = [text.read_text()]
        if text.suffix == ".jsonl":
            given = [json.loads(line)["prompt"] for line in given[0].splitlines() if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--text {text} is no text, or no .jsonl with a prompt in each line ({error})") from error
    if not "".join(given).strip():
        raise ValueError(f"--text {text} is empty")
    return [(text.name, each) for each in given]


def _dialogue(folder: Path) -> str:
    """Return the dialogue in the target's chat template, or in a plain form if the target has none."""
    from transformers import AutoTokenizer

    turns = json.loads(Path(__file__).with_name("dialogue.json").read_text())
    try:
        made = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return made.apply_chat_template(turns, tokenize=False)
    except Exception:  # noqa: BLE001 - there is no template, or it refuses these turns with an error of its own
        return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)
