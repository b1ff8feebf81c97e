"""Chunks of Mamba 2 have any number of blocks, the twin check finds a fault, and other recurrent layers are refused.
test_recurrent.py compares all calls of a runner."""

from pathlib import Path

import pytest
import torch
from family_configs import family_config
from recurrent_walk import saved_pair
from transformers import AutoConfig

from eagle3.export.twin.target import check_target
from eagle3.targets import TARGETS, decoder_layers
from eagle3.targets.mamba2 import BLOCK, Mamba2State

TOLERANCE = 1e-4  # of rounding, in standard deviations of the logits


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """transformers' model, and the target with the same weights."""
    return saved_pair(family_config("falcon_h1"), tmp_path_factory.mktemp("mamba2"))


@pytest.mark.parametrize("rows", [17, 16 + BLOCK - 1, 16 + BLOCK, 16 + BLOCK + 1, 16 + 3 * BLOCK])
def test_a_chunk_of_any_number_of_blocks_gives_transformers_logits(pair, rows):
    model, target = pair
    text = torch.randint(0, 96, (1, rows + 3), generator=torch.Generator().manual_seed(rows))
    with torch.no_grad():
        expected = model(text, use_cache=False).logits
        for start, end in ((0, rows), (rows, rows + 3)):
            state, _ = target(text[:, start:end], torch.arange(start, end), ())
            found = target.logits(state) - expected[:, start:end]
            assert float(found.abs().max() / expected.std()) < TOLERANCE


def steps_without_bias(monkeypatch):
    original = Mamba2State.steps
    monkeypatch.setattr(Mamba2State, "steps", lambda self, dt, bias: original(self, dt, torch.zeros_like(bias)))


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["bamba", "falcon_h1", "nemotron_h"])
def test_the_twin_check_passes_and_notices_a_fault(name, monkeypatch):
    given = TARGETS["auto"], "auto", Path("target"), family_config(name)
    assert check_target(*given)["logits"] < TOLERANCE
    steps_without_bias(monkeypatch)
    with pytest.raises(ValueError, match="would not compute"):
        check_target(*given)


@pytest.mark.parametrize("name", ["jamba", "zamba2", "minimax"])
def test_other_recurrent_layers_are_refused(name):
    config = AutoConfig.for_model(name)
    refused = "keeps a state that is not one of the gated delta rule, of Kimi's delta attention or of Mamba 2"
    with pytest.raises(ValueError, match=refused):
        decoder_layers.skeleton(config, 64)
