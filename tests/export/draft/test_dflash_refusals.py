"""DFlash heads are refused if they belong to another target or kind, or if no trainer's code computes them."""

import shutil

import pytest
import torch
from commands import run_command
from dflash_heads import GOLDEN, SLIDING, TARGET, changed, plan_of, random_target, save_pair, z_lab
from random_checkpoints import save_random_dflash
from refusals import refusal
from safetensors.torch import load_file
from transformers import LlamaConfig

from eagle3.export.cli import main as export_main
from eagle3.export.draft.reading import read_draft
from eagle3.export.planning.pairing import check_pair


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("dflash"))


@pytest.fixture(scope="module")
def target():
    return random_target()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": 80, "head_dim": 20}, "192 features, no multiple of the target's hidden size 80"),
        ({"hidden_size": 32, "head_dim": 8}, "192 features = 6 taps of 32, but 3 aux layers"),
        ({"vocab_size": 128}, "vocabulary of 96, the target has 128"),
    ],
)
def test_a_head_of_another_target_is_refused_with_both_values(changes, says, folder, target):
    config = LlamaConfig(**target.config.to_dict() | changes)
    assert says in refusal(check_pair, read_draft(folder / "full"), config, (0, 2, 3))


def head_of(name: str, into, keys=None, tensors=None, **layer):
    head = changed(GOLDEN / name, into, keys, tensors, layer)
    check_pair(read_draft(head), TARGET, (1, 3, 4))


@pytest.mark.parametrize(
    ("name", "tensors", "says"),
    [
        ("dflash_full", {"fc.weight": None}, "has no fc.weight: this is no DFlash head"),
        ("dflash_full", {"layers.1.self_attn.k_norm.weight": None}, "lacks layers.1.self_attn.k_norm.weight"),
        ("dflash_full", {"layers.2.input_layernorm.weight": torch.ones(64)}, "has no place for"),
        ("dflash_full", {"layers.0.self_attn.q_proj.weight": torch.zeros(64, 128)}, "implies [64, 64]"),
        ("dflash_full", {"d2t": torch.zeros(48).long() + 70}, "d2t maps draft ids"),
        ("xpress", {"refiner_head.mix_l": None}, "lacks refiner_head.mix_l"),
        ("xpress", {"refiner_head.causal_tril": torch.ones(5, 5)}, "has refiner_head.causal_tril, which a xPress"),
        ("xpress", {"refiner_head.readout.weight": torch.zeros(96, 8)}, "is [96, 8], but config.json implies [48, 8]"),
    ],
)
def test_tensors_that_a_head_does_not_have_are_refused(name, tensors, says, tmp_path):
    assert says in refusal(head_of, name, tmp_path / "head", tensors=tensors)


@pytest.mark.parametrize(
    ("name", "keys", "says"),
    [
        ("dflash_full", {"mask_token_id": None}, "has no mask_token_id"),
        ("dflash_full", {"mask_token_id": 96}, "mask_token_id is 96, but the embedding has 96 rows"),
        ("dflash_full", {"block_size": 1}, "block_size is 1, but must be a whole number from 2 on"),
        ("dflash_full", {"block_size": 4}, "speculative_tokens is 4, but a block of block_size 4 proposes 3"),
        ("dflash_full", {"aux_hidden_state_layer_ids": None}, "has no aux_hidden_state_layer_ids"),
        ("dflash_full", {"draft_vocab_size": 40}, "draft_vocab_size is 40 in config.json, but lm_head.weight has 48"),
        ("dflash_full", {"sample_from_anchor": 1}, "sample_from_anchor is 1, but must be true or false"),
        ("dflash2", {"conv_group_size": 24}, "conv_group_size 24 must divide hidden_size 64"),
        ("dflash2", {"selector_top_k": 97}, "selector_top_k 97 be at most the vocabulary's 96"),
        ("dflash2", {"selector_rank": 9}, "is [96, 8], but config.json implies [96, 9]"),
        ("dspark", {"markov_head_type": "gru"}, "markov_head_type 'gru'"),
        ("dspark", {"markov_rank": 0}, "which a DSpark with its config.json has no place for"),
        ("dspark_rnn", {"sample_from_anchor": False, "speculators_config": None}, "rnn only with sample_from_anchor"),
        ("dspark", {"speculators_model_type": "dflash", "sample_from_anchor": True}, "which a DFlash with its config"),
        ("dflash_full", {"speculators_model_type": "xpress"}, "lacks refiner_head.mix_l"),
        ("xpress", {"xpress_rank": 9}, "is [8, 5, 5], but config.json implies [9, 5, 5]"),
        ("xpress", {"xpress_mlp_ratio": 4}, "mlp_gate.weight is [16, 8], but config.json implies [32, 8]"),
        ("xpress", {"num_jacobi_passes": 0}, "num_jacobi_passes is 0, but must be a whole number from 1 on"),
        ("xpress", {"block_size": 6}, "refiner_head.mix_l is [8, 5, 5], but config.json implies [8, 6, 6]"),
    ],
)
def test_keys_that_contradict_each_other_or_the_tensors_are_refused(name, keys, says, tmp_path):
    assert says in refusal(head_of, name, tmp_path / "head", keys)


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        ({"partial_rotary_factor": 0.5}, "rotates whole heads"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window None"),
    ],
)
def test_a_layer_that_a_dflash_does_not_have_is_refused(layer, says, tmp_path):
    assert says in refusal(head_of, "dflash_full", tmp_path / "head", **layer)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"own": {"use_swa": True}}, "use_swa is True, which is not supported in a head of the dialect z-lab"),
        ({"own": {"block_size": 8}}, "block_size is 5, but 8 in dflash_config"),
        (
            {"own": {"projector_type": "griffin"}},
            "projector_type is 'griffin', an unsupported head of the DFlash family",
        ),
        ({"own": {"embedding_gate": True}}, "dflash_config has embedding_gate, a key that is not known for a DFlash"),
        ({"own": {"target_hidden_size": 80}}, "target_hidden_size is 80 and differs from hidden_size"),
        ({"own": {"attention_mode": "mla"}}, "attention_mode is mla, which is not supported"),
        (SLIDING | {"sliding_window": 4}, "sliding_window is 4, less than a block of block_size 5"),
    ],
)
def test_keys_of_other_trainers_are_refused_in_z_labs_form(keys, says, tmp_path):
    assert says in refusal(read_draft, z_lab(tmp_path / "head", **keys))


def test_a_chain_longer_than_a_dflash_block_is_refused(folder):
    said = refusal(plan_of, folder, "full", chain_len=5)
    assert "--chain-len 5: the draft, a DFlash, can propose 4 tokens a round: type --chain-len 4 or less" in said
    assert plan_of(folder, "causal").chain_len == 5 and plan_of(folder, "full", chain_len=2).proposals == 2


def test_a_block_of_sixteen_proposals_is_exported_with_a_chain_of_fifteen_and_a_note(folder, target, tmp_path):
    shutil.copytree(folder / "target", tmp_path / "target")
    save_random_dflash(tmp_path / "head", target.config, (0, 2, 3), block=16, sample_from_anchor=True)
    plan = plan_of(tmp_path, "head", max_prefill=32)
    assert (plan.draft.chain_len, plan.draft.longest_chain) == (16, 16)
    assert (plan.chain_len, plan.verify_rows) == (15, 16)
    assert (
        "the head's files suggest 16 draft tokens a round, but at most 15 are supported: the chain length is 15"
        in plan.warnings
    )
    assert not any(
        "draft tokens a round" in line for line in plan_of(tmp_path, "head", chain_len=7, max_prefill=32).warnings
    )


def test_a_block_with_more_rows_than_the_kernels_support_is_refused(folder, target, tmp_path):
    shutil.copytree(folder / "target", tmp_path / "target")
    save_random_dflash(tmp_path / "head", target.config, (0, 2, 3), block=17)
    assert "the draft's block has 17 rows, but --backend cuda takes 16" in refusal(
        plan_of, tmp_path, "head", chain_len=3
    )


NOT_NEUTRAL = {
    "rope_is_neox_style": False,
    "is_neox_style": False,
    "use_gemma_norm": True,
    "attention_value_scale": 0.5,
    "attention_sink_bias": True,
    "rope_scaling": {"rope_dim": 8},
}


@pytest.mark.parametrize("key", NOT_NEUTRAL)
@pytest.mark.parametrize("source", ["dflash_jetspec", "dspark_specforge", "dspark_deepspec", "dflash_full"])
def test_a_key_that_changes_other_servers_results_is_refused_in_every_form(source, key, tmp_path):
    given = {key: NOT_NEUTRAL[key]}
    head = changed(GOLDEN / source, tmp_path / "head", **{"layer" if source == "dflash_full" else "keys": given})
    said = refusal(read_draft, head)
    assert (
        key in said and "which is not supported in a head" in said or "only RoPE over whole heads is supported" in said
    )


def test_contradictory_keys_on_the_first_proposing_row_are_refused(tmp_path):
    keys = {"sample_from_anchor": True, "dspark_bonus_anchor": True}
    head = changed(GOLDEN / "dspark_deepspec", tmp_path / "head", keys)
    assert "sample_from_anchor and dspark_bonus_anchor are both true" in refusal(read_draft, head)


@pytest.mark.parametrize("keys", [{"enable_moe_block": True}, {"hidden_size_per_layer_input": 32}])
def test_gemma4_layers_that_deepspecs_code_lacks_are_refused(keys, tmp_path):
    head = changed(GOLDEN / "dspark_deepspec_gemma4", tmp_path / "head", keys)
    assert "layers with experts or with per-layer inputs" in refusal(read_draft, head)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"architectures": ["Llama4DSparkModel"]}, "Llama4DSparkModel"),
        ({"architectures": ["XPressDraftModel"], "xpress_rank": 8}, "an xPress head in a form other than speculators'"),
    ],
)
def test_a_dflash_variant_in_another_trainers_form_is_refused_by_name(keys, says, tmp_path):
    assert says in refusal(read_draft, z_lab(tmp_path / "head", **keys))


def test_a_tensor_stored_under_two_names_is_refused(folder, tmp_path):
    norm = load_file(folder / "full" / "model.safetensors")["norm.weight"]
    head = changed(folder / "full", tmp_path / "head", tensors={"model.norm.weight": norm})
    assert "has norm.weight twice, once as" in refusal(read_draft, head)


def test_a_dry_run_shows_a_dflashs_memory(folder):
    flags = ("--target-model", "llama3.1-8B", "--checkpoint", folder / "target", "--max-seq-len", 64, "--dry-run")
    said = run_command(export_main, *flags, "--backend", "xnnpack", "--draft", folder / "window").stdout
    assert "DFlash head of speculators" in said and "the target's lm_head" in said
    assert "hidden_states 0, 2, 3" in said
