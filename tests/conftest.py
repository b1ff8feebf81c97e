"""Fixtures over the random checkpoints."""

import pytest
import torch
from random_checkpoints import random_model

from eagle3.targets import TARGETS
from eagle3.targets.attention import EagerAttention


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Target name to (transformers model, its folder), saved as transformers saves it."""
    made = {}

    def make(name: str):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            model = random_model(name)
            model.save_pretrained(folder)
            made[name] = model, folder
        return made[name]

    return make


@pytest.fixture
def eager_target(checkpoints):
    """Target name to a fresh eager ``TapTarget`` over the random checkpoint."""

    def load(name: str, max_seq_len: int = 128):
        model, folder = checkpoints(name)
        return TARGETS[name].load(folder, model.config, max_seq_len, torch.float32, EagerAttention)

    return load
