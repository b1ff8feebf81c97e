"""Trains gemma4-tiny, the checkpoint that ships with the project, from Python's own standard library.

    python scripts/train_tiny.py                      # tokenizer, target, draft: two to three hours on 2 cores
    python scripts/train_tiny.py --only draft         # the draft head alone, on the existing target

Writes ``targets/gemma4_tiny/{target,draft}`` and the figures that the model card quotes, ``training.json``. The same
Python version and the same seed read the same text in the same order; floating-point sums differ between machines, so
the weights agree in quality, not in bits.
"""

import json
import sys
from pathlib import Path

import click
import numpy as np
from tiny_corpus import encode_documents, standard_library, train_tokenizer
from tokenizers import Tokenizer

CHECKPOINT = Path(__file__).resolve().parent.parent / "targets" / "gemma4_tiny"
VOCABULARY = 2048
HELD_OUT_PROMPTS = 40


def log(line: str) -> None:
    click.echo(line, err=True)


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=CHECKPOINT, help="Folder for target/ and draft/.")
@click.option("--only", type=click.Choice(["target", "draft"]), help="Train one of the two.")
@click.option("--target-steps", default=1500, show_default=True, help="Steps of 4,096 tokens.")
@click.option("--draft-steps", default=3000, show_default=True, help="Steps of 4,096 tokens.")
@click.option("--continuations", default=12288, show_default=True, help="Greedy completions to train the draft on.")
@click.option("--seed", default=0, show_default=True)
def main(output: Path, only: str | None, target_steps: int, draft_steps: int, continuations: int, seed: int) -> None:
    corpus = standard_library()
    target = output / "target"
    target.mkdir(parents=True, exist_ok=True)
    figures_file = output / "training.json"
    figures = json.loads(figures_file.read_text()) if figures_file.exists() else {}
    figures |= {"python": sys.version.split()[0], "corpus_sha256": corpus.sha256, "seed": seed}
    if only != "draft":
        from tiny_target import train_target

        tokenizer = train_tokenizer(list(corpus.train.values()), VOCABULARY)
        streams = encode_documents(tokenizer, corpus.train), encode_documents(tokenizer, corpus.held_out)
        log(f"{len(streams[0])} tokens to train on, {len(streams[1])} held out")
        figures |= {"train_tokens": len(streams[0]), "held_out_tokens": len(streams[1])}
        figures["target"] = train_target(target, streams, tokenizer, target_steps, seed, log)
        figures_file.write_text(json.dumps(figures, indent=2) + "\n")
    if only != "target":
        from tiny_draft import measure_acceptance, train_draft

        tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
        train, held_out = (encode_documents(tokenizer, texts) for texts in (corpus.train, corpus.held_out))
        figures["draft"] = train_draft(output / "draft", target, train, draft_steps, continuations, seed, log)
        starts = np.linspace(0, len(held_out) - 64, HELD_OUT_PROMPTS).astype(int)
        prompts = [held_out[start : start + 64].tolist() for start in starts]
        figures["acceptance"] = measure_acceptance(target, output / "draft", prompts, new_tokens=128)
        log(f"acceptance {figures['acceptance']}")
        figures_file.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
