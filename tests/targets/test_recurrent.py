"""Targets with layers of each recurrent rule give transformers' own logits for all calls of a runner. Rejected rows
leave no trace."""

import pytest
import torch
from family_configs import family_config
from recurrent_calls import CLOSE, D_K, HEADS, KEY_HEADS, Rule, gap
from recurrent_walk import nan_outside_of_the_states, saved_pair, uninitialized, walk, walk_windows
from torch import nn

from eagle3.targets.gated_delta import GatedDeltaState
from eagle3.targets.mamba2 import Mamba2State
from eagle3.targets.recurrent import RecurrentPositions
from eagle3.targets.state_mixers import attention_of, mixer_with_state

DELTA = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid")
KIMI, MAMBA2 = ("kimi_linear", "bailing_hybrid"), ("bamba", "falcon_h1", "nemotron_h", "granitemoehybrid")
FAMILIES = ("qwen3_next", "kimi_linear", "bamba")  # one of each rule, for a quick run
FAMILIES += tuple(name for name in (*DELTA, *KIMI, *MAMBA2, "falcon_h1 with a norm") if name not in FAMILIES)
TOLERANCE = 3e-4
"""The most that rounding moves one of thousands of logits, in their standard deviations (transformers' own two rules
differ by 1e-4)."""


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """transformers' model, and the target with the same weights, whatever ran before: near-ties of routing flip."""
    torch.manual_seed(0)
    return saved_pair(family_config(request.param), tmp_path_factory.mktemp("recurrent"))


@pytest.mark.first(3)
def test_recurrent_targets_give_transformers_logits_for_every_call_of_a_runner(pair):
    assert walk(*pair) < TOLERANCE


@pytest.mark.first(3)
def test_recurrent_targets_continue_from_any_accepted_part_of_any_window(pair):
    assert walk_windows(*pair) < TOLERANCE


@pytest.mark.first(3)
def test_a_call_outside_of_the_states_gives_nan_and_uninitialized_states_are_not_read(pair):
    nan_outside_of_the_states(pair[1])
    uninitialized(pair[1])
    assert walk(*pair, steps=8, seed=4) < TOLERANCE


@pytest.mark.first(3)
def test_attention_and_state_of_each_layer_are_found(pair):
    model, _ = pair
    for layer, kind in zip(model.model.layers, model.config.layer_types, strict=True):
        assert (mixer_with_state(layer) is not None) == (kind in ("linear_attention", "hybrid"))
        assert (attention_of(layer) is not None) == (kind in ("full_attention", "hybrid"))


class DeltaMixer:
    num_k_heads, num_v_heads, head_k_dim, head_v_dim = KEY_HEADS, HEADS, D_K, 24
    conv1d = nn.Conv1d(2 * KEY_HEADS * D_K + HEADS * 24, 2 * KEY_HEADS * D_K + HEADS * 24, 4, groups=4)


class MambaMixer:
    n_groups, num_heads, ssm_state_size, head_dim, time_step_limit = KEY_HEADS, HEADS, D_K, 24, None
    conv1d = DeltaMixer.conv1d


@pytest.mark.parametrize("strongest", [1.0, 400.0, 1e4])
@pytest.mark.parametrize(("of", "mixer"), [(GatedDeltaState, DeltaMixer), (Mamba2State, MambaMixer)])
def test_strong_decays_of_a_row_leave_the_others_exact(of, mixer, strongest):
    """A chunk and a window behind it. A difference of two sums of decays would be off by 5e-4 at -400."""
    rule, state, positions = Rule(of is GatedDeltaState, strongest=strongest), of(mixer), RecurrentPositions()
    given = [each for each in rule.rows(90, 3) if each is not None]
    right = rule.expected(rule.rows(90, 3))
    for start, end in ((0, 80), (80, 90)):
        rows = positions.rows(torch.arange(start, end))
        found = state(tuple(each[:, start:end] for each in given), rows)
        positions.advance(rows)
        assert gap(found, right[:, start:end]) < CLOSE
