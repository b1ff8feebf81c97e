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

    def tokens(self, length):
        return sum(self.rate**i for i in range(length + 1))

    def seconds(self, length):
        return self.step * (1 + self.row * length) + self.draft * length


def usual(lengths):
    return max(set(lengths), key=lengths.count)


def expected(machines, lengths):
    """Tokens a second of rounds of these lengths, by what ``machines`` accept and take on average."""
    pairs = list(zip(machines, lengths, strict=True))
    return sum(m.tokens(length) for m, length in pairs) / sum(m.seconds(length) for m, length in pairs)


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("draft", [0.05, 0.15, 0.3])
def test_it_is_within_three_percent_of_the_best_length(rate, draft):
    shares = []
    for seed in range(8):
        machine, chain = Machine(rate, draft=draft, seed=seed), AdaptiveChain(7)
        machine.run(chain, 400)
        lengths = machine.run(chain, 200)
        best = max(machine.tokens(length) / machine.seconds(length) for length in range(8))
        shares.append(expected([machine] * 200, lengths) / best)
    assert sum(shares) / len(shares) > 0.97


def test_texts_by_turns_go_faster_than_with_any_one_length():
    easy, hard, chain = Machine(0.92, seed=1), Machine(0.2, seed=2), AdaptiveChain(7)
    machines, lengths = [], []
    for machine in (easy, hard) * 10:
        lengths += machine.run(chain, 40)
        machines += [machine] * 40
    best = max(expected(machines, [length] * len(machines)) for length in range(8))
    assert expected(machines, lengths) > 1.1 * best


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
