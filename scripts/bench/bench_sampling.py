"""Measures the cost of sampling: its share of an artifact's round, and microseconds per round over a large vocabulary.

    python scripts/bench/bench_sampling.py out [--prompts scripts/prompts.jsonl] [--json]

A round chooses tokens for a verify window of the artifact's chain length + 1 rows over the target's ids, and as many
proposals as the chain length over the draft's ids.
"""

import argparse
import json
import os
import time
from dataclasses import replace

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from eagle3.runner import load
from eagle3.runner.contract import Metadata
from eagle3.runner.hosts.session import Step
from eagle3.runner.rounds.choice import Choice, Greedy
from eagle3.runner.rounds.loop import complete
from eagle3.runner.rounds.statistics import GenerationStats
from eagle3.runner.sampling.options import Sampling
from eagle3.runner.sampling.sampler import Sampler

SAMPLINGS = {
    "greedy": Sampling(),
    "temperature 0.7": Sampling(temperature=0.7, seed=1),
    "temperature 1.0": Sampling(temperature=1.0, seed=1),
    "temperature 0.7, top-k 64, top-p 0.95": Sampling(temperature=0.7, top_k=64, top_p=0.95, seed=1),
    "temperature 0.8, repetition penalty 1.1": Sampling(temperature=0.8, repetition_penalty=1.1, seed=1),
}
VOCABULARY, DRAFT_VOCABULARY, ROUNDS, REPEATS = 262_144, 32_000, 50, 3


class Timed:
    """Wraps a ``Choice`` and sums up the seconds that it takes."""

    def __init__(self, choice: Choice):
        self._choice, self.seconds = choice, 0.0

    def __getattr__(self, name: str) -> object:
        method = getattr(self._choice, name)
        if not callable(method):
            return method

        def call(*given: object) -> object:
            start = time.perf_counter()
            result = method(*given)
            self.seconds += time.perf_counter() - start
            return result

        setattr(self, name, call)
        return call


def in_an_artifact(folder: str, prompts: str) -> dict[str, dict[str, float]]:
    """Return the acceptance length, and the share of the rounds' time spent on choosing tokens: the median of
    ``REPEATS`` passes, with the samplings in turn."""
    model = load(folder)
    with open(prompts, encoding="utf-8") as file:
        ids = [model.encode(json.loads(line)["prompt"]) for line in file]
    shares, lengths = {name: [] for name in SAMPLINGS}, {}
    for _ in range(REPEATS):
        for name, sampling in SAMPLINGS.items():
            stats, seconds = GenerationStats(), 0.0
            for prompt in ids:
                timed = Timed(Greedy() if sampling.plain else Sampler(sampling, model.metadata, prompt))
                complete(model.session, prompt, choice=timed, stats=stats)
                seconds += timed.seconds
            shares[name].append(seconds / stats.seconds)
            lengths[name] = stats.mean_acceptance_length
    return {
        name: {"share": round(sorted(each)[REPEATS // 2], 4), "mean_acceptance_length": round(lengths[name], 3)}
        for name, each in shares.items()
    }


def at_a_large_vocabulary(metadata: Metadata) -> dict[str, float]:
    """Return the microseconds per round of each sampling: 4 rows of 262,144 logits and 3 rows of 32,000, normally
    distributed with a standard deviation of 3 and some peaks."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(VOCABULARY, generator=generator)[:DRAFT_VOCABULARY].sort().values
    metadata = replace(metadata, vocab_size=VOCABULARY, draft_vocab_size=DRAFT_VOCABULARY, draft_ids=ids, proposals=1)

    def logits(rows: int, vocabulary: int) -> torch.Tensor:
        made = 3 * torch.randn(1, rows, vocabulary, generator=generator)
        made[:, :, :20] += 10
        return made

    target, draft = Step(None, None, logits(4, VOCABULARY)), Step(None, None, logits(1, DRAFT_VOCABULARY))
    taken = {}
    for name, sampling in SAMPLINGS.items():
        if sampling.plain:
            continue
        sampler, times = Sampler(sampling, metadata, [1, 2, 3]), []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            chosen = sampler.target(target, [5, 6, 7])
            sampler.accept(chosen[0, :2].tolist())
            chain = []
            for _ in range(3):
                chain.append(sampler.draft(draft, chain))
            times.append(time.perf_counter() - start)
        taken[name] = round(1e6 * sorted(times)[ROUNDS // 2], 1)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact")
    parser.add_argument("--prompts", default="scripts/prompts.jsonl")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    shares = in_an_artifact(given.artifact, given.prompts)
    microseconds = at_a_large_vocabulary(load(given.artifact, defer=True).metadata)
    if given.json:
        print(json.dumps({"rounds": shares, "microseconds_a_round_at_262144": microseconds}))
        return
    for name, found in shares.items():
        large = f", {microseconds[name]:,.0f} us a round at {VOCABULARY:,} ids" if name in microseconds else ""
        length = found["mean_acceptance_length"]
        print(f"{name:<42} {found['share']:>6.1%} of a round, acceptance length {length:.2f}{large}")


if __name__ == "__main__":
    main()
