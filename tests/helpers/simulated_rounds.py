"""Simulates a machine and a text: the seconds of a round, and the number of accepted proposals.

A speed is the expected tokens of the rounds divided by their undisturbed seconds, so luck, noise and stalls matter only
if they change the chosen lengths.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from eagle3.runner.loop.adaptive_chain import FixedChain


@dataclass(frozen=True)
class Text:
    """A text with acceptance ``rates``, which apply in turn for ``phase`` tokens each. A rate is the same at every
    position of a chain."""

    rates: tuple[float, ...]
    phase: int = 1

    def rate(self, token: int) -> float:
        return self.rates[token // self.phase % len(self.rates)]


class Round(NamedTuple):
    """A round: its expected ``tokens``, its undisturbed ``seconds``, and ``end``, the number of tokens of the text so
    far."""

    length: int
    tokens: float
    seconds: float
    end: int


@dataclass
class Machine:
    """A machine on which a round takes a step of the target, some time for each further row, and draft steps, in
    seconds."""

    step: float = 1.0
    row: float = 0.02
    draft: float = 0.1
    costs: Sequence[float] | None = None
    """The seconds of a round of each length, in place of these three."""
    change: float = 0.0
    """Seconds that the first round of another length than the one before takes in addition."""
    later: tuple[int, Callable[[int, float], float]] | None = None
    """From this token on, what becomes of (length, seconds)."""
    noise: float = 0.0
    """Standard deviation of the time's logarithm."""
    bursts: tuple[float, int, float] | None = None
    """The share of rounds at which a disturbance begins, its rounds at the most, and the factor of their time."""
    stall: tuple[int, int, float] | None = None
    """The only disturbance: its first round, its rounds, and the factor of their time."""

    def seconds(self, length: int, token: int) -> float:
        seconds = self.costs[length] if self.costs else self.step * (1 + self.row * length) + self.draft * length
        return self.later[1](length, seconds) if self.later and token >= self.later[0] else seconds


def play(
    machine: Machine, text: Text, chain, tokens: int, seed: int = 0, generation: int | None = None, cut: int = 0
) -> list[Round]:
    """Return the rounds of ``tokens`` tokens, in generations of ``generation`` tokens, as ``runner.loop`` would request
    them. In the last 2 ``cut`` tokens of each generation a round proposes at most 1 token, as at the context's end."""
    random, rounds, slow_rounds, before = Random(seed), [], 0, None
    end, start = 0, None
    while end < tokens:
        if start is None or generation and end - start >= generation:
            chain.begin()
            start = end
        length = chain.next()
        if generation and end - start >= generation - 2 * cut:
            length = min(length, 1)
        rate, accepted = text.rate(end), 0
        while accepted < length and random.random() < rate:
            accepted += 1
        seconds = machine.seconds(length, end) + machine.change * (before not in (None, length))
        taken = seconds * random.lognormvariate(0, machine.noise)
        if machine.bursts:
            often, longest, factor = machine.bursts
            slow_rounds = max(slow_rounds - 1, 0) or random.randint(1, longest) * (random.random() < often)
            taken *= factor if slow_rounds else 1
        if machine.stall and 0 <= len(rounds) - machine.stall[0] < machine.stall[1]:
            taken *= machine.stall[2]
        end, before = end + accepted + 1, length
        rounds.append(Round(length, sum(rate**i for i in range(length + 1)), seconds, end))
        chain.record(length, accepted, taken)
    return rounds


def speed(rounds: Sequence[Round]) -> float:
    """Return the tokens per second."""
    return sum(each.tokens for each in rounds) / sum(each.seconds for each in rounds)


def to_the_best(
    machine: Machine, text: Text, make_chain, tokens=3000, after=600, longest=7, seeds=4, **options
) -> float:
    """Return the speed of ``make_chain()`` from token ``after`` on, divided by that of the best fixed length."""

    def of(make, seeds: int) -> float:
        rounds = [play(machine, text, make(), tokens, seed, **options) for seed in range(seeds)]
        return speed([each for one in rounds for each in one if each.end > after])

    return of(make_chain, seeds) / max(of(lambda length=k: FixedChain(length), 1) for k in range(longest + 1))
