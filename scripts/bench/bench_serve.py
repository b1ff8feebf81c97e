"""Measures the cost of HTTP per round: runs the same prompts by eagle3-serve and by the library in turn.

    python scripts/bench/bench_serve.py out

For published widths, with random weights and a tokenizer of made-up words, type:

    python scripts/bench/bench_export.py --backend xnnpack --target qwen3-4B --layers 4 --folder steps
    python scripts/bench/bench_serve.py steps/qwen3-4B-4/artifact --new-tokens 32
"""

import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import click
import httpx
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from eagle3.runner import load
from eagle3.runner.commands.bench_figures import machine, spread
from eagle3.runner.commands.bench_report import spread_text
from eagle3.runner.system.command import OneLineFailures
from eagle3.runner.text.prompts import read_prompts
from eagle3.runner.text.text import TOKENIZER_FILE

PROMPTS = Path(__file__).parents[1] / "prompts.jsonl"
MADE_UP_PROMPTS, MADE_UP_TOKENS = 8, 64
LIBRARY, SERVER = "library", "eagle3-serve"


class Heard(NamedTuple):
    """An answer as its client sees it: seconds to its first token, and from then to its end."""

    first: float
    rest: float


def timed(events: Iterable[object]) -> Heard:
    """Consume the events of an answer, the first of which is assumed to have one token."""
    start, first = time.perf_counter(), 0.0
    for _ in events:
        first = first or time.perf_counter()
    return Heard(first - start, time.perf_counter() - first)


def streamed(client: httpx.Client, prompt: list[int], new_tokens: int) -> Iterator[str]:
    """Yield the events of a server's answer."""
    asked = {"prompt": prompt, "max_tokens": new_tokens, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=asked) as reply:
        reply.raise_for_status()
        yield from (line for line in reply.iter_lines() if line.startswith("data: {"))


@contextmanager
def served(artifact: Path) -> Iterator[str]:
    """Run eagle3-serve in a process of its own. Yields its URL."""
    code = "import sys; from eagle3.runner.serve.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, str(artifact), "--port", "0", "--default", "temperature=0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = ["it says nothing"]
        while not (found := re.search(r"(http://[\d.]+:\d+)/v1$", said[-1])):
            if not (line := process.stderr.readline().strip()):
                raise ValueError(f"eagle3-serve does not start: {said[-1]}")
            said.append(line)
        yield found[1]
    finally:
        process.kill()
        process.communicate()


@contextmanager
def with_tokenizer(artifact: Path) -> Iterator[Path]:
    """Yield the artifact, or, if it has no tokenizer, a folder of links to its files with a tokenizer of made-up
    words."""
    if (artifact / TOKENIZER_FILE).is_file():
        yield artifact
        return
    with load(artifact, defer=True) as model, tempfile.TemporaryDirectory() as name:
        for file in artifact.iterdir():
            (Path(name) / file.name).symlink_to(file.absolute())
        words = {f"word{number}": number for number in range(model.metadata.vocab_size)}
        Tokenizer(WordLevel(words, unk_token="word0")).save(str(Path(name) / TOKENIZER_FILE))
        yield Path(name)


def lines_of(heard: dict[str, list[list[Heard]]], new_tokens: int, rounds: int) -> list[str]:
    """Return lines of figures, medians over the passes. ``heard``: the answers of each side by pass, each of as many
    tokens. ``rounds``: the rounds of a pass."""
    lines = []
    for name, passes in heard.items():
        first = spread(1000 * sum(each.first for each in one) / len(one) for one in passes)
        rate = spread(len(one) * (new_tokens - 1) / sum(each.rest for each in one) for one in passes)
        lines.append(f"{name}: first token {spread_text(first, 1)} ms, {spread_text(rate, 1)} tokens/s")
    theirs, ours = ([sum(each.rest for each in one) for one in heard[side]] for side in (SERVER, LIBRARY))
    lost = [other - own for other, own in zip(theirs, ours, strict=True)]
    share = spread(100 * seconds / own for seconds, own in zip(lost, ours, strict=True))
    whole, added = (spread(1000 * seconds / rounds for seconds in taken) for taken in (ours, lost))
    added_text = f"the server adds {spread_text(added, 3)} ms: {spread_text(share, 1)}%"
    return [*lines, f"a round takes {spread_text(whole, 2)} ms, {added_text}"]


@click.command(cls=OneLineFailures, epilog="\n\n".join(f"\b\n{part}" for part in __doc__.split("\n\n")[1:]))
@click.argument("artifact", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--new-tokens", type=click.IntRange(2), default=128, show_default=True, help="Of each answer.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Passes over all prompts.")
def main(artifact: Path, new_tokens: int, repeats: int) -> None:
    """Measure the library and eagle3-serve: time to first token, tokens per second.

    Decoding is greedy and ignores end tokens, so that all answers are equally long. The client's clock is used, so the
    server's figures include HTTP and its parsing. A prompt shares at most its beginning with the one before it.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(with_tokenizer(artifact))
        model = stack.enter_context(load(folder))
        client = stack.enter_context(httpx.Client(base_url=stack.enter_context(served(folder)), timeout=600))
        prompts = [model.encode(prompt.first_turn) for prompt in read_prompts(PROMPTS)]
        if folder != artifact:
            draw, vocabulary = random.Random(0), range(model.metadata.vocab_size)
            prompts = [draw.choices(vocabulary, k=MADE_UP_TOKENS) for _ in range(MADE_UP_PROMPTS)]
        options = {"max_new_tokens": new_tokens, "ignore_eos": True}
        heard: dict[str, list[list[Heard]]] = {LIBRARY: [], SERVER: []}
        for _ in range(repeats + 1):  # the first is not counted
            for passes in heard.values():
                passes.append([])
            for prompt in prompts:
                heard[LIBRARY][-1].append(timed(model.stream(prompt, **options)))
                heard[SERVER][-1].append(timed(streamed(client, prompt, new_tokens)))
        stats = [model.generate(prompt, **options).stats for prompt in prompts]
    rounds = sum(each.num_drafts + each.num_undrafted for each in stats)
    lines = lines_of({name: passes[1:] for name, passes in heard.items()}, new_tokens, rounds)
    click.echo("\n".join([f"{len(prompts)} prompts, {new_tokens} new tokens each; {machine(None)}", *lines]))


if __name__ == "__main__":
    main()
