"""Estimates what speculation gains on the check's prompts, and which chain length would gain more."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3.runner.contract import DECODE, DRAFT_STEP, SPECULATE, TARGET_VERIFY, TWO_ROWS

BETTER = 1.05
"""A flag is named where the estimate of its gain is larger by this factor: these are a few short prompts."""

HELD = ((TARGET_VERIFY, SPECULATE, 1.0), (DECODE, TARGET_VERIFY, 1.25), (TWO_ROWS, TARGET_VERIFY, 1.25))
"""Pairs of calls of which the second computes all that the first does, and how much longer the first may take.
One row takes up to 1.1 times as long as four in some recipes of the CPU."""


@dataclass(frozen=True)
class Rounds:
    """Rounds of any chain length, estimated from those of one artifact."""

    rates: Sequence[float]
    """The share of the rounds in which the proposal was accepted, by position."""
    step_ms: Mapping[str, float]
    """Milliseconds of single calls; ``smoke_run`` prints them."""
    proposals: int = 1
    """Tokens that one call of the draft proposes."""

    @property
    def chain_len(self) -> int:
        return len(self.rates)

    @property
    def step(self) -> float:
        """The milliseconds of a token without speculation. Without ``decode``, those of a verify of two rows."""
        return self.step_ms.get(DECODE, self.step_ms[TWO_ROWS])

    def tokens(self, length: int) -> float:
        """Return the tokens of a round. Positions after the artifact's own are accepted as its last one, given those
        before it."""
        rates = list(self.rates)
        last = rates[-1] / rates[-2] if len(rates) > 1 and rates[-2] else rates[-1]
        while len(rates) < length:
            rates.append(rates[-1] * last)
        return 1 + sum(rates[:length])

    def milliseconds(self, length: int) -> float:
        """Return the time of a round. Rows beyond two cost the same each. A round that is one call is as much faster at
        any length."""
        calls = self._calls(length)
        return calls * self.step_ms[SPECULATE] / self._calls(self.chain_len) if SPECULATE in self.step_ms else calls

    def _calls(self, length: int) -> float:
        window = self.step_ms[TARGET_VERIFY]
        two = min(window, self.step_ms[TWO_ROWS])
        row = (window - two) / (self.chain_len - 1) if self.chain_len > 1 else 0.0
        return two + row * (length - 1) + self.step_ms[DRAFT_STEP] * (length if self.proposals == 1 else 1)

    def gain(self, length: int) -> float:
        """Return the ratio of tokens a second to those of decoding without speculation. It is at most the tokens of a
        round: a round holds a step, and is taken to last no shorter."""
        return self.tokens(length) * min(1.0, self.step / self.milliseconds(length))

    def contradiction(self) -> str:
        """Return which timed call took longer than one that holds it, as words; "" if none did."""
        taken = self.step_ms
        for part, whole, most in HELD:
            if part in taken and whole in taken and taken[part] > most * taken[whole]:
                return f"{part} took {taken[part]:.2f} ms and {whole}, which holds it, {taken[whole]:.2f} ms"
        return ""


def gain_record(rounds: Rounds) -> dict[str, Any]:
    """Return what ``export.json`` holds of the gain: no estimate where the timings contradict each other."""
    timed = {"step_ms": {name: round(taken, 3) for name, taken in rounds.step_ms.items()}}
    return timed if rounds.contradiction() else {"speculation_gain": round(rounds.gain(rounds.chain_len), 2), **timed}


def gain_lines(rounds: Rounds, fast_rows: int) -> list[str]:
    """Return a line on the gain and, where another chain length promises more, a line with its flag. Where the timings
    contradict each other the line says so.

    ``fast_rows``: the rows that the backend's kernels take at once, which bound the chain lengths that are proposed.
    """
    if contradiction := rounds.contradiction():
        return [
            f"what speculation gains is not known, the machine was likely busy: {contradiction}; type eagle3-bench "
            "with this artifact when it is idle"
        ]
    now = rounds.gain(rounds.chain_len)
    lines = [
        f"speculation gives about {now:.2f} times the tokens a second on these prompts: "
        f"{rounds.tokens(rounds.chain_len):.2f} tokens in a round of {rounds.milliseconds(rounds.chain_len):.2f} ms, a "
        f"step takes {rounds.step:.2f} ms"
    ]
    best = max(range(1, max(fast_rows, 2)), key=rounds.gain)
    if rounds.proposals == 1 and rounds.gain(best) > BETTER * now:
        lines.append(f"  --chain-len {best} would give about {rounds.gain(best):.2f} times, on text like this")
    return lines
