"""``scripts/bench/profile_steps.py``: the parts of a step add up to it."""

import pytest
from profile_steps import BETWEEN, BETWEEN_NODES, BETWEEN_OPERATORS, parts, profile

from eagle3.runner.contract import DECODE, TARGET_VERIFY


def test_the_profiled_parts_of_each_step_add_up_to_it(artifact):
    found = profile(artifact)
    assert list(found) == [TARGET_VERIFY, DECODE]
    for total, shown in found.values():
        assert sum(ms for _, _, ms in shown) == pytest.approx(total)
        counts = {name: count for name, count, _ in shown}
        assert counts["Fully Connected (NC, F32) GEMM"] > 10 and "llama::custom_sdpa.out" in counts


def test_profiled_parts_are_means_over_the_same_calls():
    events = [
        ("Fully Connected (NC, F32) GEMM #1", True, [1.0, 1.0, 1.0, 90.0]),
        ("Fully Connected (NC, F32) GEMM #2", True, [2.0, 2.0, 2.0, 2.0]),
        ("DELEGATE_CALL", False, [4.0, 4.0, 4.0, 93.0]),
        ("native_call_argmax.out", False, [1.0, 1.0, 1.0, 1.0]),
        ("OPERATOR_CALL", False, [1.5, 1.5, 1.5, 1.5]),
        ("Method::execute", False, [5.0, 6.0, 6.0, 95.0]),
    ]
    total, found = parts(events)
    assert total == 6
    assert {name: (count, ms) for name, count, ms in found} == {
        "Fully Connected (NC, F32) GEMM": (2, 3),
        "argmax.out": (1, 1),
        BETWEEN_NODES: (0, 1),
        BETWEEN_OPERATORS: (0, 0.5),
        BETWEEN: (0, 0.5),
    }
