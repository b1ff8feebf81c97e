"""DFlash heads are refused if they belong to another target or kind, or if no trainer's code computes them."""

import json
import shutil

import pytest
import torch
from commands import run_command
from dflash_heads import GOLDEN, SLIDING, TARGET, changed, plan_of, random_target, refusal, save_pair, z_lab
from random_checkpoints import random_model, save_random_assistant, save_random_dflash, save_random_draft
from safetensors.torch import load_file
from transformers import LlamaConfig

from eagle3.export.cli import main as export_main
from eagle3.export.draft.kinds import DFLASH
from eagle3.export.draft.kinds.eagle.rope_reading import RopeFlags
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


def test_a_head_for_another_family_is_refused(folder, tmp_path):
    verifier = {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]}
    changed(folder / "full", tmp_path / "full", {"speculators_config": {"verifier": verifier}})
    shutil.copytree(folder / "target", tmp_path / "target")
    assert "trained for Qwen/Qwen3-8B (Qwen3ForCausalLM)" in refusal(plan_of, tmp_path, "full")


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"fc.weight": None}, "has no fc.weight: this is no DFlash head"),
        ({"norm.weight": None}, "lacks norm.weight"),
        ({"layers.1.self_attn.k_norm.weight": None}, "lacks layers.1.self_attn.k_norm.weight"),
        ({"layers.2.input_layernorm.weight": torch.ones(64)}, "has no place for"),
        ({"markov_head.markov_w1.weight": torch.ones(96, 8)}, "a DFlash with its config.json has no place for"),
        ({"layers.0.self_attn.q_proj.weight": torch.zeros(64, 128)}, "is [64, 128], but config.json implies [64, 64]"),
        ({"d2t": torch.zeros(48).long() + 70}, "d2t maps draft ids"),
    ],
)
def test_tensors_that_a_head_does_not_have_are_refused(tensors, says, folder, target, tmp_path):
    head = changed(folder / "full", tmp_path / "head", tensors=tensors)

    def whole() -> None:
        check_pair(read_draft(head), target.config, (0, 2, 3))

    assert says in refusal(whole)


@pytest.mark.parametrize(
    ("keys", "layer", "says"),
    [
        ({"mask_token_id": None}, None, "has no mask_token_id"),
        ({"mask_token_id": 96}, None, "mask_token_id is 96, but the embedding has 96 rows"),
        ({"block_size": 1}, None, "block_size is 1, but must be a whole number from 2 on"),
        ({"block_size": 4}, None, "speculative_tokens is 4, but a block of block_size 4 proposes 3"),
        ({"aux_hidden_state_layer_ids": None}, None, "has no aux_hidden_state_layer_ids"),
        ({"draft_vocab_size": 40}, None, "draft_vocab_size is 40 in config.json, but lm_head.weight has 48 rows"),
        ({"sample_from_anchor": 1}, None, "sample_from_anchor is 1, but must be true or false"),
        ({}, {"partial_rotary_factor": 0.5}, "rotates whole heads"),
        ({}, {"layer_types": ["sliding_attention"] * 2}, "sliding_window None"),
        ({}, {"num_hidden_layers": 3}, "lacks layers.2"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys, layer, says, folder, target, tmp_path):
    head = changed(folder / "full", tmp_path / "head", keys, layer=layer)

    def whole() -> None:
        check_pair(read_draft(head), target.config, (0, 2, 3))

    assert says in refusal(whole)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"own": {"use_swa": True}}, "use_swa is True, which is not supported in a head of the dialect z-lab"),
        ({"own": {"attention_sink_bias": True}}, "attention_sink_bias"),
        ({"own": {"selector_rank": 256}}, "selector_rank"),
        ({"own": {"block_size": 8}}, "block_size is 5, but 8 in dflash_config"),
        ({"own": {"mask_token_id": None}}, "has no mask_token_id"),
        ({"is_neox_style": False}, "is_neox_style"),
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


@pytest.mark.parametrize(
    ("name", "keys", "says"),
    [
        ("dflash2", {"conv_group_size": 24}, "conv_group_size 24 must divide hidden_size 64"),
        ("dflash2", {"selector_top_k": 97}, "selector_top_k 97 be at most the vocabulary's 96"),
        ("dflash2", {"selector_rank": 9}, "is [96, 8], but config.json implies [96, 9]"),
        ("dspark", {"markov_head_type": "gru"}, "markov_head_type 'gru'"),
        ("dspark", {"markov_rank": 0}, "which a DSpark with its config.json has no place for"),
        ("dspark_rnn", {"sample_from_anchor": False, "speculators_config": None}, "rnn only with sample_from_anchor"),
        ("dspark", {"markov_head_type": "gated"}, "lacks markov_head.gate_proj.weight"),
        ("dspark", {"speculators_model_type": "dflash"}, "which a DFlash with its config.json has no place for"),
        ("dflash_full", {"speculators_model_type": "dspark"}, "lacks markov_head.markov_w1.weight"),
        ("dflash_window", {"speculators_model_type": "dflash2"}, "lacks"),
        ("xpress", {"xpress_rank": 9}, "is [8, 5, 5], but config.json implies [9, 5, 5]"),
        ("xpress", {"xpress_rank": 0}, "xpress_rank is 0, but must be a whole number from 1 on"),
        ("xpress", {"xpress_mlp_ratio": 4}, "mlp_gate.weight is [16, 8], but config.json implies [32, 8]"),
        ("xpress", {"xpress_mlp_ratio": 0}, "xpress_mlp_ratio is 0, but must be a whole number from 1 on"),
        ("xpress", {"num_jacobi_passes": 0}, "num_jacobi_passes is 0, but must be a whole number from 1 on"),
        ("xpress", {"num_jacobi_passes": 2.5}, "num_jacobi_passes is 2.5, but must be a whole number"),
        ("xpress", {"block_size": 6}, "refiner_head.mix_l is [8, 5, 5], but config.json implies [8, 6, 6]"),
        ("xpress", {"sample_from_anchor": "no"}, 'sample_from_anchor is "no", but must be true or false'),
        ("xpress", {"speculators_model_type": "dflash"}, "which a DFlash with its config.json has no place for"),
        ("dflash_full", {"speculators_model_type": "xpress"}, "lacks refiner_head.mix_l"),
    ],
)
def test_keys_that_do_not_fit_a_variants_tensors_are_refused(name, keys, says, tmp_path):
    if keys.get("speculators_model_type") in ("dflash", "dspark"):
        keys = keys | {"sample_from_anchor": True}
    head = changed(GOLDEN / name, tmp_path / "head", keys)

    def whole() -> None:
        check_pair(read_draft(head), TARGET, (1, 3, 4))

    assert says in refusal(whole)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"refiner_head.down_g.weight": None}, "lacks refiner_head.down_g.weight"),
        ({"refiner_head.mix_l": None}, "lacks refiner_head.mix_l"),
        ({"refiner_head.causal_tril": torch.ones(5, 5)}, "has refiner_head.causal_tril, which a xPress"),
        ({"candidate_selector.hidden_projection.weight": torch.ones(8, 64)}, "has no place for"),
        ({"refiner_head.token_embed.weight": torch.zeros(48, 8)}, "is [48, 8], but config.json implies [96, 8]"),
        ({"refiner_head.readout.weight": torch.zeros(96, 8)}, "is [96, 8], but config.json implies [48, 8]"),
    ],
)
def test_tensors_that_an_xpress_does_not_have_are_refused(tensors, says, tmp_path):
    head = changed(GOLDEN / "xpress", tmp_path / "head", tensors=tensors)

    def whole() -> None:
        check_pair(read_draft(head), TARGET, (1, 3, 4))

    assert says in refusal(whole)


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


BY_TYPE = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 5e4, "rope_type": "default"}}


def test_a_rope_per_layer_type_is_read_for_speculators_sliding_layers_and_refused_otherwise(folder, tmp_path):
    rope = {"rope_parameters": BY_TYPE}
    head = changed(folder / "full", tmp_path / "head", layer=rope)
    assert read_draft(head).layer.rope_parameters["rope_theta"] == 5e4
    line = refusal(read_draft, z_lab(tmp_path / "z-lab", **rope))
    assert "rope_parameters has a RoPE for each type of layer (full_attention: rope_theta 1000000.0;" in line


def test_a_block_with_more_rows_than_the_kernels_support_is_refused(folder, target, tmp_path):
    shutil.copytree(folder / "target", tmp_path / "target")
    save_random_dflash(tmp_path / "head", target.config, (0, 2, 3), block=17)
    assert "the draft's block has 17 rows, but --backend cuda takes 16" in refusal(
        plan_of, tmp_path, "head", chain_len=3
    )


@pytest.mark.parametrize("kind", ["domino", "xpress2"])
def test_an_unsupported_dflash_variant_is_refused_by_name(kind, folder, tmp_path):
    assert kind in refusal(read_draft, changed(folder / "full", tmp_path / "head", {"speculators_model_type": kind}))


@pytest.mark.parametrize("named", ["Llama4DSparkModel", "Qwen3XPressForCausalLM", "Qwen3DominoModel"])
def test_a_dflash_variant_in_another_trainers_form_is_refused_by_name(named, tmp_path):
    assert named in refusal(read_draft, z_lab(tmp_path / "head", architectures=[named]))


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


@pytest.mark.parametrize("named", ["XPressDraftModel", "XPressSpeculator"])
def test_an_xpress_in_a_form_other_than_speculators_is_refused(named, tmp_path):
    head = z_lab(tmp_path / "head", architectures=[named], xpress_rank=8)
    assert "is an xPress head in a form other than speculators'" in refusal(read_draft, head)


def test_a_tensor_stored_under_two_names_is_refused(folder, tmp_path):
    norm = load_file(folder / "full" / "model.safetensors")["norm.weight"]
    head = changed(folder / "full", tmp_path / "head", tensors={"model.norm.weight": norm})
    assert "has norm.weight twice, once as" in refusal(read_draft, head)


def test_a_dflash_head_given_as_another_kind_is_refused_by_name(folder, target, tmp_path):
    eagle = save_random_draft(tmp_path / "eagle", target.config, (0, 2, 3))
    assistant = save_random_assistant(tmp_path / "assistant", random_model("gemma4-31B").config)
    for source, other, says in (
        (eagle, folder / "full", "has no hidden_norm.weight: this is no DFlash head"),
        (assistant, folder / "full", "has no fc.weight: this is no DFlash head"),
        (folder / "full", eagle, "says EAGLE-3"),
        (folder / "full", assistant, "lacks pre_projection.weight"),
    ):
        mixed = tmp_path / f"{source.name} as {other.name}"
        shutil.copytree(source, mixed)
        shutil.copy(other / "config.json", mixed)
        config = random_model("gemma4-31B").config if other is assistant else target.config

        def whole(mixed=mixed, config=config) -> None:
            check_pair(read_draft(mixed), config, (0, 2, 3))

        assert says in refusal(whole)
    assert "--draft-dialect is for EAGLE heads" in refusal(read_draft, folder / "full", "sglang")
    assert "--draft-rope-theta is for EAGLE heads" in refusal(read_draft, folder / "full", rope=RopeFlags(theta=1e4))


def test_dflash_is_listed_and_a_dry_run_shows_its_memory(folder):
    listed = json.loads(run_command(export_main, "--list-drafts", "--json").stdout)
    assert "RedHatAI/gemma-4-31B-it-speculator.dflash" in listed[DFLASH]["heads"]
    flags = ("--target-model", "llama3.1-8B", "--checkpoint", folder / "target", "--max-seq-len", 64, "--dry-run")
    said = run_command(export_main, *flags, "--backend", "xnnpack", "--draft", folder / "window").stdout
    assert "DFlash head of speculators" in said and "the target's lm_head" in said
    assert "hidden_states 0, 2, 3" in said
