"""The check after an export estimates the gain of speculation correctly, and proposes a better chain length."""

import json
import os
import subprocess
import sys
import time

import pytest

from eagle3.export.checks.gain import Rounds, gain_lines, gain_record
from eagle3.export.configuration.backends import BACKENDS, FAST_ROWS_OF_AVX2, FAST_ROWS_OF_AVX512
from eagle3.runner.loop.step_times import round_steps, step_milliseconds, with_cpu_share

FLAT = {"target_verify": 10.0, "two_rows": 10.0, "draft_step": 1.0}
"""Milliseconds where a window of 4 rows costs what one of 2 does."""


def test_expected_tokens_extend_the_last_positions_rate():
    rounds = Rounds([0.9, 0.72, 0.54], FLAT)
    assert [rounds.tokens(length) for length in (1, 3)] == pytest.approx([1.9, 3.16])
    assert rounds.tokens(5) == pytest.approx(3.16 + 0.54 * 0.75 + 0.54 * 0.75**2)


def test_the_time_of_a_round_is_a_verify_and_its_draft_steps():
    assert Rounds([0.5] * 3, FLAT).milliseconds(3) == 13
    assert Rounds([0.5] * 3, FLAT | {"target_verify": 12}).milliseconds(3) == 15
    assert Rounds([0.5] * 3, FLAT | {"target_verify": 12}).milliseconds(1) == 11
    assert Rounds([0.5] * 3, FLAT | {"target_verify": 12}).milliseconds(5) == 10 + 4 + 5
    assert Rounds([0.5] * 3, FLAT, proposals=3).milliseconds(3) == 11
    assert Rounds([0.5], FLAT).milliseconds(1) == 11


def test_a_fused_round_is_assumed_equally_faster_at_any_chain_length():
    assert Rounds([0.5] * 3, FLAT | {"speculate": 6.5}).milliseconds(3) == 6.5
    assert Rounds([0.5] * 3, FLAT | {"speculate": 6.5}).milliseconds(6) == 8


def test_the_gain_is_relative_to_decode_if_the_artifact_has_it():
    rounds = Rounds([0.9, 0.8, 0.6], FLAT)
    assert rounds.gain(3) == pytest.approx(3.3 * 10 / 13)
    assert Rounds(rounds.rates, FLAT | {"decode": 8.0}).gain(3) == pytest.approx(3.3 * 8 / 13)
    assert gain_record(rounds)["speculation_gain"] == 2.54


def test_a_longer_chain_is_proposed_if_rows_cost_nothing_and_proposals_are_accepted():
    first, second = gain_lines(Rounds([0.95, 0.9, 0.85], FLAT), fast_rows=7)
    assert "about 2.85 times" in first and "3.70 tokens in a round of 13.00 ms, a step takes 10.00 ms" in first
    assert second.startswith("  --chain-len 6 would give about 3.")
    assert len(gain_lines(Rounds([0.95, 0.9, 0.85], FLAT), fast_rows=4)) == 1
    assert len(gain_lines(Rounds([0.95, 0.9, 0.85], FLAT, proposals=3), fast_rows=7)) == 1


def test_a_shorter_chain_is_proposed_if_hardly_any_proposal_is_accepted():
    _, line = gain_lines(Rounds([0.4, 0.1, 0.02], FLAT | {"draft_step": 2}), fast_rows=7)
    assert line.startswith("  --chain-len 1 would give about 1.1")


def test_no_estimated_gain_exceeds_the_tokens_of_a_round():
    rounds = Rounds([1.0] * 3, {"target_verify": 10.0, "two_rows": 4.0, "draft_step": 0.5, "decode": 10.0})
    assert [rounds.gain(length) for length in (1, 3)] == [2, pytest.approx(40 / 11.5)]
    assert all(rounds.gain(length) <= length + 1 for length in range(1, 16))


@pytest.mark.parametrize(
    ("taken", "part", "whole"),
    [
        ({"speculate": 6.5}, "target_verify took 10.00 ms", "speculate, which holds it, 6.50 ms"),
        ({"decode": 13.0}, "decode took 13.00 ms", "target_verify, which holds it, 10.00 ms"),
        ({"two_rows": 13.0}, "two_rows took 13.00 ms", "target_verify, which holds it, 10.00 ms"),
    ],
)
def test_contradictory_timings_give_no_gain_and_are_named(taken, part, whole):
    rounds = Rounds([0.9, 0.9, 0.9], FLAT | taken)
    (line,) = gain_lines(rounds, fast_rows=7)
    assert part in line and whole in line and "busy" in line and "eagle3-bench" in line and "times" not in line
    assert gain_record(rounds) == {"speculation_gain": None, "step_ms": FLAT | taken, "cpu_share": None}


def test_times_of_a_busy_machine_give_neither_a_gain_nor_advice(session):
    """The machine is really busy: beside the calls run four processes for each processor."""
    rates, steps = [0.9, 0.9, 0.9], round_steps(session)
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4 * (os.cpu_count() or 1))]
    try:
        time.sleep(0.2)
        _, share = with_cpu_share(lambda: step_milliseconds(steps, repeats=3))
    finally:
        for each in others:
            each.kill()
            each.wait()
    assert 0 < share < 0.9
    rounds = Rounds(rates, FLAT, cpu_share=share)  # times without a contradiction
    assert gain_record(rounds) == {"speculation_gain": None, "step_ms": FLAT, "cpu_share": round(share, 2)}
    (line,) = gain_lines(rounds, fast_rows=7)
    assert f"a processor for {share:.0%} of their time" in line and "busy" in line and "--chain-len" not in line
    idle = Rounds(rates, FLAT, cpu_share=0.95)
    assert gain_record(idle)["speculation_gain"] and len(gain_lines(idle, fast_rows=7)) == 2


def test_one_row_may_take_slightly_longer_than_four_rows():
    assert "speculation_gain" in gain_record(Rounds([0.5] * 3, FLAT | {"decode": 11.5, "speculate": 10.5}))


@pytest.mark.parametrize("fast_rows", [FAST_ROWS_OF_AVX2, FAST_ROWS_OF_AVX512])
def test_every_cpu_recipe_has_a_known_number_of_fast_rows(fast_rows):
    cpu = BACKENDS["xnnpack"]
    assert set(fast_rows) == set(cpu.recipes) and cpu.fast_rows in (FAST_ROWS_OF_AVX2, FAST_ROWS_OF_AVX512)
    assert all(2 <= rows <= cpu.window_rows[-1] for rows in fast_rows.values())


def test_the_check_of_an_export_records_the_gain(artifact):
    checked = json.loads((artifact / "export.json").read_text())["check"]
    assert set(checked["step_ms"]) == {"target_verify", "two_rows", "draft_step", "decode"}
    assert all(taken > 0 for taken in checked["step_ms"].values())
    step, verify, draft = (checked["step_ms"][name] for name in ("decode", "target_verify", "draft_step"))
    gain = checked["mean_acceptance_length"] * min(1, step / (verify + 3 * draft))
    disturbed = Rounds([0.5] * 3, checked["step_ms"], cpu_share=checked["cpu_share"]).doubt()
    assert checked["speculation_gain"] == (None if disturbed else pytest.approx(gain, rel=0.02))
