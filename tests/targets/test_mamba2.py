"""Targets with layers of Mamba 2 give transformers' own logits for all calls of a runner, and each fault put in by hand
is found."""

from pathlib import Path

import pytest
import torch
from family_configs import family_config
from recurrent_faults import SHARED, state_of_the_window_kept
from recurrent_walk import nan_outside_of_the_states, saved_pair, uninitialized, walk, walk_windows
from torch.nn import functional
from transformers import AutoConfig

from eagle3.export.twin.target import check_target
from eagle3.targets import TARGETS, decoder_layers, state_mixers
from eagle3.targets.mamba2 import BLOCK, Mamba2State
from eagle3.targets.state_mixers import attention_of, mixer_with_state

FAMILIES = ("bamba", "granitemoehybrid", "falcon_h1", "falcon_h1 with a norm", "nemotron_h")
TOLERANCE, FAULTY = 1e-4, 3e-3
"""Bounds in standard deviations of the logits: the most of rounding, and the least of a fault."""


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """transformers' model, and the target with the same weights."""
    return saved_pair(family_config(request.param), tmp_path_factory.mktemp("mamba2"))


@pytest.mark.first(2)
def test_targets_of_mamba_2_give_transformers_logits_for_every_call_of_a_runner(pair):
    assert walk(*pair) < TOLERANCE


@pytest.mark.first(1)
def test_targets_of_mamba_2_continue_from_any_accepted_part_of_any_window(pair):
    assert walk_windows(*pair) < TOLERANCE


def test_a_call_outside_of_the_states_gives_nan(pair):
    nan_outside_of_the_states(pair[1])


def test_uninitialized_states_of_mamba_2_are_not_read(pair):
    uninitialized(pair[1])
    assert walk(*pair, steps=8, seed=4) < TOLERANCE


@pytest.mark.parametrize("rows", [17, 16 + BLOCK - 1, 16 + BLOCK, 16 + BLOCK + 1, 16 + 3 * BLOCK])
@pytest.mark.parametrize("pair", ["falcon_h1"], indirect=True)
def test_a_chunk_of_any_number_of_blocks_gives_transformers_logits(pair, rows):
    model, target = pair
    text = torch.randint(0, 96, (1, rows + 3), generator=torch.Generator().manual_seed(rows))
    with torch.no_grad():
        expected = model(text, use_cache=False).logits
        for start, end in ((0, rows), (rows, rows + 3)):
            state, _ = target(text[:, start:end], torch.arange(start, end), ())
            found = target.logits(state) - expected[:, start:end]
            assert float(found.abs().max() / expected.std()) < TOLERANCE


def test_attention_and_state_of_each_layer_are_found(pair):
    model, _ = pair
    kinds = model.config.layer_types
    for layer, kind in zip(model.model.layers, kinds, strict=True):
        assert (mixer_with_state(layer) is not None) == (kind in ("linear_attention", "hybrid"))
        assert (attention_of(layer) is not None) == (kind in ("full_attention", "hybrid"))


def steps_without_bias(monkeypatch):
    original = Mamba2State.steps
    monkeypatch.setattr(Mamba2State, "steps", lambda self, dt, bias: original(self, dt, torch.zeros_like(bias)))


def steps_without_bounds(monkeypatch):
    monkeypatch.setattr(Mamba2State, "steps", lambda _self, dt, bias: functional.softplus(dt + bias))


def input_left_out(monkeypatch):
    """Fault: the outputs lack D x."""
    original = state_mixers._MAMBA2["mamba2_chunk_scan"]

    def scan(*given, D, **named):  # noqa: N803 - as transformers calls it
        return original(*given, D=torch.zeros_like(D), **named)

    monkeypatch.setitem(state_mixers._MAMBA2, "mamba2_chunk_scan", scan)


def single_row_without_gate(monkeypatch):
    original = state_mixers._MAMBA2["mamba2_selective_state_update"]

    def step(*given, z, **named):  # noqa: ARG001 - left out
        return original(*given, **named)

    monkeypatch.setitem(state_mixers._MAMBA2, "mamba2_selective_state_update", step)


def window_reads_undecayed(monkeypatch):
    """Fault: a window's rows read the state as it was before the first of them."""
    original = Mamba2State._window

    def window(self, given, state, masks):
        query, key, update, decay = given
        out, _ = original(self, given, torch.zeros_like(state), masks)
        return out + torch.bmm(self._for_values(query), state), update

    monkeypatch.setattr(Mamba2State, "_window", window)


def blocks_read_what_follows(monkeypatch):
    original = Mamba2State._between_blocks
    monkeypatch.setattr(Mamba2State, "_between_blocks", lambda self, *given: original(self, *given).roll(-1, 1))


def blocks_without_decay(monkeypatch):
    original = Mamba2State._between_blocks
    monkeypatch.setattr(
        Mamba2State, "_between_blocks", lambda self, changes, decay: original(self, changes, torch.zeros_like(decay))
    )


def other_changes_kept_than_computed(monkeypatch):
    original = Mamba2State._window

    def window(self, given, state, masks):
        out, update = original(self, given, state, masks)
        return out, update * 1.5

    monkeypatch.setattr(Mamba2State, "_window", window)


OWN = (
    (steps_without_bias, "bamba"),
    (steps_without_bounds, "bamba"),
    (steps_without_bounds, "nemotron_h"),
    (input_left_out, "granitemoehybrid"),
    (single_row_without_gate, "falcon_h1"),
    (window_reads_undecayed, "bamba"),
    (blocks_read_what_follows, "bamba"),
    (blocks_without_decay, "bamba"),
    (state_of_the_window_kept, "bamba"),
    (other_changes_kept_than_computed, "falcon_h1"),
)


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("put_in", "pair"),
    [*OWN, *((fault, "bamba") for fault in SHARED)],
    ids=lambda case: getattr(case, "__name__", case),
    indirect=["pair"],
)
def test_each_fault_put_into_layers_of_mamba_2_is_found(pair, put_in, monkeypatch):
    put_in(monkeypatch)
    assert walk(*pair) > FAULTY


TWIN_FAULTS = (
    ("bamba", steps_without_bias),
    ("granitemoehybrid", input_left_out),
    ("falcon_h1", blocks_without_decay),
    ("nemotron_h", window_reads_undecayed),
)


@pytest.mark.first(1)
@pytest.mark.parametrize(("name", "put_in"), TWIN_FAULTS, ids=[name for name, _ in TWIN_FAULTS])
def test_the_twin_check_passes_and_notices_a_fault(name, put_in, monkeypatch):
    config = family_config(name)
    given = TARGETS["auto"], "auto", Path("target"), config
    assert check_target(*given)["logits"] < TOLERANCE
    put_in(monkeypatch)
    with pytest.raises(ValueError, match="would not compute"):
        check_target(*given)


@pytest.mark.parametrize("name", ["jamba", "zamba2", "minimax", "zaya"])
def test_other_recurrent_layers_are_refused(name):
    config = AutoConfig.for_model(name)
    refused = "keeps a state that is not one of the gated delta rule, of Kimi's delta attention or of Mamba 2"
    with pytest.raises(ValueError, match=refused):
        decoder_layers.skeleton(config, 64)
