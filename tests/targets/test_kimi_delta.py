"""Kimi's delta attention: the operators of the CPU, strong decays, the published configuration, and the twin check
with a fault. test_recurrent.py compares all calls of a runner."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from family_configs import family_config
from recurrent_walk import saved_pair, walk
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention

from eagle3.export import ExportConfig
from eagle3.export.checkpoints.target_config import read_target_config
from eagle3.export.configuration.backends import BACKENDS
from eagle3.export.lowering.xnnpack.lowering import use_cpu_recurrence
from eagle3.export.planning.methods import check_states
from eagle3.export.twin.shrink import shrink
from eagle3.export.twin.target import check_target
from eagle3.targets import TARGETS, state_mixers
from eagle3.targets.gated_delta import KimiDeltaState, delta_rule
from eagle3.targets.recurrent import RecurrentPositions

FAMILIES = ("kimi_linear", "bailing_hybrid")
TOLERANCE = 1e-4  # of rounding, in standard deviations of the logits


@pytest.mark.first(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_operators_of_the_cpu_give_transformers_logits(name, tmp_path):
    model, target = saved_pair(family_config(name), tmp_path)
    use_cpu_recurrence(target)
    assert walk(model, target) < TOLERANCE


def random_rows(rows: int, strongest: float) -> tuple[torch.Tensor, ...]:
    """Return queries, keys, values, log decays down to ``-strongest`` and beta of 3 heads of 8 channels, as
    transformers' layers give them."""
    generator = torch.Generator().manual_seed(rows)
    query, key, value = torch.randn(3, 1, rows, 3, 8, generator=generator)
    decay = -strongest * torch.rand(1, rows, 3, 8, generator=generator) ** 4
    return query, key, value, decay, torch.rand(1, rows, 3, generator=generator)


class Mixer:
    """The sizes of a layer with those rows."""

    num_heads, head_dim = 3, 8
    conv1d = torch.nn.Conv1d(72, 72, 4, groups=72)


@pytest.mark.parametrize("on_the_cpu", [False, True], ids=["reference", "CPU's operator"])
@pytest.mark.parametrize("strongest", [0.5, 30.0, 400.0])
def test_strong_decays_of_a_channel_leave_the_others_exact(strongest, on_the_cpu):
    """A chunk and a window behind it. ``exp(-400)`` is 0 in float32, and its inverse is infinite."""
    rows, state = 90, torch.nn.ModuleList([KimiDeltaState(Mixer())])
    if on_the_cpu:
        use_cpu_recurrence(state)
        assert type(state[0]) is not KimiDeltaState
    given = random_rows(rows, strongest)
    named = {"g": given[3], "beta": given[4], "initial_state": None, "output_final_state": False}
    expected, _ = recurrent_kimi_delta_attention(*given[:3], **named, use_qk_l2norm_in_kernel=True)
    positions = RecurrentPositions()
    for start, end in ((0, 80), (80, 90)):
        shared = positions.rows(torch.arange(start, end))
        found, _ = delta_rule(*(each[:, start:end] for each in given), (state[0], shared), use_qk_l2norm_in_kernel=True)
        positions.advance(shared)
        assert float((found - expected[:, start:end]).abs().max() / expected.std()) < 1e-5


def one_decay_for_all_channels(monkeypatch):
    """Fault: each head has the mean of its channels' decays, as a layer of the gated delta rule would."""

    def rule(query, key, value, g, *given, **named):
        return delta_rule(query, key, value, g.mean(-1, keepdim=True).expand_as(g), *given, **named)

    for name in state_mixers._KIMI_RULES:
        monkeypatch.setitem(state_mixers._KIMI, name, rule)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_twin_check_passes_and_notices_a_fault(name, monkeypatch):
    given = TARGETS["auto"], "auto", Path("target"), family_config(name)
    assert check_target(*given)["logits"] < TOLERANCE
    one_decay_for_all_channels(monkeypatch)
    with pytest.raises(ValueError, match="would not compute"):
        check_target(*given)


PUBLISHED = {
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [layer for layer in range(1, 28) if layer % 4 and layer != 27],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "model_max_length": 1048576,
}
"""The fields of the published configuration that do not have transformers' names or defaults."""


def test_the_published_configuration_is_read_and_shrunk(tmp_path):
    """Its sizes stand in a dictionary, which would override those of a small copy."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    config = read_target_config(tmp_path, "kimi-linear-48B-A3B")
    full = [at for at, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert full == [3, 7, 11, 15, 19, 23, 26] and config.linear_num_heads == 32
    small = shrink(config)
    assert small.linear_num_heads == 4 and small.linear_head_dim == 128
    assert small.layer_types == ["linear_attention"] * 3 + ["full_attention"]


@pytest.mark.parametrize("backend", [name for name, each in BACKENDS.items() if each.states])
def test_a_backend_computes_kimi_or_refuses_it_in_a_line(backend, monkeypatch):
    config = ExportConfig("auto", checkpoint=Path("target"), draft="none", backend=backend)
    check_states(config, family_config("kimi_linear"))
    monkeypatch.setitem(BACKENDS, backend, replace(BACKENDS[backend], states=frozenset()))
    with pytest.raises(ValueError, match=r"has layers with Kimi's delta attention.*type --backend \w+") as refused:
        check_states(config, family_config("kimi_linear"))
    assert "\n" not in str(refused.value)
