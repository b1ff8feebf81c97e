"""Targets with recurrent layers give transformers' own logits for all calls of a runner. Rejected rows leave no trace,
and each fault put in by hand is found."""

import pytest
from recurrent_faults import SHARED, state_of_the_window_kept, updates_without_the_rows_before
from recurrent_walk import nan_outside_of_the_states, saved_pair, uninitialized, walk, walk_windows
from transformers import AutoConfig

SIZE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
FAMILIES = {
    "qwen3_5_text": {},
    "qwen3_5_moe_text": EXPERTS,
    "qwen3_next": EXPERTS,
    "olmo_hybrid": {"linear_num_key_heads": 4},
}
TOLERANCE, FAULTY = 3e-4, 1e-2
"""Bounds in standard deviations of the logits: the most that rounding moves one of thousands (transformers' own two
rules differ by 1e-4), and the least that a fault has to."""


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """transformers' model, and the target with the same weights."""
    config = AutoConfig.for_model(request.param, **SIZE | FAMILIES[request.param])
    return saved_pair(config, tmp_path_factory.mktemp(request.param))


@pytest.mark.first(1)
def test_recurrent_targets_give_transformers_logits_for_every_call_of_a_runner(pair):
    assert walk(*pair) < TOLERANCE


@pytest.mark.first(1)
def test_recurrent_targets_continue_from_any_accepted_part_of_any_window(pair):
    assert walk_windows(*pair) < TOLERANCE


def test_a_call_before_the_committed_position_gives_nan(pair):
    nan_outside_of_the_states(pair[1])


def test_uninitialized_states_of_recurrent_layers_are_not_read(pair):
    uninitialized(pair[1])
    assert walk(*pair, steps=8, seed=4) < TOLERANCE


FAULTS = (*SHARED, updates_without_the_rows_before, state_of_the_window_kept)


@pytest.mark.first(1)
@pytest.mark.parametrize("put_in", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("pair", ["qwen3_5_text"], indirect=True)
def test_each_fault_put_into_recurrent_layers_is_found(pair, put_in, monkeypatch):
    put_in(monkeypatch)
    assert walk(*pair) > FAULTY
