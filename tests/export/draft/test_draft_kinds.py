"""EAGLE 1 and 2, HASS and P-EAGLE heads equal speculators' ``EagleSpeculator`` and ``PEagleDraftModel``, whose own code
made the golden numbers (scripts/golden/make_eagle_golden.py, scripts/golden/make_peagle_golden.py)."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from dialect_files import HIDDEN, VOCAB, norms, random_eagle, random_peagle, without, write
from draft_oracle import check_draft
from places import GOLDEN
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig

from eagle3.export.draft.kinds import EAGLE, EAGLE3, P_EAGLE
from eagle3.export.draft.loading import load_draft
from eagle3.export.draft.reading import read_draft
from eagle3.export.planning.methods import draft_rows
from eagle3.export.planning.pairing import check_pair
from eagle3.targets.attention import EagerAttention

EAGLES, PEAGLES = (GOLDEN / "eagle", GOLDEN / "peagle")
CLOSE = {"atol": 1e-4, "rtol": 1e-4}
TARGET = LlamaConfig(hidden_size=64, vocab_size=96, num_hidden_layers=6)


def cases(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def verifier():
    """Return the parts of a target that an EAGLE head shares."""
    weights = load_file(EAGLES / "verifier.safetensors")
    embedding, lm_head = nn.Embedding(96, 64), nn.Linear(64, 96, bias=False)
    embedding.weight, lm_head.weight = (nn.Parameter(weights[name]) for name in ("embed_tokens", "lm_head"))
    return SimpleNamespace(embed_tokens=embedding, lm_head=lm_head)


def open_case(folder: Path, proposals: int = 1, max_seq_len: int = 32):
    draft = read_draft(folder)
    head = load_draft(draft, max_seq_len, torch.float32, EagerAttention, verifier(), proposals)
    return draft, head, load_file(folder / "golden.safetensors")


@pytest.mark.parametrize("case", cases(EAGLES))
def test_an_eagle_equals_speculators_in_one_pass_and_slot_by_slot(case):
    draft, head, golden = open_case(EAGLES / case)
    assert draft.kind == EAGLE and draft.takes_final_state and draft.shares_lm_head and not draft.has_embedding
    check_pair(draft, TARGET, ())
    feature = head.fuse((golden["states"],))
    logits, following = head(golden["tokens"], feature, torch.arange(12))
    torch.testing.assert_close(logits[0], golden["logits"], **CLOSE)
    torch.testing.assert_close(following, golden["next"], **CLOSE)
    for start in (9, 3, 6):  # written again, as after a rejected window
        rows = slice(start, start + 3)
        again, _ = head(golden["tokens"][:, rows], feature[:, rows], torch.arange(start, start + 3))
        torch.testing.assert_close(again[0], golden["logits"][rows], **CLOSE)


@pytest.mark.parametrize("max_seq_len", [32, 13])  # of 13 the last draft slot is 11: mask rows pass the context's end
@pytest.mark.parametrize("case", cases(PEAGLES))
def test_a_peagle_proposes_speculators_tokens_in_one_forward(case, max_seq_len):
    draft, head, golden = open_case(PEAGLES / case, 4, max_seq_len)
    assert draft.kind == P_EAGLE and draft.chain_len == 4
    features = head.fuse(golden["taps"].chunk(3, dim=-1))
    tokens, slots = golden["tokens"], torch.arange(12)
    with torch.no_grad():
        for rows in slots.split(draft_rows(draft, 4) or 2):  # the rows that fit a window beside the mask rows
            logits, _ = head(tokens[:, rows], features[:, rows], rows)
            torch.testing.assert_close(logits[0, : len(rows)], golden["logits"][rows], **CLOSE)
    torch.testing.assert_close(logits[0, len(rows) :], golden["logits"][12:], **CLOSE)
    assert head.target_ids(logits[:, -4:])[0].tolist() == golden["proposals"].tolist()


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as refused:
        read_draft(folder)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("folder", "architectures", "kind", "says"),
    [
        (EAGLES / "eagle", ["Eagle3DraftModel"], "eagle3", "says EAGLE-3"),
        (GOLDEN / "eagle3" / "llama_nbr_true", ["PEagleDraftModel"], "peagle", "says P-EAGLE"),
    ],
)
def test_a_head_whose_tensors_contradict_its_class_is_refused(folder, architectures, kind, says, tmp_path):
    copy = Path(shutil.copytree(folder, tmp_path / "draft"))
    config = json.loads((copy / "config.json").read_text())
    changed = config | {"architectures": architectures, "speculators_model_type": kind}
    (copy / "config.json").write_text(json.dumps(changed))
    assert says in refusal(copy)


@pytest.mark.parametrize(
    ("changes", "names", "what"),
    [
        ({"architectures": ["Qwen3XPressForCausalLM"]}, [], "xPress"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, [], "MLA"),
        ({}, ["layers.0.self_attn.kv_a_proj_with_mqa.weight"], "MLA"),
        ({}, ["parallel_draft_heads.0.medusa_layers.0.linear.weight"], "Medusa"),
        ({"architectures": ["Qwen3MTPModel"]}, [], "MTP"),
        ({}, ["eh_proj.weight"], "MTP"),
        ({"architectures": ["EagleLlama4ForCausalLM"]}, [], "an EAGLE head with Llama 4's layers"),
        ({"architectures": ["EagleDeepSeekMTPModel"]}, [], "an EAGLE head with MLA attention"),
        ({"model_type": "eagle", "model": {"model_type": "llama"}}, [], "an EAGLE head in vLLM's own form"),
    ],
)
def test_heads_of_other_kinds_are_refused_by_name(changes, names, what, tmp_path):
    copy = Path(shutil.copytree(GOLDEN / "eagle3" / "llama_nbr_true", tmp_path / "draft"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | changes))
    tensors = load_file(copy / "model.safetensors") | {name: torch.zeros(2, 2) for name in names}
    save_file(tensors, copy / "model.safetensors")
    assert what in refusal(copy)


def test_a_peagle_without_a_mask_token_or_an_embedding_is_refused(tmp_path):
    copy = Path(shutil.copytree(PEAGLES / "peagle_fc_norm", tmp_path / "draft"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"mask_token_id": None}))
    assert "mask_token_id" in refusal(copy)
    (copy / "config.json").write_text(json.dumps(config | {"mask_token_id": VOCAB}))
    assert "the mask token is 96, but embed_tokens.weight has 96 rows" in refusal(copy)
    tensors = load_file(copy / "model.safetensors")
    del tensors["embed_tokens.weight"]
    save_file(tensors, copy / "model.safetensors")
    (copy / "config.json").write_text(json.dumps(config))
    assert "lacks embed_tokens.weight" in refusal(copy)


@pytest.mark.parametrize(
    ("dialect", "keys", "mask_shape"),
    [
        ("specforge", {"ptd_token_id": VOCAB - 1}, (1, 3 * HIDDEN)),  # Amazon's, with an EAGLE-3's architectures
        ("nemo", {"parallel_drafting": True, "mask_token_id": VOCAB - 1}, (1, 1, 3 * HIDDEN)),
        ("specforge", {"architectures": ["PEagleDraftModel"], "mask_token_id": VOCAB - 1}, (1, 1, 3 * HIDDEN)),
    ],
)
def test_a_flat_head_with_a_mask_token_is_a_peagle_whatever_its_architectures(dialect, keys, mask_shape, tmp_path):
    tensors = random_peagle()
    tensors["mask_hidden"] = tensors["mask_hidden"].reshape(mask_shape)
    draft = read_draft(write(tmp_path / "head", dialect, tensors, num_hidden_layers=2, **keys))
    assert (draft.kind, draft.dialect, draft.mask_token_id, draft.warnings) == (P_EAGLE, dialect, VOCAB - 1, ())
    assert check_draft(draft, 3)["logits"] < 1e-4


def test_a_mask_feature_without_a_mask_token_is_reported_or_refused(tmp_path):
    draft = read_draft(write(tmp_path / "silent", "specforge", random_peagle(), num_hidden_layers=2))
    assert draft.kind == EAGLE3 and "ptd_token_id" in draft.warnings[0]
    parallel = {"parallel_drafting": True, "num_hidden_layers": 2}
    assert "mask_token_id" in refusal(write(tmp_path / "no token", "nemo", random_peagle(), **parallel))
    tensors = {name: tensor for name, tensor in random_peagle().items() if name != "mask_hidden"}
    assert "no tensor mask_hidden" in refusal(write(tmp_path / "no feature", "nemo", tensors, **parallel))


def test_a_lora_for_the_target_beside_a_head_is_reported(tmp_path):
    copy = Path(shutil.copytree(GOLDEN / "eagle3" / "llama_nbr_true", tmp_path / "draft"))
    (copy / "adapter_model.safetensors").write_bytes(b"")
    (warning,) = read_draft(copy).warnings
    assert "LoRA" in warning


# --- NeMo's EAGLE 1

OF_NEMO = {"architectures": ["LlamaEagleDraftModel"], "draft_vocab_size": None, "draft_num_hidden_layers": 1}
OF_NEMO |= {"eagle_config": None, "num_hidden_layers": 12}  # the target's depth


def nemos(folder: Path, tensors=None, **keys) -> Path:
    """Write an EAGLE 1 as NeMo saves it, without a prefix and with a norm before and after its layer."""
    tensors = tensors or without(random_eagle(), "fc.bias") | norms("norm", "layers.0.input_layernorm")
    write(folder, "nemo", tensors, **OF_NEMO | keys)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("model_type", ["llama", "phi3"])
def test_nemos_eagle_head_feeds_back_and_scores_the_normed_state(model_type, tmp_path):
    folder = nemos(tmp_path / "head", model_type=model_type)
    draft = read_draft(folder)
    assert (draft.kind, draft.dialect, draft.takes_final_state) == (EAGLE, "nemo", True)
    check_pair(draft, TARGET, ())
    assert check_draft(draft, 0)["logits"] < 1e-4
    shared = verifier()
    head = load_draft(draft, 32, torch.float32, EagerAttention, shared)
    tokens, states = torch.randint(0, 96, (1, 8)), torch.randn(1, 8, 64)
    with torch.no_grad():
        logits, following = head(tokens, states, torch.arange(8))
        torch.testing.assert_close(shared.lm_head(following), logits)  # the same state, after the norm
        torch.testing.assert_close(
            following[0], _nemos_states(load_file(folder / "model.safetensors"), shared, tokens, states)
        )


def _nemos_states(weights, shared, tokens, states):
    """Compute the states by the formulas of ``LlamaEagleDraftModel``, with 4 query heads and 2 key heads of width
    16."""

    def normed(x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weights[f"{name}.weight"]

    def heads(name):
        return (x @ weights[f"layers.0.self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, 16)).transpose(0, 1)

    joined = torch.cat((shared.embed_tokens(tokens[0]), states[0]), -1) @ weights["fc.weight"].T
    x = normed(joined, "layers.0.input_layernorm")
    angles = torch.arange(8)[:, None] * 10000 ** (-torch.arange(0, 16, 2) / 16)
    cos, sin = (torch.cat((each, each), -1) for each in (angles.cos(), angles.sin()))
    query, key = (
        each * cos + torch.cat((-each[..., 8:], each[..., :8]), -1) * sin for each in (heads("q"), heads("k"))
    )
    key, value = (each.repeat_interleave(2, dim=0) for each in (key, heads("v")))
    attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(0, 1).flatten(1)
    x = joined + attended @ weights["layers.0.self_attn.o_proj.weight"].T
    inner = normed(x, "layers.0.post_attention_layernorm")
    gate, up, down = (weights[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return normed(x + (nn.functional.silu(inner @ gate.T) * (inner @ up.T)) @ down.T, "norm")


def test_nemos_eagle_head_without_a_norm_or_with_another_depth_is_refused(tmp_path):
    whole = without(random_eagle(), "fc.bias") | norms("norm", "layers.0.input_layernorm")
    for name in ("norm.weight", "layers.0.input_layernorm.weight"):
        assert f"lacks {name}, which every EAGLE head of NeMo has" in refusal(
            nemos(tmp_path / name, without(whole, name))
        )
    line = refusal(nemos(tmp_path / "two", draft_num_hidden_layers=2))
    assert "draft_num_hidden_layers is 2 in config.json, but there are tensors of 1 layers" in line
