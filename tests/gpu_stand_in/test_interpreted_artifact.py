"""gemma4-tiny's CUDA artifact runs without a GPU: its unchanged libraries on a strict stand-in for the driver, its
kernels in Triton's interpreter."""

import json
import subprocess
import sys
from collections import Counter

import pytest
import torch
from cuda_artifact import ARCHS
from gpu_expected import EagerGreedy, config_of, eagerly
from gpu_stages import NEAR_TIE, equal_proposals, first_difference
from places import GPU_STAND_IN

from eagle3.runner.contract import DRAFT_DECODE, EXPORT_RECORD, SPECULATE, TARGET_VERIFY
from eagle3.runner.system.gpus import BY_ARCH, launch_on

ASKED = [
    {"prompt": [2, 318, 825, 66, 1140, 11, 492, 304, 275, 365], "max_new_tokens": 6},  # def read_config(path):
    {"prompt": [2, 318, 825], "max_new_tokens": 4, "graphs": False, "arch": "sm_80"},  # shorter than min-prefill
]
ASKED += [ASKED[0] | {"max_new_tokens": 2, "graphs": False, "arch": "sm_120"}]
pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: scripts/gpu/gpu_run.py"),
]


LEAST = 0.9
"""The least share of equal proposals. Some proposals of a random head are near-ties, which bfloat16 decides."""


def compare(expected: dict, found: dict) -> list[str]:
    """Return the faults of one prompt's generation."""
    ways = "fused_rounds", "three_methods"
    wrong = [f"{way}: {name}" for way in ways for name in ("token_ids", "stats") if found[way][name] != expected[name]]
    same, every = equal_proposals(expected["proposals"], found["proposals"])
    return [*wrong, *(["proposals"] if same < LEAST * every else [])]


def interpreted(artifact, asked: list[dict]) -> dict:
    command = [sys.executable, GPU_STAND_IN / "interpreted_artifact.py", artifact]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found(cuda_artifact):
    return interpreted(cuda_artifact, ASKED)


@pytest.fixture(scope="module")
def greedy(cuda_artifact):
    return EagerGreedy(config_of(cuda_artifact))


def test_interpreted_fused_rounds_and_three_methods_give_the_eager_greedy_tokens(found, greedy):
    """On three GPUs, by their own images of one artifact."""
    for asked, generation in zip(ASKED, found["generations"], strict=True):
        pair = generation["fused_rounds"], generation["three_methods"]
        assert pair[0] == pair[1] and len(pair[0]["token_ids"]) == asked["max_new_tokens"]
        parting = first_difference(pair[0]["token_ids"], *greedy(asked["prompt"], asked["max_new_tokens"]))
        assert parting is None or parting[1] <= NEAR_TIE
    assert found["generations"][0]["fused_rounds"]["stats"]["mean_acceptance_length"] > 2


def test_an_interpreted_dialogue_goes_on_in_a_new_session_as_one_that_never_stopped(cuda_artifact):
    turns = ASKED[0]["prompt"], [66, 1140]
    found = interpreted(cuda_artifact, [{"turns": turns, "max_new_tokens": 2}])
    (said,) = found["generations"]
    assert said["resumed"] == said["never stopped"][1:] and said["reused"][0] >= len(turns[0])
    assert found["races"] == "" and found["journal"] == [] and set(found["left"].values()) == {0}


def test_interpreted_rounds_and_proposals_equal_the_modules(found, greedy):
    for asked, generation in zip(ASKED, found["generations"], strict=True):
        assert not compare(eagerly(greedy, asked["prompt"], asked["max_new_tokens"]), generation)


@pytest.mark.parametrize("fault", ["token_ids", "stats", "proposals"])
def test_a_difference_from_the_module_is_named(found, greedy, fault):
    expected, generation = eagerly(greedy, ASKED[1]["prompt"], ASKED[1]["max_new_tokens"]), found["generations"][1]
    if fault == "proposals":
        calls = generation["proposals"]
        for other in [[token + 1 for token in call] for call in calls], [], calls[: len(calls) // 2]:
            assert compare(expected, generation | {fault: other}) == [fault]
    else:
        other = generation["fused_rounds"] | {fault: None}
        assert compare(expected, generation | {"fused_rounds": other}) == [f"fused_rounds: {fault}"]


def test_the_interpreted_artifact_makes_no_refused_call_and_leaks_nothing(found):
    assert found["journal"] == [] and set(found["left"].values()) == {0}


def test_methods_launch_kernels_over_the_recorded_grids(found, cuda_artifact):
    """The record has the launches that ``scripts/gpu/gpu_cost.py`` counts, on each GPU."""
    recorded = json.loads((cuda_artifact / EXPORT_RECORD).read_text())["launches"]
    assert found["launched"].keys() == set(ARCHS)
    for arch, launched in found["launched"].items():
        for name in (TARGET_VERIFY, DRAFT_DECODE, SPECULATE):
            grids, rows = Counter(), str(recorded[name]["rows"])
            for launch in recorded[name]["launches"]:
                grids[str(launch_on(launch, BY_ARCH[arch].arch)["grid"])] += launch["count"]
            assert launched[name][rows] == grids, (arch, name)


def test_no_launch_has_a_race(found):
    assert found["races"] == ""


def test_records_with_prefetches_and_early_launches_give_the_eager_greedy_tokens(records_artifact):
    """The stand-in refuses a prefetch of bytes that the next matmul does not read, and a launch that does not wait."""
    asked = ASKED[0] | {"max_new_tokens": 3}
    found = interpreted(records_artifact, [asked])
    greedy = EagerGreedy(config_of(records_artifact))
    generation = found["generations"][0]["three_methods"]
    assert found["generations"][0]["fused_rounds"] == generation
    assert not compare(eagerly(greedy, asked["prompt"], asked["max_new_tokens"]), found["generations"][0])
    parting = first_difference(generation["token_ids"], *greedy(asked["prompt"], asked["max_new_tokens"]))
    assert len(generation["token_ids"]) == 3 and (parting is None or parting[1] <= NEAR_TIE)
    assert found["races"] == "" and found["journal"] == [] and set(found["left"].values()) == {0}


@pytest.mark.whole
def test_other_orders_of_programs_and_delayed_stores_give_the_same_bits(cuda_artifact):
    """The rows of a call are on both sides of a ring's end, and of the end of a part of the attention."""
    command = [sys.executable, GPU_STAND_IN / "artifact_races.py", cuda_artifact, "reversed", "delayed"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "nothing found" in done.stdout, done.stdout + done.stderr
