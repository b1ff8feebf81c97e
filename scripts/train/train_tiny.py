"""Trains gemma4-tiny, the checkpoint that ships with the project, from Python's own standard library.

    python scripts/train/train_tiny.py                      # tokenizer, target, four draft heads: six hours on 2 cores
    python scripts/train/train_tiny.py --only dflash        # one head alone, on the existing target

It writes ``targets/gemma4_tiny/{target,draft,peagle,assistant,dflash}`` and ``training.json``, the figures that the
model card quotes. With the same Python version and seed the text and its order are the same. Floating-point sums differ
between machines, so the weights agree in quality, not in bits.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from tiny_corpus import encode_documents, standard_library, train_tokenizer
from tiny_training import Pieces, greedy_continuations, measure_acceptance
from tokenizers import Tokenizer

CHECKPOINT = Path(__file__).resolve().parents[2] / "targets" / "gemma4_tiny"
VOCABULARY = 2048
HELD_OUT_PROMPTS = 40
HEADS = ("draft", "peagle", "assistant", "dflash")
"""The heads by the names of their folders: EAGLE-3, P-EAGLE (from the EAGLE-3 head), a Gemma 4 assistant, DFlash."""


def log(line: str) -> None:
    click.echo(line, err=True)


def trainings() -> dict[str, Callable[[Path, Path, Pieces, int, int, Callable[[str], None]], dict]]:
    """Return the training function for each name of a head's folder."""
    from tiny_assistant import train_assistant
    from tiny_dflash import train_dflash
    from tiny_draft import train_draft
    from tiny_peagle import train_peagle

    return {"draft": train_draft, "peagle": train_peagle, "assistant": train_assistant, "dflash": train_dflash}


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=CHECKPOINT, help="Folder for the checkpoints.")
@click.option("--only", type=click.Choice(["target", *HEADS]), help="Train one of them.")
@click.option("--target-steps", default=1500, show_default=True, help="Steps of 4,096 tokens.")
@click.option("--draft-steps", default=3000, show_default=True, help="Steps of 4,096 tokens, for each head.")
@click.option("--continuations", default=12288, show_default=True, help="Greedy completions to train the heads on.")
@click.option("--seed", default=0, show_default=True)
def main(output: Path, only: str | None, target_steps: int, draft_steps: int, continuations: int, seed: int) -> None:
    corpus = standard_library()
    target = output / "target"
    target.mkdir(parents=True, exist_ok=True)
    figures_file = output / "training.json"

    def note(**figures: Any) -> None:  # noqa: ANN401 - of whatever type JSON has; two heads may train at once
        noted = json.loads(figures_file.read_text()) if figures_file.exists() else {}
        figures_file.write_text(json.dumps(noted | figures, indent=2) + "\n")

    note(python=sys.version.split()[0], corpus_sha256=corpus.sha256, seed=seed)
    if only in (None, "target"):
        from tiny_target import train_target

        tokenizer = train_tokenizer(list(corpus.train.values()), VOCABULARY)
        streams = encode_documents(tokenizer, corpus.train), encode_documents(tokenizer, corpus.held_out)
        log(f"{len(streams[0])} tokens to train on, {len(streams[1])} held out")
        note(train_tokens=len(streams[0]), held_out_tokens=len(streams[1]))
        note(target=train_target(target, streams, tokenizer, target_steps, seed, log))
    if only == "target":
        return
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    train, held_out = (encode_documents(tokenizer, texts) for texts in (corpus.train, corpus.held_out))
    starts = np.linspace(0, len(held_out) - 64, HELD_OUT_PROMPTS).astype(int)
    prompts = [held_out[start : start + 64].tolist() for start in starts]
    written = greedy_continuations(target, train, continuations, seed + 1, log)
    for name in [only] if only else HEADS:
        pieces = Pieces(train, written, torch.Generator().manual_seed(seed + 2))
        figures = trainings()[name](output / name, target, pieces, draft_steps, seed, log)
        figures["acceptance"] = measure_acceptance(target, output / name, prompts, new_tokens=128)
        log(f"{name}: acceptance {figures['acceptance']}")
        note(**{name: figures})


if __name__ == "__main__":
    main()
