"""Estimates what speculation gains by acceptance rates and times of calls, and which chain length would gain more."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3.export.configuration.backends import BACKENDS
from eagle3.export.planning.plan import Plan
from eagle3.runner.contract import DECODE, DRAFT_STEP, SPECULATE, TARGET_VERIFY, TWO_ROWS

BETTER = 1.05
"""A flag is proposed only if its estimated gain is larger by this factor, since the prompts are few and short."""

HELD = ((TARGET_VERIFY, SPECULATE, 1.0), (DECODE, TARGET_VERIFY, 1.25), (TWO_ROWS, TARGET_VERIFY, 1.25))
"""Pairs of calls, of which the second computes all that the first does, with the most that the first may take as a
multiple of the second's time. In some recipes of the CPU one row takes up to 1.1 times as long as four."""

BUSY = 0.9
"""If the thread of the timed calls had less CPU time than this share of their wall time, other programs took the
processors. It computes, or waits for XNNPACK's other threads in a loop: 0.97 to 1.00 undisturbed, on two cores; 0.25 to
0.6 beside one to six other busy processes."""

SHARES = {"none": 1.0, "8da8w": 0.25, "8da4w": 0.14, "default": 0.28, "sensitive": 0.3, "checkpoint": 0.28}
"""The bytes of weights by recipe, as a share of float32's."""


@dataclass(frozen=True)
class Rounds:
    """Estimates rounds of any chain length from one artifact's acceptance rates and times."""

    rates: Sequence[float]
    """For each position of the chain, the share of the rounds in which its proposal was accepted."""
    step_ms: Mapping[str, float]
    """The milliseconds of single calls, which ``smoke_run`` prints."""
    proposals: int = 1
    """The tokens that one call of the draft proposes."""
    cpu_share: float | None = None
    """The CPU time of the thread of the timed calls as a share of their wall time; None if the calls do not compute on
    the CPU."""

    @property
    def chain_len(self) -> int:
        return len(self.rates)

    @property
    def step(self) -> float:
        """The milliseconds of a token without speculation. If the artifact lacks ``decode``, it is the time of a verify
        window of two rows."""
        return self.step_ms.get(DECODE, self.step_ms[TWO_ROWS])

    def tokens(self, length: int) -> float:
        """Return the mean number of tokens of a round. Positions after the artifact's last one are assumed to be
        accepted as often as that one, given that all before them were."""
        rates = list(self.rates)
        last = rates[-1] / rates[-2] if len(rates) > 1 and rates[-2] else rates[-1]
        while len(rates) < length:
            rates.append(rates[-1] * last)
        return 1 + sum(rates[:length])

    def milliseconds(self, length: int) -> float:
        """Return the milliseconds of a round. Every row after the second is assumed to take the same time. A fused
        round is assumed to be faster than its calls by the same factor at any length."""
        calls = self._calls(length)
        return calls * self.step_ms[SPECULATE] / self._calls(self.chain_len) if SPECULATE in self.step_ms else calls

    def _calls(self, length: int) -> float:
        window = self.step_ms[TARGET_VERIFY]
        two = min(window, self.step_ms[TWO_ROWS])
        row = (window - two) / (self.chain_len - 1) if self.chain_len > 1 else 0.0
        return two + row * (length - 1) + self.step_ms[DRAFT_STEP] * (length if self.proposals == 1 else 1)

    def gain(self, length: int) -> float:
        """Return tokens per second as a multiple of those without speculation. It is at most the number of tokens of a
        round, since a round contains a step and cannot be shorter."""
        return self.tokens(length) * min(1.0, self.step / self.milliseconds(length))

    def doubt(self) -> str:
        """Return the sign that other programs disturbed the timed calls: too little CPU time, or a call that took
        longer than one that contains it. Returns "" if there is none."""
        if self.cpu_share is not None and self.cpu_share < BUSY:
            return f"the timed calls had a processor for {self.cpu_share:.0%} of their time"
        taken = self.step_ms
        for part, whole, most in HELD:
            if part in taken and whole in taken and taken[part] > most * taken[whole]:
                return f"{part} took {taken[part]:.2f} ms and {whole}, which holds it, {taken[whole]:.2f} ms"
        return ""


def gain_record(rounds: Rounds) -> dict[str, Any]:
    """Return the entry of ``export.json`` on the gain. The gain is None if the times are in doubt."""
    return {
        "speculation_gain": None if rounds.doubt() else round(rounds.gain(rounds.chain_len), 2),
        "step_ms": {name: round(taken, 3) for name, taken in rounds.step_ms.items()},
        "cpu_share": None if rounds.cpu_share is None else round(rounds.cpu_share, 2),
    }


def gain_lines(rounds: Rounds, fast_rows: int) -> list[str]:
    """Return a line on the gain and, if another chain length promises more, a line with its flag. If the times are
    in doubt, the only line says so.

    ``fast_rows`` is the number of rows that the backend's kernels take at once. It bounds the proposed chain lengths.
    """
    if doubt := rounds.doubt():
        return [
            f"what speculation gains is not known, the machine was likely busy: {doubt}; type eagle3-bench with this "
            "artifact when it is idle"
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


def best_chain_len(plan: Plan, rates: Sequence[float]) -> int:
    """Return the chain length that gives the most tokens in the time of a round, as estimated from the bytes that its
    steps read."""
    if not rates or rates[0] <= 0:
        return 1
    backend, head = BACKENDS[plan.config.backend], plan.draft.headers.items()
    target = sum(each.elements for each in plan.target_headers.values()) * SHARES.get(plan.qlinear, 1.0)
    multiplied = sum(each.elements for name, each in head if not name.startswith("embed_tokens"))
    draft = multiplied * SHARES.get(plan.draft_qlinear, 1.0)
    rounds = Rounds(rates, {TARGET_VERIFY: target, TWO_ROWS: target, DRAFT_STEP: draft}, plan.proposals)
    most = min(backend.fast_rows.get(plan.qlinear, backend.window_rows[0]) - 1, plan.draft.longest_chain or 15)
    return max(range(1, max(most, 1) + 1), key=rounds.gain)
