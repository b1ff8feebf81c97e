"""Lengths and taps are settled from configurations alone."""

from types import SimpleNamespace

import pytest
from transformers import Gemma4TextConfig

from eagle3.export.config import ExportConfig
from eagle3.export.draft import read_draft
from eagle3.export.pairing import choose_taps
from eagle3.export.plan import make_plan, plan_methods
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


def lengths(chain_len, max_seq_len=4096, config=GEMMA4_31B, target="gemma4-31B", **flags):
    given = ExportConfig(target, output_dir=None, backend="xnnpack", **flags)
    methods = plan_methods(given, TARGETS[target], config, chain_len, max_seq_len)
    return {method.name: (method.min_len, method.max_len) for method in methods}


@pytest.mark.parametrize(("chain_len", "min_prefill"), [(1, 9), (3, 9), (7, 9), (8, 17), (15, 17)])
def test_prefill_begins_where_the_small_m_kernel_ends(chain_len, min_prefill):
    methods = lengths(chain_len)
    assert methods["prefill"] == (min_prefill, 1024)
    assert methods["target_verify"] == (2, chain_len + 1)
    assert methods["draft_decode"] == (1, 1024)
    assert "decode" not in methods


def test_prefill_never_passes_the_context_nor_the_sliding_window():
    assert lengths(3, max_seq_len=200)["prefill"] == (9, 199)
    with pytest.raises(ValueError, match="9 to 1024"):
        lengths(3, max_prefill=1025)


def test_decode_is_there_when_it_is_asked_for():
    assert lengths(3, with_decode=True)["decode"] == (1, 1)


def test_the_target_bounds_the_verify_window():
    with pytest.raises(ValueError, match="--chain-len 3 or less"):
        lengths(4, config=Gemma4TextConfig(sliding_window=4), max_seq_len=64)


def test_taps_come_from_flags_then_the_checkpoint_then_the_default():
    draft, config = read_draft(TINY.draft), SimpleNamespace(num_hidden_layers=60)
    assert choose_taps(draft, config, None, None) == (1, 3, 5)
    assert choose_taps(draft, config, (2, 30, 57), None) == (2, 30, 57)
    assert choose_taps(draft, config, (2, 30, 59), "output") == (3, 31, 60)
    silent = SimpleNamespace(aux_layers=None)
    assert choose_taps(silent, config, None, None) == (2, 30, 57)


def test_the_shipped_checkpoint_is_a_plan_of_its_own():
    plan = make_plan(ExportConfig("gemma4-tiny", output_dir=None, backend="xnnpack"))
    assert (plan.taps, plan.chain_len, plan.max_seq_len) == ((1, 3, 5), 3, 1024)
    assert (plan.bos_id, plan.eos_ids) == (2, (1,))
    assert plan.method("prefill").max_len == plan.sliding_window == 64
    assert plan.draft.draft_vocab_size == 1024 < plan.target_config.vocab_size == 2048
