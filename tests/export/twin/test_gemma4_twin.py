"""The twin check of Gemma 4 E2B, E4B and 26B-A4B passes, and it finds faults put in by hand.

A fault of ``per_layer_input_scale``, which scales both per-layer inputs, is not tried: the norm after them cancels it.
"""

import pytest
from gemma4_sizes import SIZES, config_of
from torch import nn

from eagle3.export.draft.kinds.gemma4_assistant.twin import states_are_shared
from eagle3.export.twin.comparison import TOLERANCE
from eagle3.export.twin.target import compare, make_twin
from eagle3.targets import TARGETS, gemma4

LAYERS = {"gemma4-E2B": 7, "gemma4-E4B": 7, "gemma4-26B-A4B": 6}
"""The layers of the twins. With transformers 5.24 the last layers of the third store keys that nothing reuses, which
makes no more of them."""


@pytest.mark.first(1)
@pytest.mark.parametrize("name", SIZES)
def test_the_twin_of_a_published_gemma4_shape_agrees(name):
    twin = make_twin(config_of(name))
    modes = set(twin.config.kv_sharing_modes)
    assert modes == {None, "store", "reuse"} or ("26B" in name and "reuse" not in modes)
    assert twin.config.num_hidden_layers == LAYERS[name] and twin.tokens > 2 * max(twin.lengths)
    assert compare(TARGETS[name], twin, seed=0).difference <= TOLERANCE / 3


def test_layers_that_store_keys_for_no_other_layer_are_not_a_separate_kind():
    """The test sets this up as transformers 5.24 does it, for any installed version."""
    config = config_of("gemma4-26B-A4B")
    with states_are_shared(type(config)):
        assert config.kv_sharing_modes[-2:] == ["store", "store"]
        assert make_twin(config).config.num_hidden_layers == LAYERS["gemma4-26B-A4B"]


def shares_the_first(target) -> None:
    for layer in target.layers:
        if layer.self_attn.is_kv_shared_layer:
            kind = layer.self_attn.layer_type
            first = next(each.self_attn for each in target.layers if each.self_attn.layer_type == kind)
            layer.self_attn.kept = [first.kv_attention]


def shifts_inputs(target) -> None:
    model = target.causal_lm.model
    project = model.project_per_layer_inputs
    model.project_per_layer_inputs = lambda *given: project(*given).roll(1, dims=2)


def halves_mlps(target) -> None:
    for layer in target.layers:
        if layer.self_attn.is_kv_shared_layer:
            layer.mlp.down_proj.weight[:, layer.mlp.intermediate_size // 2 :] = 0


def leaves_out(target, name: str) -> None:
    for module in target.modules():
        if hasattr(module, name):
            getattr(module, name).fill_(1)


FAULTS = {
    "the first layer's keys": ("gemma4-E2B", shares_the_first),
    "another layer's inputs": ("gemma4-E4B", shifts_inputs),
    "half of a wide MLP": ("gemma4-E2B", halves_mlps),
    "no scale of routers": ("gemma4-26B-A4B", lambda target: leaves_out(target, "scale")),
    "no norm before experts": (
        "gemma4-26B-A4B",
        lambda target: [setattr(layer, "pre_feedforward_layernorm_2", nn.Identity()) for layer in target.layers],
    ),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_twin_check_finds_each_fault_in_gemma4(fault):
    name, break_ = FAULTS[fault]

    class Broken:
        max_forward_len = staticmethod(TARGETS[name].max_forward_len)

        def module(self):
            return self

        def load(self, *given):
            target = gemma4.load(*given)
            break_(target)
            return target

    assert compare(Broken(), make_twin(config_of(name)), seed=0).difference > 10 * TOLERANCE
