"""Lengths and taps are planned from configurations only."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from random_checkpoints import save_random_draft
from transformers import Gemma4TextConfig, Qwen3NextConfig

from eagle3.export.checkpoints.target_config import special_ids
from eagle3.export.configuration.backends import BACKENDS
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.draft.kinds import P_EAGLE
from eagle3.export.draft.reading import read_draft
from eagle3.export.planning.memory import state_bytes
from eagle3.export.planning.methods import fused_rounds, plan_methods
from eagle3.export.planning.plan import make_plan
from eagle3.export.planning.taps import choose_taps
from eagle3.targets import TARGETS

TINY = TARGETS["gemma4-tiny"]
GEMMA4_31B = Gemma4TextConfig(
    num_hidden_layers=60,
    hidden_size=5376,
    sliding_window=1024,
    max_position_embeddings=262144,
    num_global_key_value_heads=4,
    attention_k_eq_v=True,
)

GEMMA4_31B_TINY = SimpleNamespace(hidden_size=64, vocab_size=96)


def lengths(chain_len, max_seq_len=4096, config=GEMMA4_31B, target="gemma4-31B", backend="xnnpack", **flags):
    given = ExportConfig(target, output_dir=None, backend=backend, **flags)
    methods = plan_methods(given, TARGETS[target], config, chain_len, max_seq_len)
    return {method.name: (method.min_len, method.max_len) for method in methods}


@pytest.mark.parametrize(("chain_len", "min_prefill"), [(3, 9), (7, 9), (8, 17)])
def test_prefill_begins_where_the_small_m_kernel_ends(chain_len, min_prefill):
    methods = lengths(chain_len)
    assert methods["prefill"] == (min_prefill, 1024)
    assert methods["target_verify"] == (2, chain_len + 1)
    assert methods["draft_decode"] == (1, 1024)
    assert "decode" not in methods
    assert lengths(3, max_seq_len=200)["prefill"] == (9, 199)
    with pytest.raises(ValueError, match="9 to 1024"):
        lengths(3, max_prefill=1025)


def test_speculate_is_exported_if_the_backend_gains_by_it_or_on_request():
    draft = read_draft(TINY.draft)

    def planned(backend, target_bytes, **flags):
        return fused_rounds(ExportConfig("gemma4-tiny", None, backend=backend, **flags), draft, 3, target_bytes)

    tiny, large = 10_000_000, 8_000_000_000
    assert [planned("cuda", size) for size in (tiny, large)] == [(True, ())] * 2
    assert [planned("xnnpack", size) for size in (tiny, large)] == [(True, ()), (False, ())]
    assert planned("cuda", tiny, speculate=False) == planned("xnnpack", tiny, speculate=False) == (False, ())
    assert planned("xnnpack", large, speculate=True) == (True, ())
    config = ExportConfig("gemma4-tiny", output_dir=None, cuda_arch="sm_90", chain_len=5)
    method = make_plan(config).method("speculate")
    assert (method.min_len, method.max_len) == (6, 6)


def test_a_peagle_with_more_rows_than_the_small_m_kernel_has_no_fused_rounds():
    draft = replace(read_draft(TINY.draft), kind=P_EAGLE)
    quantized = ExportConfig("gemma4-tiny", output_dir=None, draft_qlinear="default")
    unquantized = replace(quantized, draft_qlinear=None)
    assert fused_rounds(quantized, draft, 4, 1)[0] and fused_rounds(unquantized, draft, 5, 1)[0]
    there, [line] = fused_rounds(quantized, draft, 5, 1)
    assert not there and "a P-EAGLE of 5 tokens has 10 rows in that method, but its quantized linears take 8" in line
    with pytest.raises(ValueError, match="--speculate: a P-EAGLE .*: type --no-speculate"):
        fused_rounds(replace(quantized, speculate=True), draft, 5, 1)
    assert fused_rounds(quantized, draft, 5, 1, verify_rows=9)[0]  # the kernels take 16


@pytest.mark.parametrize(
    ("window", "said"), [(2, "leaves 2 rows, .*--draft-window 4"), (8, "leaves chunks of 8 tokens")]
)
def test_a_draft_window_that_is_too_short_for_the_methods_is_refused_with_the_flag(window, said):
    with pytest.raises(ValueError, match=f"--draft-window {window} {said}"):
        make_plan(ExportConfig("gemma4-tiny", backend="xnnpack", draft_window=window))


def test_decode_and_forward_are_exported_on_request_and_forward_takes_short_chunks_from_one_row_on():
    assert lengths(3, with_decode=True)["decode"] == (1, 1)
    assert "forward" not in lengths(3)
    assert lengths(3, with_forward=True)["forward"] == (1, 128)
    assert lengths(3, with_forward=True, max_prefill=100)["forward"] == (1, 100)


def test_a_backend_decides_which_verify_windows_it_supports(monkeypatch):
    monkeypatch.setitem(BACKENDS, "xnnpack", replace(BACKENDS["xnnpack"], window_rows=(3, 5)))
    assert [lengths(chain)["prefill"][0] for chain in (2, 3, 4)] == [4, 6, 6]
    assert lengths(9, backend="cuda")["prefill"][0] == 17
    with pytest.raises(ValueError, match="the target and --backend xnnpack take 2 to 5: type --chain-len 4 or less"):
        lengths(5)


def test_taps_come_from_flags_then_the_checkpoint_then_the_default():
    draft, config = read_draft(TINY.draft), SimpleNamespace(num_hidden_layers=60, hidden_size=256)
    assert choose_taps(draft, config, None, None).layers == (1, 3, 5)
    assert choose_taps(draft, config, (2, 30, 57), None).layers == (2, 30, 57)
    assert choose_taps(draft, config, (2, 30, 59), "output").layers == (3, 31, 60)
    silent = replace(draft, aux_layers=None)
    assert choose_taps(silent, config, None, None).layers == (2, 30, 57)
    with pytest.raises(ValueError, match="6 layers"):
        choose_taps(silent, SimpleNamespace(num_hidden_layers=6, hidden_size=256), None, None)


def test_the_shipped_checkpoint_can_be_planned_without_further_flags():
    plan = make_plan(ExportConfig("gemma4-tiny", output_dir=None, backend="xnnpack"))
    assert (plan.taps, plan.chain_len, plan.max_seq_len) == ((1, 3, 5), 3, 1024)
    assert (plan.bos_id, plan.eos_ids) == (2, (1,))
    assert plan.method("prefill").max_len == plan.sliding_window == 64
    assert plan.draft.draft_vocab_size == 1024 < plan.target_config.vocab_size == 2048


def test_a_head_without_norm_before_residual_gets_a_warning(tmp_path):
    draft = save_random_draft(tmp_path / "draft", GEMMA4_31B_TINY)
    file = draft / "config.json"
    config = json.loads(file.read_text())
    assert read_draft(draft).warnings == ()
    file.write_text(json.dumps({key: value for key, value in config.items() if key != "norm_before_residual"}))
    (warning,) = read_draft(draft).warnings
    assert "norm_before_residual" in warning and read_draft(draft).norm_before_residual is False


def test_stop_tokens_come_from_the_generation_config_then_the_top_of_a_multimodal_config(tmp_path):
    text = SimpleNamespace(eos_token_id=1, bos_token_id=None, vocab_size=262144)
    (tmp_path / "config.json").write_text('{"eos_token_id": [1, 106], "text_config": {"eos_token_id": 1}}')
    assert special_ids(tmp_path, text) == (-1, (1, 106))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert special_ids(tmp_path, text) == (-1, (1, 106))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 106, 50]}')
    assert special_ids(tmp_path, text) == (-1, (1, 106, 50))


@pytest.mark.parametrize(
    ("flags", "proposed"),
    [
        ({"backend": "xnnpack"}, True),
        ({"backend": "xnnpack", "qlinear": "none"}, False),
        ({"backend": "cuda", "cuda_arch": "sm_90"}, False),
    ],
)
def test_a_recipe_is_proposed_where_a_large_target_would_keep_float32_by_default(flags, proposed, monkeypatch):
    config = ExportConfig("gemma4-tiny", output_dir=None, **flags)
    assert not [line for line in make_plan(config).warnings if "keeps float32" in line]
    monkeypatch.setattr("eagle3.export.planning.plan.LARGE", 1_000_000)
    found = [line for line in make_plan(config).warnings if "keeps float32" in line]
    assert len(found) == proposed and all("type --qlinear 8da8w for 5.3 MB" in line for line in found)


def test_the_states_of_recurrent_layers_are_counted():
    """The bytes are those of two states, a ring of 16 changes, a ring of 19 inputs of the convolution and three saved
    inputs, in float32."""
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    config = Qwen3NextConfig(num_hidden_layers=3, layer_types=kinds, linear_value_head_dim=24, num_experts=4, **heads)
    channels, changes = 2 * 2 * 16 + 4 * 24, 2 * 16 + 4 * 24 + 4
    layer = 4 * (2 * 4 * 16 * 24 + 16 * changes + (19 + 3) * channels)
    positions = 2 * 8  # committed and saved
    for length in (64, 4096):
        assert state_bytes(TARGETS["auto"], config, length, torch.float32) == 2 * layer + positions
