"""eagle3-bench --profile on the shipped artifact reports parts of a step that add up to it."""

import json
from dataclasses import replace

import pytest
import torch
from commands import fail_command, run_command
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.exir.lowered_backend_module import get_lowered_backend_modules
from torch import nn

from eagle3.runner.artifact.opening import open_artifact
from eagle3.runner.artifact.xnnpack_graph import read_graphs
from eagle3.runner.bench.cli import main
from eagle3.runner.bench.profile import BETWEEN, BETWEEN_NODES, BETWEEN_OPERATORS, calls, parts
from eagle3.runner.bench.profile import profile as profile_of
from eagle3.runner.bench.report import method_text, profile_text
from eagle3.runner.contract import DECODE, DRAFT_DECODE, PREFILL, SPECULATE, TARGET_VERIFY
from eagle3.runner.hosts.opening import open_session


class Clamped(nn.Module):
    """A clamp at one end, as gpt-oss clamps its gates."""

    def forward(self, x):
        return x.clamp(max=7.0) * x


@pytest.fixture(scope="module")
def profile(artifact):
    return json.loads(run_command(main, artifact, "--profile", "--json").stdout)


def test_the_profiled_parts_of_each_method_add_up_to_it(profile):
    assert list(profile["methods"]) == [PREFILL, TARGET_VERIFY, DRAFT_DECODE, DECODE]
    for method in profile["methods"].values():
        assert sum(part["ms"] for part in method["parts"]) == pytest.approx(method["traced_ms"])
        counts = {part["name"]: part["count"] for part in method["parts"]}
        products = method["nodes"]["FullyConnected"]
        assert counts["Fully Connected (NC, F32) GEMM"] == products > 10
        assert "llama::custom_sdpa.out" in counts


def test_a_profiled_window_reads_the_same_weights_as_a_token(profile):
    verify, decode = (profile["methods"][name] for name in (TARGET_VERIFY, DECODE))
    assert verify["weight_bytes"] == decode["weight_bytes"] > 4 * 2048 * 256  # the lm_head's
    assert verify["rows"] == 4
    assert verify["multiply_adds"] == 4 * decode["multiply_adds"] == decode["weight_bytes"]  # a weight has 4 bytes


def test_a_profiled_fused_round_reads_and_multiplies_as_much_as_its_steps(family_exports):
    methods = profile_of(family_exports / "llama3.1-8B" / "out")["methods"]
    whole, verify, draft = (methods[name] for name in (SPECULATE, TARGET_VERIFY, DRAFT_DECODE))
    assert whole["rows"] == verify["rows"] == 3 and sum(part["ms"] for part in whole["parts"]) > 0
    assert whole["weight_bytes"] == verify["weight_bytes"] + 2 * draft["weight_bytes"]  # draft calls of 3 slots and 1
    # Not exactly equal: rotary embeddings have a row per head, and a chain computes the ids of one row.
    by_row = verify["multiply_adds"] + (3 + 1) * draft["multiply_adds"]
    assert whole["multiply_adds"] == pytest.approx(by_row, rel=0.2)
    assert "speculate, 3 rows: " in method_text(SPECULATE, whole)


def test_the_profile_text_names_the_slowest_parts(profile):
    text = profile_text(profile)
    assert "decode, 1 row: " in text
    assert "Fully Connected (NC, F32) GEMM" in text


def test_profiled_parts_are_means_over_the_same_calls():
    events = [
        ("Fully Connected (NC, F32) GEMM #1", True, [1.0, 1.0, 1.0, 90.0]),
        ("Fully Connected (NC, F32) GEMM #2", True, [2.0, 2.0, 2.0, 2.0]),
        ("DELEGATE_CALL", False, [4.0, 4.0, 4.0, 93.0]),
        ("native_call_argmax.out", False, [1.0, 1.0, 1.0, 1.0]),
        ("OPERATOR_CALL", False, [1.5, 1.5, 1.5, 1.5]),
        ("Method::execute", False, [5.0, 6.0, 6.0, 95.0]),
    ]
    found = parts(events)
    assert found["traced_ms"] == 6
    assert {part["name"]: (part["count"], part["ms"]) for part in found["parts"]} == {
        "Fully Connected (NC, F32) GEMM": (2, 3),
        "argmax.out": (1, 1),
        BETWEEN_NODES: (0, 1),
        BETWEEN_OPERATORS: (0, 0.5),
        BETWEEN: (0, 0.5),
    }


def test_prompts_with_profile_are_a_usage_error(artifact):
    for given in ([], ["--profile", "--prompts", __file__]):
        assert "give one of --prompts and --profile" in fail_command(main, artifact, *given)[1]


def test_the_longest_profiled_chunk_fits_into_a_short_context(artifact):
    """A chunk may be as long as the context but one token."""
    session = open_session(open_artifact(artifact))
    session.metadata = replace(session.metadata, max_seq_len=80)  # chunks have 64 rows, a step is timed at 40
    session.prefill = lambda tokens, positions: (tokens.shape[1], positions.tolist())
    rows, positions = calls(session)[PREFILL].run(session)
    assert rows == len(positions) == 64 and positions[-1] == 79


def test_an_xnnpack_clamp_with_one_bound_is_read():
    program = torch.export.export(Clamped(), (torch.ones(1, 8),))
    edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    (delegate,) = get_lowered_backend_modules(edge.exported_program().graph_module)
    assert read_graphs([delegate.processed_bytes]).nodes == {"Clamp": 1, "Multiply": 1}
