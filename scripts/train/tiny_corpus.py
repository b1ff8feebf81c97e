"""The text on which gemma4-tiny is trained: the source of the Python standard library, which every machine with Python
has.

Tests and generated tables are left out. The hash of a file's name decides whether it is held out, so the split is the
same on every machine. The text depends on the Python version, which the model card names.
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

PAD, EOS, BOS, UNK = "<pad>", "<eos>", "<bos>", "<unk>"  # ids 0..3, as in Gemma's own vocabulary
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "encodings", "pydoc_data", "__pycache__"}
HELD_OUT_SHARE = 24  # one file in 24 is held out


@dataclass(frozen=True)
class Corpus:
    """Source files by relative name, split into ``train`` and ``held_out``."""

    train: dict[str, str]
    held_out: dict[str, str]

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for name, text in sorted({**self.train, **self.held_out}.items()):
            digest.update(name.encode() + b"\0" + text.encode() + b"\0")
        return digest.hexdigest()


def standard_library() -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    train, held_out = {}, {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if LEFT_OUT.intersection(name.parts):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        chosen = int(hashlib.sha256(str(name).encode()).hexdigest(), 16) % HELD_OUT_SHARE == 0
        (held_out if chosen else train)[str(name)] = text
    return Corpus(train, held_out)


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of ``vocab_size`` tokens that puts ``<bos>`` before every text, as Gemma's does."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS, BOS, UNK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def encode_documents(tokenizer: Tokenizer, texts: dict[str, str]) -> np.ndarray:
    """Return all documents as one stream, int16 [tokens]: each document is ``<bos>``, its text, ``<eos>``."""
    eos = tokenizer.token_to_id(EOS)
    return np.concatenate([np.array(tokenizer.encode(text).ids + [eos], dtype=np.int16) for text in texts.values()])
