"""The adaptive chain length is about as fast as the best fixed length, on simulated machines and texts."""

import re
from types import SimpleNamespace

import pytest
from loop_cases import PROMPT, greedy, right_at
from scripted import ScriptedSession, scripted_metadata
from simulated_rounds import Machine, Text, play, speed, to_the_best
from told_chain import Told

from eagle3.runner.loop.adaptive_chain import AcceptanceRates, AdaptiveChain, FixedChain
from eagle3.runner.loop.generation import generate


def adaptive(longest=7):
    return lambda: AdaptiveChain(longest)


@pytest.mark.first(2)
@pytest.mark.parametrize(("rate", "draft"), [(0.2, 0.15), (0.7, 0.05), (0.5, 0.3), (0.9, 0.15)])
def test_the_adaptive_length_is_within_three_percent_of_the_best_fixed_length(rate, draft):
    assert to_the_best(Machine(draft=draft), Text((rate,)), adaptive()) > 0.97


MACHINES = {
    "a little noise": (0.96, Machine(noise=0.1)),
    "much noise": (0.94, Machine(noise=0.2)),
    "short stalls all the time": (0.97, Machine(bursts=(0.05, 3, 10))),
    "a slow round in five": (0.975, Machine(bursts=(0.2, 1, 10))),
    "a slower draft later": (0.97, Machine(later=(1200, lambda length, seconds: seconds + 0.2 * length))),
    "a faster draft later": (0.97, Machine(draft=0.4, later=(1200, lambda length, seconds: seconds - 0.35 * length))),
    "a slower target later": (0.97, Machine(draft=0.3, later=(1200, lambda length, seconds: seconds + 2))),
    "slower windows of five rows later": (
        0.98,
        Machine(
            costs=[1, 1.3, 1.5, 1.6, 1.65, 2.6, 2.7, 2.8],
            later=(1200, lambda length, seconds: 1.2 * seconds if length >= 4 else seconds),
        ),
    ),
    "a target that is slow by rows": (0.97, Machine(row=1.0)),
    "a longest round that is one call": (0.97, Machine(costs=[1, 1.12, 1.24, 1.36, 1.48, 1.6, 1.72, 1.38])),
    "windows that cost by steps": (0.97, Machine(costs=[1, 1.6, 1.7, 1.8, 2.6, 2.7, 2.8, 2.9])),
    "a change of length that costs": (0.92, Machine(change=0.5)),
}


SHORT = ("much noise", "windows that cost by steps", "a slower draft later")


@pytest.mark.parametrize(
    ("name", "generation"), [*((name, None) for name in MACHINES), *((name, 24) for name in SHORT)]
)
def test_the_adaptive_length_is_fast_on_all_kinds_of_machines(name, generation):
    """With a ``generation`` of 24 tokens there are many short texts."""
    least, machine = MACHINES[name]
    assert to_the_best(machine, Text((0.8,)), adaptive(), generation=generation) > least


@pytest.mark.parametrize("machine", [Machine(draft=0.5), Machine(row=0.8, noise=0.15)], ids=["slow draft", "slow rows"])
def test_trying_speculation_that_does_not_pay_costs_few_percent(machine):
    assert to_the_best(machine, Text((0.3,)), adaptive()) > 0.97


@pytest.mark.parametrize(("phase", "least"), [(100, 0.95), (1000, 1.1)])
def test_the_adaptive_length_follows_a_text_that_is_easy_and_hard_in_turn(phase, least):
    """The adaptive length is faster than any fixed length if there is time to follow the text."""
    assert to_the_best(Machine(draft=0.2), Text((0.95, 0.1), phase), adaptive(), tokens=6000) > least


@pytest.mark.first(1)
@pytest.mark.parametrize(("rounds", "factor", "longest"), [(3, 10, 7), (1, 10, 3), (55, 2, 7)])
def test_the_adaptive_length_recovers_within_200_tokens_of_a_stall(rounds, factor, longest):
    text = Text((0.7,))
    best = max(speed(play(Machine(), text, FixedChain(length), 100)) for length in range(longest + 1))
    for first in range(0, 40, 3):
        played = play(Machine(stall=(first, rounds, factor)), text, AdaptiveChain(longest), 850)
        end = played[first + rounds - 1].end
        assert speed([each for each in played if end + 200 < each.end <= end + 500]) > 0.94 * best, first


def test_a_steady_slowdown_does_not_distort_the_costs():
    """Rounds of the other length lie between rounds of the present one, so that a drift cancels."""
    chain, clock = AdaptiveChain(1), 1.0
    for _ in range(40):
        length = chain.next()
        chain.record(length, 0, clock * (1.0 if length else 0.6))
        clock *= 1.02
    assert chain.length == 0
    costs = float(re.search(r"costs ([0-9.]+) steps", chain.note)[1])
    assert costs == pytest.approx(1 / 0.6, rel=0.03)


def test_no_chain_length_is_used_before_it_was_compared():
    chain, asked = AdaptiveChain(7), {7}
    for seed in range(5):
        for each in play(Machine(noise=0.2), Text((0.9, 0.3), 150), Spied(chain, asked), 300, seed):
            assert 0 <= each.length <= 7


class Spied:
    """A chain length that records the lengths it returned, and checks that a used length was compared."""

    def __init__(self, chain, asked):
        self._chain, self._asked, self.begin = chain, asked, chain.begin

    def next(self):
        assert self._chain.length in self._asked
        return self._chain.next()

    def record(self, proposed, accepted, seconds):
        self._asked.add(proposed)
        self._chain.record(proposed, accepted, seconds)


def test_while_speculation_is_off_a_chain_of_one_is_compared_next():
    """Its length is beside 0, although a longer chain promises more."""
    chain = AdaptiveChain(3)
    chain.length, chain._compared, chain._costs = 0, {0, 1, 2, 3}, [1, 2.0, 2.6, 3.0]
    assert chain.note.startswith("speculation is off: a round of 4 tokens costs 3.00 steps")
    assert chain._to_compare() == 1


def test_rounds_of_0_seconds_are_not_timed():
    """Rounds whose seconds are not known count as 0 s."""
    chain = AdaptiveChain(3)
    chain.begin()
    for _ in range(50):
        chain.record(chain.next(), 0, 0.0)
    assert chain.length == 3


def test_rounds_shortened_by_the_contexts_end_do_not_change_the_costs():
    assert to_the_best(Machine(), Text((0.8,)), adaptive(), generation=40, cut=10) > 0.975


def test_speculation_that_does_not_pay_is_turned_off_with_a_note_and_turned_on_again():
    chain, poor, good = AdaptiveChain(3), Machine(draft=0.3), Machine(draft=0.05)
    assert chain.note is None
    lengths = [each.length for each in play(poor, Text((0.05,)), chain, 600)]
    assert lengths[60:].count(0) > 0.9 * len(lengths[60:])
    words = chain.note.split()
    assert chain.note.startswith("speculation is off: a round of 2 tokens costs") and chain.note.endswith("tokens")
    assert float(words[9]) == pytest.approx(1.32, abs=0.02) and float(words[13]) == pytest.approx(1.05, abs=0.1)
    lengths = [each.length for each in play(good, Text((0.9,)), chain, 1500)]
    assert lengths[-100:].count(3) > 80
    assert re.fullmatch(
        r"after \d+ rounds the chain length is 3: a round of 4 tokens costs 1\.\d+ steps and yields 3\.\d+ tokens",
        chain.note,
    )


def test_what_was_chosen_is_said_after_twenty_rounds_on_a_machine_where_speculation_pays():
    chain, notes = AdaptiveChain(2), []
    chain.begin()
    for _ in range(20):
        length = chain.next()
        chain.record(length, length, 1 + 0.1 * length)
        notes.append(chain.note)
    assert notes[:-1] == [None] * 19
    assert notes[-1].startswith(
        "after 20 rounds the chain length is 2: a round of 3 tokens costs 1.20 steps and yields 2."
    )


# --- the recorded rounds


class Clock:
    """A clock that advances only in a session's methods and in the caller."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class TimedScript(ScriptedSession):
    """A scripted session whose draft calls take 1 second, and whose target takes 10 seconds per row."""

    def __init__(self, clock, *args):
        super().__init__(*args)
        self._clock = clock

    def _target(self, tokens, input_pos):
        self._clock.now += 10 * tokens.shape[1]
        return super()._target(tokens, input_pos)

    def draft_decode(self, *inputs):
        self._clock.now += 1
        return super().draft_decode(*inputs)


@pytest.mark.parametrize("whole", [False, True], ids=["three methods", "whole rounds"])
def test_a_rounds_seconds_exclude_the_callers_time(whole, monkeypatch):
    clock, chain = Clock(), Told([2, 3, 3, 3, 0, 1])
    monkeypatch.setattr("eagle3.runner.loop.rounds.time", SimpleNamespace(perf_counter=clock))
    session = TimedScript(clock, scripted_metadata(), greedy, right_at(0, 1))
    session.has_speculate = whole
    for _ in generate(session, PROMPT, max_new_tokens=24, chain=chain):
        clock.now += 1000
    lengths = [proposed for proposed, _, _ in chain.rounds]
    assert lengths[:7] == [2, 3, 3, 3, 0, 1, 2]
    seconds = [taken for _, _, taken in chain.rounds[:7]]
    assert seconds == [32, 43, 43, 43, 10, 21, 32]


# --- acceptance rates


def conditional(tokens):
    """Return the acceptance rates from the expected ``tokens`` by length."""
    steps = [after - before for before, after in zip(tokens, tokens[1:], strict=False)]
    return [step / before for before, step in zip([1.0, *steps], steps, strict=False)]


def test_acceptance_rates_converge_to_each_positions_rate():
    rates = AcceptanceRates(4)
    for index in range(3000):
        rates.record(4, (0, 1, 2, 4)[index % 4])
    assert conditional(rates.tokens()) == pytest.approx([3 / 4, 2 / 3, 1 / 2, 1], abs=0.1)


def test_a_position_never_reached_has_the_rate_of_the_one_before():
    rates = AcceptanceRates(4)
    for index in range(400):
        rates.record(2, 2 if index % 2 else 0)
    first, *others = conditional(rates.tokens())
    assert first == pytest.approx(0.5, abs=0.05)
    assert others == pytest.approx([1, 1, 1], abs=0.05)


def test_acceptance_rates_adapt_to_a_text_within_100_rounds_and_then_return_to_the_average():
    rates = AcceptanceRates(1)
    for _ in range(2000):
        rates.record(1, 1)
    for _ in range(100):
        rates.record(1, 0)
    assert rates.tokens()[1] < 1.2
    rates.forget_text()
    assert rates.tokens()[1] > 1.85
