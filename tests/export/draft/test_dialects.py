"""A draft head gives the same numbers in every dialect, and each variant equals its formulas."""

import json
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from dialect_files import (
    CONFIGS,
    HIDDEN,
    IDS,
    VOCAB,
    YARN,
    norms,
    random_head,
    without,
    write,
)
from draft_oracle import check_draft
from places import TESTS
from refusals import refusal
from torch import nn
from transformers import LlamaConfig

from eagle3.export.checkpoints.json_fields import Fields
from eagle3.export.checkpoints.source import TensorHeader
from eagle3.export.draft.common.layer_config import layer_config
from eagle3.export.draft.kinds import EAGLE3
from eagle3.export.draft.kinds.eagle.tensor_names import head_kind
from eagle3.export.draft.loading import load_draft
from eagle3.export.draft.reading import read_draft
from eagle3.export.planning.pairing import check_pair, check_trained_for
from eagle3.export.planning.taps import choose_taps
from eagle3.targets.attention import EagerAttention

GOLDEN = TESTS / "golden" / "eagle3"
OF_TARGETS = ("mistral", "mixtral", "phi3", "gpt_oss", "cohere2")

TARGET = LlamaConfig(hidden_size=HIDDEN, vocab_size=VOCAB, num_hidden_layers=12)


def target():
    torch.manual_seed(3)
    embedding = nn.Embedding(VOCAB, HIDDEN)
    embedding.weight = nn.Parameter(random_head()["embed_tokens.weight"])
    return SimpleNamespace(embed_tokens=embedding, lm_head=nn.Linear(HIDDEN, VOCAB, bias=False))


def run(folder, **flags):
    """Return the taps in a target of twelve layers, and the head's outputs for twelve slots: logits and the next
    feature."""
    draft = read_draft(folder, **flags)
    taps = choose_taps(draft, TARGET, None, None)
    check_pair(draft, TARGET, taps.layers)
    head = load_draft(draft, 32, torch.float32, EagerAttention, target())
    generator = torch.Generator().manual_seed(9)
    states = [torch.randn(1, 12, HIDDEN, generator=generator) for _ in taps.layers or (0,)]
    tokens = torch.randint(0, VOCAB, (1, 12), generator=generator)
    with torch.no_grad():
        logits, following = head(tokens, head.fuse(tuple(states)), torch.arange(12))
    return taps.layers, head.target_ids(logits), logits, following


@pytest.mark.first(6)
@pytest.mark.parametrize(("dialect", "pickled"), [("safeailab", True), *((name, False) for name in CONFIGS)])
def test_a_head_gives_the_same_numbers_in_every_dialect(dialect, pickled, tmp_path):
    tensors = random_head()
    expected = run(write(tmp_path / "speculators", "speculators", tensors))
    if dialect == "safeailab":
        del tensors["embed_tokens.weight"]  # as in SafeAILab's files, whose embedding is the target's
    folder = write(tmp_path / "head", dialect, tensors, pickled)
    draft = read_draft(folder)
    assert draft.dialect == dialect
    taps, *given = run(folder)
    assert taps == ((2, 6, 9) if dialect == "safeailab" else (1, 3, 4))  # SafeAILab's files name no taps
    for value, wanted in zip(given, expected[1:], strict=True):
        torch.testing.assert_close(value, wanted, atol=1e-5, rtol=1e-5)
    assert check_draft(draft, 3)["logits"] < 1e-4


def renamed(tensors, **names):
    """Return the tensors with parts of their names replaced; ``__`` in a keyword stands for a dot."""
    changed = {}
    for name, tensor in tensors.items():
        for part, other in names.items():
            name = name.replace(part.replace("__", "."), other.replace("__", "."))
        changed[name] = tensor
    return changed


def more_heads(heads):
    generator = torch.Generator().manual_seed(10)
    shapes = {"q_proj": (16 * heads, 2 * HIDDEN), "o_proj": (HIDDEN, 16 * heads)}
    return {
        f"layers.0.self_attn.{name}.weight": torch.randn(shape, generator=generator) / shape[1] ** 0.5
        for name, shape in shapes.items()
    }


VARIANTS = {
    "older names of the aux norms": (
        "sglang",
        random_head() | norms("aux_norm_low", "aux_norm_mid", "aux_norm_high"),
        {"use_aux_norm": True},
    ),
    "norm_before_fc in eagle_config": (
        "modelopt",
        random_head() | norms("input_norm", size=3 * HIDDEN),
        {"eagle_config": {"norm_before_fc": True}},
    ),
    "SGLang's older names of later layers": (
        "sglang",
        renamed(
            random_head(layers=2), layers__1__input_layernorm="layers.1.hidden_norm", layers__1="additional_layers.0"
        ),
        {"num_hidden_layers": 2},
    ),
    "Megatron's names of several layers": (
        "modelopt",
        renamed(
            random_head(layers=2),
            layers__1__input_layernorm="midlayer.1.hidden_norm",
            layers__1="midlayer.1",
            layers__0="midlayer.0",
        ),
        {"num_hidden_layers": 2},
    ),
    "a later layer with both norms, by hidden_norm": (
        "sglang",
        random_head(layers=2) | norms("layers.1.hidden_norm"),
        {"num_hidden_layers": 2},
    ),
    "its own embedding for lm_head": (
        "sglang",
        without(random_head(), "lm_head.weight", "d2t", "t2d"),
        {"tie_word_embeddings": True, "draft_vocab_size": None},
    ),
    "the target's lm_head": (
        "sglang",
        without(random_head(), "lm_head.weight", "d2t", "t2d", "embed_tokens.weight"),
        {"draft_vocab_size": None},
    ),
    "heads wider than hidden_size": ("specforge", random_head(head_dim=32), {"head_dim": 32}),
    "a head_dim that SafeAILab ignores": ("safeailab", random_head(), {"head_dim": 32}),
    "a number of heads that does not divide hidden_size": (
        "sglang",
        random_head() | more_heads(6),
        {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16},
    ),
    "five taps, the last layer's output among them": (
        "nemo",
        random_head(taps=5),
        {"eagle_config": {IDS: [1, 3, 4, 8, 12]}},
    ),
    "mrope, for text": ("angelslim", random_head(), {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}),
    "no taps but the final state": (
        "modelopt",
        without(random_head(), "fc.weight", "layers.0.hidden_norm.weight"),
        {"eagle_config": {"use_aux_hidden_state": False, IDS: []}},
    ),
    "the final state, normed": (
        "modelopt",
        without(random_head(), "fc.weight"),
        {"eagle_config": {"use_aux_hidden_state": False, IDS: []}},
    ),
    "no last norm": (
        "modelopt",
        without(random_head(), "norm.weight"),
        {"eagle_config": {"use_last_layernorm": False}},
    ),
    "no norm of the embedding": (
        "modelopt",
        without(random_head(), "layers.0.input_layernorm.weight"),
        {"eagle_config": {"use_input_layernorm_in_first_layer": False}},
    ),
    "windows of some layers": (
        "sglang",
        random_head(layers=2),
        {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    ),
    "Llama 4's dense width": (
        "sglang",
        random_head(),
        {"model_type": "llama4_text", "intermediate_size": 32, "intermediate_size_mlp": 2 * HIDDEN},
    ),
    "old rotary tables in the file": (
        "safeailab",
        random_head() | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)},
        {},
    ),
}


@pytest.mark.first(6)
@pytest.mark.parametrize("name", list(VARIANTS))
def test_each_variant_of_a_head_equals_its_formulas(name, tmp_path):
    dialect, tensors, keys = VARIANTS[name]
    folder = write(tmp_path / "head", dialect, tensors, **keys)
    draft = read_draft(folder)
    taps = choose_taps(draft, TARGET, None, None)
    check_pair(draft, TARGET, taps.layers)
    compared = check_draft(draft, len(taps.layers))
    assert compared["logits"] < 1e-4 and compared["states"] < 1e-4
    *_, logits, _ = run(folder)  # the unchanged file loads and gives finite numbers
    assert logits.isfinite().all()


def test_specforge_never_feeds_the_normed_state_and_may_leave_lm_head_without_norm(tmp_path):
    folders = {said: write(tmp_path / str(said), "sglang", norm_output=said) for said in (True, False)}
    plain = run(write(tmp_path / "plain", "specforge"))
    for said, folder in folders.items():
        assert check_draft(read_draft(folder, "specforge"), 3)["logits"] < 1e-4
        (warning,) = read_draft(folder, "specforge").warnings
        assert "norm_output" in warning and "--draft-dialect sglang" in warning
        assert torch.equal(run(folder, dialect="specforge")[3], plain[3])
        assert torch.equal(run(folder, dialect="specforge")[2], plain[2]) == said
    assert not torch.equal(run(folders[True])[3], plain[3])  # as SGLang reads it


@pytest.mark.parametrize(
    ("dialect", "ids", "taps", "doubt"),
    [
        ("specforge", [1, 5, 8], (2, 6, 9), False),  # the default in every dialect that means outputs
        ("specforge", [2, 6, 9], (2, 6, 9), False),  # the default in every dialect that means inputs
        ("modelopt", [4, 8, 12], (4, 8, 12), False),  # there is no layer 12, so the ids mean inputs
        ("nemo", [2, 5, 8], (3, 6, 9), True),
        ("angelslim", [2, 5, 8], (2, 5, 8), True),
        ("speculators", [1, 5, 8], (1, 5, 8), False),
    ],
)
def test_the_dialect_decides_the_meaning_of_layer_ids_unless_the_ids_themselves_do(dialect, ids, taps, doubt, tmp_path):
    keys = {IDS: ids} if dialect in ("speculators", "angelslim") else {"eagle_config": {IDS: ids}}
    chosen = choose_taps(read_draft(write(tmp_path / "head", dialect, **keys)), TARGET, None, None)
    assert chosen.layers == taps and bool(chosen.doubt) == doubt
    if doubt:
        assert "--aux-convention" in chosen.doubt


def test_a_deepspec_head_is_read_with_its_chain_length_and_target(tmp_path):
    draft = read_draft(write(tmp_path / "head", "deepspec", target_layer_ids=[4, 8, 11]))
    assert (draft.chain_len, draft.verifier) == (7, "Qwen/Qwen3-8B")
    assert choose_taps(draft, TARGET, None, None).layers == (5, 9, 12)  # always outputs


def test_deepspec_heads_of_other_layers_are_refused_by_name(tmp_path):
    two = write(tmp_path / "two", "deepspec", num_hidden_layers=2)
    assert "num_hidden_layers is 2, but DeepSpec's own evaluation takes only heads of one layer" in refusal(
        read_draft, two
    )
    named = write(tmp_path / "named", "deepspec", architectures=["Gemma4Eagle3Model"], model_type="gemma4_text")
    assert "lacks layers.0.pre_feedforward_layernorm.weight: EAGLE-3 heads with Gemma 4's" in refusal(read_draft, named)
    more = {"layers.0.pre_feedforward_layernorm.weight": torch.ones(HIDDEN)}
    unnamed = write(tmp_path / "unnamed", "deepspec", random_head() | more)
    assert "has layers.0.pre_feedforward_layernorm.weight: EAGLE-3 heads" in refusal(read_draft, unnamed)
    experts = shutil.copytree(GOLDEN / "gemma4_deepspec", tmp_path / "experts")
    config = json.loads((experts / "config.json").read_text())
    (experts / "config.json").write_text(json.dumps(config | {"enable_moe_block": True}))
    assert "layers with experts or with per-layer inputs" in refusal(read_draft, experts)


def test_a_midlayer_is_the_only_layer_whatever_the_depth_in_config_json(tmp_path):
    """The config.json of EAGLE3-Vicuna1.3-13B and of AngelSlim's CosyVoice head has the target's depth."""
    one, deep = (run(write(tmp_path / str(depth), "angelslim", num_hidden_layers=depth)) for depth in (1, 40))
    assert torch.equal(one[2], deep[2])
    draft = read_draft(tmp_path / "40")
    assert draft.layers == 1 and check_draft(draft, 3)["logits"] < 1e-4
    numbered = write(tmp_path / "numbered", "sglang", num_hidden_layers=40)
    assert "there are tensors of 1 layers: is a shard missing" in refusal(read_draft, numbered, "angelslim")
    (tmp_path / "40" / "model.safetensors").rename(tmp_path / "40" / "first.safetensors")
    shards = {"weight_map": {"fc.weight": "first.safetensors", "midlayer.mlp.up_proj.weight": "second.safetensors"}}
    (tmp_path / "40" / "model.safetensors.index.json").write_text(json.dumps(shards))
    assert "second.safetensors is missing" in refusal(read_draft, tmp_path / "40")


@pytest.mark.parametrize("dialect", ["safeailab", "nemo"])
def test_a_head_with_the_targets_model_type_and_llama_tensors_has_a_llama_layer(dialect, tmp_path):
    llama, *others = (run(write(tmp_path / name, dialect, model_type=name)) for name in ("llama", *OF_TARGETS))
    for name, other in zip(OF_TARGETS, others, strict=True):
        draft = read_draft(tmp_path / name)
        assert torch.equal(llama[2], other[2]) and draft.window == 0
        (warning,) = [line for line in draft.warnings if "model_type is" in line] or [""]
        assert (f"model_type is {name}; the layer is read as Llama's" in warning) == (name != "mistral")
    sliding = {"model_type": "mistral", "layer_types": ["sliding_attention"]}
    assert "sliding_window None" in refusal(read_draft, write(tmp_path / "sliding", "sglang", **sliding))


def test_a_model_type_that_may_mean_another_layer_is_refused(tmp_path):
    for key in ("rms_norm_eps", "num_attention_heads"):
        folder = write(tmp_path / key, "specforge", model_type="phi3", **{key: None})
        assert f"has no {key}, and its model_type is phi3" in refusal(read_draft, folder)
    scaled = write(tmp_path / "scaled", "safeailab", model_type="minicpm", scale_emb=12)
    assert "scale_emb is 12 and model_type minicpm, but the layer is read as Llama's" in refusal(read_draft, scaled)


def test_speculators_and_deepspec_heads_have_the_layer_of_their_model_type(tmp_path):
    nested = write(tmp_path / "nested", "speculators", transformer_layer_config={"model_type": "gemma2"})
    assert "of type 'gemma2', but llama, qwen2, qwen3 are" in refusal(read_draft, nested)
    assert "of type 'phi3'" in refusal(read_draft, write(tmp_path / "deepspec", "deepspec", model_type="phi3"))


def test_angelslims_layer_ids_are_read_as_outputs(tmp_path):
    own = "aux_hidden_states_layer_ids"
    alone = read_draft(write(tmp_path / "alone", "angelslim", **{IDS: None, own: [0, 4, 7]}))
    assert choose_taps(alone, TARGET, None, None).layers == (1, 5, 8)
    both = read_draft(write(tmp_path / "both", "angelslim", **{IDS: [1, 5, 8], own: [0, 4, 7]}))
    assert both.aux_layers == (1, 5, 8)


@pytest.mark.parametrize(
    ("dialect", "tensors", "keys", "says"),
    [
        ("sglang", without(random_head(), "fc.weight"), {}, "no tensor fc.weight"),
        ("sglang", without(random_head(), "lm_head.weight"), {}, "no lm_head.weight, and draft_vocab_size 48"),
        ("sglang", without(random_head(), "layers.0.hidden_norm.weight"), {}, "lacks layers.0.hidden_norm.weight"),
        ("sglang", random_head(layers=2), {}, "num_hidden_layers is 1 in config.json, but there are tensors of 2"),
        ("sglang", random_head(), {"fc_norm": True}, "fc_norm is True"),
        ("sglang", random_head(), {"fc_norm": True, "norm_before_fc": True}, "exclude each other"),
        ("modelopt", random_head(), {"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm"),
        ("modelopt", random_head(), {"eagle_config": {"parallel_draft_step": 4}}, "Medusa"),
        ("sglang", random_head() | norms("fc_norm.0"), {}, "have 64 features together, but fc takes 192"),
        ("sglang", random_head() | {"fc.weight": torch.tensor(1.0)}, {}, "fc.weight is []"),
        ("sglang", random_head(), {"partial_rotary_factor": 1.5}, "at most 1"),
        (
            "safeailab",
            random_head(),
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5e5},
            "rope_theta beside a linear rope_scaling is 500000.0, which SafeAILab's code ignores",
        ),
        ("specforge", random_head(), {"partial_rotary_factor": 0.5}, "which SpecForge's code ignores"),
        ("specforge", random_head(), {"rope_scaling": YARN | {"truncate": False}}, "truncate is False"),
        ("angelslim", random_head(), {"logit_scale": 0}, "logit_scale is 0"),
        ("angelslim", random_head(), {"architectures": "Eagle3LlamaForCausalLM"}, "architectures"),
    ],
)
def test_a_head_whose_files_contradict_each_other_is_refused(dialect, tensors, keys, says, tmp_path):
    folder = write(tmp_path / "head", dialect, tensors, **keys)
    assert says in refusal(read_draft, folder)


META = torch.ones(2, 2, device="meta")


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    folder = write(tmp_path / "head", "safeailab", pickled=True)

    class Evil:
        def __reduce__(self):
            return open, (str(tmp_path / "ran"), "w")

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Evil()}))
    assert "may run code" in refusal(read_draft, folder)
    assert not (tmp_path / "ran").exists()
    (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04 cut short")
    assert "truncated or no PyTorch file" in refusal(read_draft, folder)
    for state in ({"epoch": 3}, {1: torch.ones(2)}, {"fc.weight": torch.eye(2).to_sparse()}, {"fc.weight": META}):
        torch.save(state, folder / "pytorch_model.bin")
        assert "no state dictionary" in refusal(read_draft, folder)
    (folder / "pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n")
    assert "git lfs pull" in refusal(read_draft, folder)


def test_pickled_shards_are_read_as_one_head_and_a_missing_one_is_named(tmp_path):
    whole = run(write(tmp_path / "whole", "safeailab", pickled=True))
    folder = write(tmp_path / "head", "safeailab", pickled=True)
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    (folder / "pytorch_model.bin").unlink()
    parts = [dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])]
    index = {name: f"pytorch_model-{number}.bin" for number, part in enumerate(parts) for name in part}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    for number, part in enumerate(parts):
        torch.save(part, folder / f"pytorch_model-{number}.bin")
    assert torch.equal(run(folder)[2], whole[2])
    again = {"fc.weight": tensors["fc.weight"]}
    for number, part in enumerate(parts):
        torch.save(part | again, folder / f"pytorch_model-{number}.bin")
    assert "has fc.weight twice" in refusal(read_draft, folder)
    torch.save(parts[0], folder / "pytorch_model-0.bin")
    torch.save(without(parts[1], "fc.weight", "norm.weight"), folder / "pytorch_model-1.bin")
    assert "but no file has it" in refusal(read_draft, folder)
    (folder / "pytorch_model-1.bin").unlink()
    assert "pytorch_model-1.bin is missing" in refusal(read_draft, folder)


def test_a_head_for_another_family_or_tokenizer_is_refused(tmp_path):
    verifier = {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]}
    folder = write(tmp_path / "head", "speculators", speculators_config={"verifier": verifier})
    other = Path(tmp_path / "target")
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    line = refusal(check_trained_for, read_draft(folder), other)
    assert "Qwen/Qwen3-8B" in line and "Llama" in line
    (other / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForConditionalGeneration"]}))
    check_trained_for(read_draft(folder), other)
    for where, words in ((folder, ["a", "b"]), (other, ["b", "a", "c"])):
        vocabulary = {word: id for id, word in enumerate(words)}
        model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"}
        (where / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": []}))
    line = refusal(check_trained_for, read_draft(folder), other)
    assert "differ in 2 ids" in line and "'a'" in line and "'b'" in line
    (folder / "tokenizer.json").write_text("{}")
    assert "tokenizer.json cannot be read" in refusal(check_trained_for, read_draft(folder), other)


def test_a_head_with_unnamed_taps_other_than_three_is_refused_with_the_flag_to_type(tmp_path):
    draft = read_draft(write(tmp_path / "head", "safeailab", random_head(taps=2)))
    assert "2 taps of 64" in refusal(choose_taps, draft, TARGET, None, None)
    assert choose_taps(draft, TARGET, (3, 9), None).layers == (3, 9)


def test_a_wider_target_needs_an_embedding_of_the_heads_own(tmp_path):
    wide = LlamaConfig(hidden_size=2 * HIDDEN, vocab_size=VOCAB, num_hidden_layers=12)
    tensors = random_head(width=2 * HIDDEN)
    draft = read_draft(write(tmp_path / "own", "safeailab", tensors, target_hidden_size=2 * HIDDEN))
    taps = choose_taps(draft, wide, None, None).layers
    check_pair(draft, wide, taps)
    assert check_draft(draft, 3)["logits"] < 1e-4
    sharing = read_draft(write(tmp_path / "none", "safeailab", without(tensors, "embed_tokens.weight")))
    assert "cannot share the target's" in refusal(check_pair, sharing, wide, taps)


def test_sizes_missing_in_speculators_files_are_transformers_defaults(tmp_path):
    """The files of speculators hold only values that differ from the class's defaults; the head of an 8B Llama has no
    hidden_size."""
    small = {"hidden_size": None, "intermediate_size": None, "num_attention_heads": None, "num_key_value_heads": 8}
    folder = write(tmp_path / "head", "speculators", transformer_layer_config=small | {"num_hidden_layers": 1})
    config = json.loads((folder / "config.json").read_text())
    left = {key: value for key, value in config["transformer_layer_config"].items() if value is not None}
    headers = {"layers.0.self_attn.q_proj.weight": TensorHeader((4096, 8192), "BF16", 0)}
    headers["fc.weight"] = TensorHeader((4096, 12288), "BF16", 0)
    layer = layer_config(Fields(folder / "config.json", left), headers)
    assert (layer.hidden_size, layer.num_attention_heads, layer.head_dim) == (4096, 32, 128)
    assert head_kind(Fields(folder / "config.json", config), layer.hidden_size, headers) == EAGLE3


def test_a_dialect_that_does_not_fit_the_file_is_named(tmp_path):
    nested, flat = write(tmp_path / "nested", "speculators"), write(tmp_path / "flat", "nemo")
    assert "--draft-dialect speculators" in refusal(read_draft, nested, "sglang")
    assert "no transformer_layer_config" in refusal(read_draft, flat, "speculators")
