"""The chain length by itself: over scripted acceptance and costs it settles where tokens a second are the most."""

import random

import pytest

from eagle3.runner.adaptive_chain import AdaptiveChain
from eagle3.runner.contract import DECODE, DRAFT_DECODE, TARGET_VERIFY
from eagle3.runner.statistics import GenerationStats


class Machine:
    """A clock of its own: a step of the target, a window by its rows, a draft step, and the rate of acceptance."""

    def __init__(self, rate, step=1.0, row=0.02, draft=0.1, seed=0):
        self.rate, self.step, self.row, self.draft = rate, step, row, draft
        self._random = random.Random(seed)

    def run(self, chain, rounds):
        """The lengths of so many rounds of one generation."""
        stats, lengths = GenerationStats(), []
        chain.begin(stats)
        length = chain.next()
        for _ in range(rounds):
            accepted = 0
            while accepted < length and self._random.random() < self.rate:
                accepted += 1
            target = self.step * (1 + self.row * length)
            stats.method_seconds[TARGET_VERIFY if length else DECODE] += target
            chain.record(length, accepted)
            lengths.append(length)
            length = chain.next()
            drafting = self.draft * length
            stats.method_seconds[DRAFT_DECODE] += drafting
            stats.decode_seconds += target + drafting
        return lengths

    def speed(self, length):
        tokens = sum(self.rate**i for i in range(length + 1))
        return tokens / (self.step * (1 + self.row * length) + self.draft * length)


def usual(lengths):
    return max(set(lengths), key=lengths.count)


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("draft", [0.05, 0.15, 0.3])
def test_it_settles_where_tokens_a_second_are_the_most(rate, draft):
    machine, chain = Machine(rate, draft=draft), AdaptiveChain(7)
    machine.run(chain, 400)
    settled = usual(machine.run(chain, 200))
    assert machine.speed(settled) > 0.97 * max(machine.speed(length) for length in range(8))


def test_speculation_that_does_not_pay_goes_off_and_says_so_and_comes_back():
    chain, poor, good = AdaptiveChain(3), Machine(0.05, draft=0.3), Machine(0.9, draft=0.05)
    lengths = poor.run(chain, 600)
    assert usual(lengths[100:]) == 0 and lengths[100:].count(0) > 0.9 * 500
    assert "speculation is off: a round of" in chain.note
    assert usual(good.run(chain, 600)[300:]) == 3
    assert chain.note is None


def test_it_follows_a_change_of_the_text():
    chain = AdaptiveChain(7)
    assert usual(Machine(0.92, draft=0.03).run(chain, 300)[150:]) >= 6
    assert usual(Machine(0.4, draft=0.2).run(chain, 300)[150:]) <= 2
