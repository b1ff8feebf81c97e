"""The texts of a measurement: prose, code and a dialogue. They are part of the package; ``--text`` replaces them.

A small target continues the beginnings of the texts greedily, as in use. A large target computes the texts themselves,
in one forward each, or all in one forward where each would take a pass over the checkpoint. What counts then is its
greedy token after each of their tokens.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3.export.output.contents import SETTINGS
from eagle3.export.output.tokenizer import read_by_transformers

PROSE = """The harbour wakes before the town does. At five the first boats come in with their lamps still lit, and the
men on the quay count boxes without speaking. By six there is coffee in the shed, bread from the bakery on the hill, and
an argument about the price of cod that nobody means to win. A child who should be asleep stands at the window of the
corner house and writes down the names of the boats in a school book. She has done so every morning since the spring.
When the harbour master retired last year, the council found that his log had gaps of whole weeks, because he had been
ill and had told nobody. Somebody remembered the book. So it came that the official record of the port for that summer
is in pencil, in a round hand, with small drawings of gulls in the margin. Historians like it better than the rest. It
says what the weather was, who came back late, and which captain sang while he tied his ropes. The other log says only
when, how many, and how much. Both are kept in the same drawer of the town hall, and visitors may ask for either of them
on Thursdays. Most people ask for the one with the gulls, read a page, and then stay until the clerk locks up."""

CODE = '''import json
import os


class Cache:
    """Keep the results of slow calls in a folder, one file for each key."""

    def __init__(self, folder, limit=100):
        self.folder = folder
        self.limit = limit
        os.makedirs(folder, exist_ok=True)

    def path(self, key):
        return os.path.join(self.folder, str(key) + ".json")

    def get(self, key, default=None):
        try:
            with open(self.path(key)) as file:
                return json.load(file)
        except FileNotFoundError:
            return default

    def put(self, key, value):
        with open(self.path(key), "w") as file:
            json.dump(value, file)
        names = sorted(os.listdir(self.folder))
        while len(names) > self.limit:
            os.remove(os.path.join(self.folder, names.pop(0)))


def parse_line(line, sep=","):
    """Split a line into fields, and strip the white space around each."""
    fields = []
    for field in line.split(sep):
        field = field.strip()
        if not field:
            continue
        if field.isdigit():
            field = int(field)
        fields.append(field)
    return fields


def read_table(path, sep=","):
    rows = []
    with open(path) as file:
        for number, line in enumerate(file):
            if line.startswith("#"):
                continue
            fields = parse_line(line, sep)
            if not fields:
                raise ValueError("line %d of %s is empty" % (number, path))
            rows.append(fields)
    return rows
'''

DIALOGUE = (
    ("user", "How do I keep basil alive in a kitchen without much light?"),
    (
        "assistant",
        "Put it as close to the brightest window as you can, and turn the pot every few days, so that it is straight. "
        "Water it when the top of the soil is dry, from below, and let the rest drain off. Pick the tips rather than "
        "single leaves: the plant then grows two new shoots for each that you take. If the stems become long and thin, "
        "it needs more light, and a small lamp above it for some hours a day will do.",
    ),
    ("user", "And how often should I feed it?"),
    (
        "assistant",
        "Every three or four weeks in spring and summer, with half of the dose on the bottle. In winter it hardly "
        "grows, so leave the feed out until the days are longer again.",
    ),
)

SEGMENTS, PROMPT, WRITTEN = 6, 32, 64
"""The number of pieces of text, the tokens that each begins with, and the greedy tokens that the target writes after
them."""
STREAMED = 3
"""The number of pieces for a target that does not fit into memory: one of each text."""
GIVEN = 128
"""The number of tokens of a piece that is computed as given."""
BLOCK_ROWS = 2048
"""The most rows of blocks that one reading of a head computes, behind tokens of pieces that are computed as given."""


@dataclass(frozen=True)
class Piece:
    """A piece of text as token ids. ``kind`` is its name for a person."""

    kind: str
    ids: list[int]


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
    file = folder / "tokenizer.json"
    if not file.is_file():
        if text is not None:
            raise ValueError(f"{folder} has no tokenizer.json, which --text {text} needs")
        drawn = (torch.randint(vocabulary, (length,), generator=generator) for _ in range(count))
        return [Piece("random ids", ids.tolist()) for ids in drawn]
    own, made, _ = read_by_transformers(folder)
    tokenizer = made or own
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if text is not None and text.suffix == ".jsonl":
        return [Piece(text.name, ids) for line in _prompts(text) if (ids := tokenizer.encode(line).ids)]
    sources = _sources(folder, text)
    found = []
    for index in range(count):
        kind, whole = sources[index % len(sources)]
        ids = tokenizer.encode(whole).ids
        room = len(ids) - length
        start = 0 if room <= 0 else int(torch.randint(room + 1, (1,), generator=generator))
        if index < len(sources) and seed == 0:
            start = 0
        found.append(Piece(kind, ids[start : start + length]))
    return [piece for piece in found if len(piece.ids) > 1]


def joined(pieces: list[Piece]) -> Piece:
    """Return the pieces as one text."""
    return Piece(
        ", ".join(dict.fromkeys(piece.kind for piece in pieces)), [each for piece in pieces for each in piece.ids]
    )


def _prompts(text: Path) -> list[str]:
    try:
        return [json.loads(line)["prompt"] for line in text.read_text().splitlines() if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--text {text}: each line must be an object with a prompt ({error})") from error


def _sources(folder: Path, text: Path | None) -> list[tuple[str, str]]:
    if text is None:
        return [("code", CODE), ("prose", PROSE), ("dialogue", _dialogue(folder))]
    try:
        given = text.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text {text} is no text that can be read ({error})") from error
    if not given.strip():
        raise ValueError(f"--text {text} is empty")
    return [(text.name, given)]


def _dialogue(folder: Path) -> str:
    """Return the dialogue in the target's chat template, or in a plain form if the target has none."""
    turns: list[dict[str, Any]] = [{"role": role, "content": said} for role, said in DIALOGUE]
    template, settings = folder / "chat_template.jinja", folder / SETTINGS
    plain = "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)
    if not template.is_file() and not (settings.is_file() and "chat_template" in settings.read_text()):
        return plain
    from transformers import AutoTokenizer

    try:
        made = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return made.apply_chat_template(turns, tokenize=False)
    except Exception:  # noqa: BLE001 - a template that refuses these turns, with an error of its own
        return plain
