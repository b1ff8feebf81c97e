"""Measures the cost of HTTP per round: runs the same prompts by eagle3-serve and by the library in turn.

    python scripts/bench/bench_serve.py out

For published widths, with random weights and a tokenizer of made-up words, type:

    python scripts/bench/bench_export.py --backend xnnpack --target qwen3-4B --layers 4 --folder steps
    python scripts/bench/bench_serve.py steps/qwen3-4B-4/artifact --new-tokens 32
"""

import http.client
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import click
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from eagle3.runner import load
from eagle3.runner.commands.bench_figures import machine, spread, versions
from eagle3.runner.commands.bench_report import rate_text, rendered, spread_text
from eagle3.runner.model import Model
from eagle3.runner.system.command import OneLineFailures
from eagle3.runner.text.prompts import read_prompts
from eagle3.runner.text.text import TOKENIZER_FILE

PROMPTS = Path(__file__).parents[1] / "prompts.jsonl"
MADE_UP_PROMPTS, MADE_UP_TOKENS = 8, 64
LIBRARY, SERVER = "library", "eagle3-serve"


class Heard(NamedTuple):
    """An answer as its client sees it. ``first``: seconds to its first token; ``rest``: seconds from then to its
    end."""

    tokens: int
    first: float
    rest: float


Answer = Callable[[list[int]], Heard]


def of_library(model: Model, new_tokens: int) -> Answer:
    """Return a function that answers a prompt through the library, as ``eagle3-run`` does."""

    def answer(prompt: list[int]) -> Heard:
        start, first, tokens = time.perf_counter(), 0.0, 0
        for piece in model.stream(prompt, max_new_tokens=new_tokens, ignore_eos=True):
            first = first or time.perf_counter()
            tokens += len(piece.token_ids)
        return Heard(tokens, first - start, time.perf_counter() - first)

    return answer


@dataclass
class Endpoint:
    """A server that streams answers at ``path``, and reports the number of generated tokens at the end."""

    port: int
    path: str
    asked: Callable[[list[int]], dict[str, Any]]
    tokens: Callable[[dict[str, Any]], int]

    def __call__(self, prompt: list[int]) -> Heard:
        body, headers = json.dumps(self.asked(prompt)), {"Content-Type": "application/json"}
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)) as connection:
            connection.connect()
            start, first, last = time.perf_counter(), 0.0, b""
            connection.request("POST", self.path, body, headers)
            answer = connection.getresponse()
            for line in answer:
                if line.startswith(b"data: {"):
                    first, last = first or time.perf_counter(), line
            end = time.perf_counter()
        if answer.status != http.client.OK or not last:
            raise ValueError(f"{self.path} answers {answer.status}: {last or answer.reason!r}")
        return Heard(self.tokens(json.loads(last[6:])), first - start, end - first)


@contextmanager
def served(artifact: Path, new_tokens: int) -> Iterator[Endpoint]:
    """Run eagle3-serve in a process of its own."""
    code = "import sys; from eagle3.runner.serve.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, str(artifact), "--port", "0", "--default", "temperature=0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = "it says nothing"
    try:
        found = None
        while found is None and (line := process.stderr.readline()):
            found, said = re.search(r":(\d+)/v1$", line.strip()), line.strip()
        if not found:
            raise ValueError(f"eagle3-serve does not start: {said}")
        asks = {"max_tokens": new_tokens, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        yield Endpoint(
            int(found[1]),
            "/v1/completions",
            lambda prompt: asks | {"prompt": prompt},
            lambda last: last["usage"]["completion_tokens"],
        )
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


def prompts_of(model: Model, made_up: bool) -> list[list[int]]:
    """Return the prompts' token ids: those of scripts/prompts.jsonl, or ids drawn from the vocabulary."""
    if not made_up:
        return [model.encode(prompt.first_turn) for prompt in read_prompts(PROMPTS)]
    draw = random.Random(0)
    return [[draw.randrange(model.metadata.vocab_size) for _ in range(MADE_UP_TOKENS)] for _ in range(MADE_UP_PROMPTS)]


def measure(sides: dict[str, Answer], prompts: Sequence[list[int]], repeats: int) -> dict[str, list[list[Heard]]]:
    """Return the answers of each side, a list per pass, after an uncounted pass. The sides run each prompt in turn."""
    heard: dict[str, list[list[Heard]]] = {name: [] for name in sides}
    for _ in range(repeats + 1):
        for answers in heard.values():
            answers.append([])
        for prompt in prompts:
            for name, answer in sides.items():
                heard[name][-1].append(answer(prompt))
    return {name: passes[1:] for name, passes in heard.items()}


def first_ms(answers: Sequence[Heard]) -> float:
    return 1000 * sum(each.first for each in answers) / len(answers)


def rate(answers: Sequence[Heard]) -> float:
    """Return the tokens per second after the first event, which is assumed to have one token."""
    return sum(each.tokens - 1 for each in answers) / sum(each.rest for each in answers)


def report_of(heard: dict[str, list[list[Heard]]], rounds: int) -> dict[str, Any]:
    """Return the report. ``rounds`` is the number of rounds of a pass by the library. Ratios are computed within a
    pass."""
    base, sides = heard[LIBRARY], []
    for name, passes in heard.items():
        pairs = list(zip(passes, base, strict=True))
        sides.append(
            {
                "side": name,
                "first_token_ms": spread(map(first_ms, passes)),
                "tokens_per_second": spread(map(rate, passes)),
                "first_token_to_library": spread(first_ms(one) / first_ms(other) for one, other in pairs),
                "tokens_per_second_to_library": spread(rate(one) / rate(other) for one, other in pairs),
            }
        )
    both = list(zip(heard[SERVER], base, strict=True))
    lost = [sum(each.rest for each in one) - sum(each.rest for each in other) for one, other in both]
    taken = [sum(each.rest for each in other) for _, other in both]
    return {
        "sides": sides,
        "round_ms": spread(1000 * seconds / rounds for seconds in taken),
        "server_adds_ms_a_round": spread(1000 * seconds / rounds for seconds in lost),
        "server_adds_share_of_a_round": spread(one / other for one, other in zip(lost, taken, strict=True)),
    }


def as_text(report: dict[str, Any]) -> str:
    rows = [
        {
            "": side["side"],
            "first token, ms": spread_text(side["first_token_ms"], 1),
            "tokens/s": rate_text(side["tokens_per_second"]),
            "first token to the library's": spread_text(side["first_token_to_library"], 2),
            "tokens/s to the library's": spread_text(side["tokens_per_second_to_library"], 2),
        }
        for side in report["sides"]
    ]
    share = {name: 100 * value for name, value in report["server_adds_share_of_a_round"].items()}
    added = (
        f"A round takes {spread_text(report['round_ms'], 2)} ms, and {spread_text(report['server_adds_ms_a_round'], 3)}"
    )
    asked = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in report["asked"].items())
    return (
        f"{asked}; {report['machine']}\n\n{rendered(rows)}\n\n{added} ms more with the server: {spread_text(share, 1)}%"
    )


@click.command(cls=OneLineFailures, epilog="\n\n".join(f"\b\n{part}" for part in __doc__.split("\n\n")[1:]))
@click.argument("artifact", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--new-tokens", type=click.IntRange(2), default=128, show_default=True, help="Of each answer.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Passes over all prompts.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    artifact: Path,
    new_tokens: int,
    repeats: int,
    as_json: bool,
) -> None:
    """Measure the library and eagle3-serve: time to first token, tokens per second.

    Decoding is greedy and ignores end tokens, so that all answers are equally long. The client's clock is used, so the
    server's figures include HTTP and its parsing. A prompt shares at most its beginning with the one before it.
    """
    with ExitStack() as stack:
        folder_of = stack.enter_context(with_tokenizer(artifact))
        model = stack.enter_context(load(folder_of))
        prompts = prompts_of(model, made_up=folder_of != artifact)
        sides: dict[str, Answer] = {LIBRARY: of_library(model, new_tokens)}
        sides[SERVER] = stack.enter_context(served(folder_of, new_tokens))
        heard = measure(sides, prompts, repeats)
        rounds = 0
        for prompt in prompts:
            stats = model.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True).stats
            rounds += stats.num_drafts + stats.num_undrafted
    asked = {"artifact": str(artifact), "prompts": len(prompts), "new_tokens": new_tokens, "passes": repeats}
    report = {"asked": asked, **report_of(heard, rounds), "machine": machine(None), "versions": versions()}
    click.echo(json.dumps(report) if as_json else as_text(report))


if __name__ == "__main__":
    main()
