"""Every key of a GGUF file's metadata is compared with config.json, or refused with its value."""

import json
from pathlib import Path

import pytest
import torch
from eager import eager_session, eager_speculator
from gguf_files import transformers_gguf, write_gguf
from random_checkpoints import random_model, save_random_draft

from eagle3.export.checkpoints.gguf_file import GGUFFile
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.planning.plan import make_plan
from eagle3.runner.loop.generation import complete

ARCHITECTURES = {"llama3.1-8B": "llama", "mistral-7B": "llama", "qwen3-4B": "qwen3", "phi4": "phi3"}
ARCHITECTURES |= {"gemma3-27B": "gemma3"}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
YARN_FILE = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}


def planned(target: str, folder: Path, fields=None, changes=None, rope_freqs=None, rows=None, **model):
    """Return a plan for a random model of a family; ``fields`` change the file's metadata, ``changes`` its
    config.json."""
    made = random_model(target, **model)
    file = transformers_gguf(folder / "m.gguf", made, ARCHITECTURES[target], {}, rope_freqs, fields, rows)
    made.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | (changes or {})
    (folder / "config.json").write_text(json.dumps(config))
    draft = save_random_draft(folder / "draft", made.config)
    flags = ExportConfig(target, None, file, draft, backend="xnnpack", max_seq_len=64)
    return made, make_plan(flags)


def refusal(target: str, folder: Path, *args, **kwargs) -> str:
    with pytest.raises(ValueError) as refused:
        planned(target, folder, *args, **kwargs)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.first(3)
@pytest.mark.parametrize(
    ("target", "fields"),
    [
        ("llama3.1-8B", {"rope.dimension_count": 16, "attention.scale": 0.25, "expert_count": 0}),
        ("mistral-7B", {"attention.sliding_window": 16, ".tokenizer.ggml.bos_token_id": 1}),
        ("phi4", {"rope.dimension_count": 16, "attention.sliding_window": 0, "rope.scaling.attn_factor": 1.0}),
        ("gemma3-27B", {"attention.sliding_window": 16, "attention.scale": 256**-0.5, "rope.freq_base_swa": 1e4}),
        ("gemma3-27B", {"attention.sliding_window_pattern": 6, "attention.shared_kv_layers": 0}),
    ],
)
def test_gguf_metadata_that_agrees_with_the_config_is_accepted(target, fields, tmp_path):
    made, plan = planned(target, tmp_path, fields)
    assert plan.target_config.to_diff_dict().items() >= made.config.to_diff_dict().items()
    assert plan.target_source.files() == [tmp_path / "m.gguf"]


@pytest.mark.first(6)
@pytest.mark.parametrize(
    ("target", "fields", "says"),
    [
        ("llama3.1-8B", {"rope.dimension_count": 8}, "rope.dimension_count is 8, but {config} implies 16"),
        ("llama3.1-8B", {"attention.scale": 0.5}, "attention.scale is 0.5, but {config} implies 0.25"),
        ("llama3.1-8B", {"attention.sliding_window_pattern": 2}, "pattern is True for layer 0, but"),
        ("llama3.1-8B", {"rope.scaling.type": "linear"}, "rope.scaling.type is linear, but {config} implies none"),
        ("llama3.1-8B", YARN_FILE, "rope.scaling.type is yarn, but {config} implies none"),
        ("llama3.1-8B", {"embedding_scale": 12.0}, "embedding_scale is 12, but {config} implies 1"),
        ("llama3.1-8B", {"rope.dimension_sections": [2, 3, 3, 0]}, "rope.dimension_sections is 2 for layer 0"),
        ("llama3.1-8B", {"attention.causal": False}, "attention.causal is False, but {config} implies True"),
        ("llama3.1-8B", {"attention.clamp_kqv": 8.0}, "attention.clamp_kqv is 8, which is not read, and {config} says"),
        ("llama3.1-8B", {"nextn_predict_layers": 1}, "nextn_predict_layers is 1, but {config} implies 0"),
        ("llama3.1-8B", {"vocab_size": 90}, "vocab_size is 90, but {config} implies 96"),
        ("llama3.1-8B", {"rope.freq_base": None, "rope.scaling.finetuned": False}, None),
        ("phi4", {"rope.dimension_count": 12}, "rope.dimension_count is 12, but {config} implies 16"),
        ("gemma3-27B", {"attention.scale": 0.125}, "attention.scale is 0.125, but {config} implies 0.0625"),
        ("gemma3-27B", {"attention.sliding_window_pattern": 3}, "pattern is False for layer 2, but"),
        ("gemma3-27B", {"rope.freq_base": None}, "rope.freq_base is 10000, but {config} implies 1e+06"),
        ("mistral-7B", {".tokenizer.ggml.bos_token_id": 7}, "bos_token_id is 7, but {folder} implies 1 (bos_token_id)"),
    ],
)
def test_gguf_metadata_that_disagrees_with_the_config_is_refused_with_both_values(target, fields, says, tmp_path):
    if says is None:  # without the key llama.cpp uses the value that config.json has
        planned(target, tmp_path, fields)
        return
    assert says.format(config=tmp_path / "config.json", folder=tmp_path) in refusal(target, tmp_path, fields)


@pytest.mark.first(4)
@pytest.mark.parametrize(
    ("rope", "fields", "says"),
    [
        (LINEAR, {}, "rope.scaling.type is none, but {config} implies linear"),
        (LINEAR, {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, "factor is 8, but {config} implies 4"),
        (LINEAR, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, None),
        (YARN, YARN_FILE, None),
        (YARN, YARN_FILE | {"rope.scaling.original_context_length": 128}, "length is 128, but {config} implies 64"),
        (YARN, YARN_FILE | {"rope.scaling.yarn_beta_fast": 16.0}, "beta_fast is 16, but {config} implies 32"),
        (YARN | {"attention_factor": 1.5}, YARN_FILE, "yarn_attn_factor is 1, but {config} implies 1.5"),
        (YARN | {"beta_fast": 16.0}, YARN_FILE | {"rope.scaling.yarn_beta_fast": 16.0}, None),
    ],
)
def test_a_scaled_rope_must_be_equal_in_the_gguf_file_and_the_config(rope, fields, says, tmp_path):
    changes = {"rope_parameters": rope}
    if says is None:
        planned("qwen3-4B", tmp_path, fields, changes)
        return
    assert says.format(config=tmp_path / "config.json") in refusal("qwen3-4B", tmp_path, fields, changes)


def test_rope_factors_in_only_one_of_gguf_file_and_config_are_refused(tmp_path):
    line = refusal("qwen3-4B", tmp_path, rope_freqs=torch.linspace(1, 8, 8))
    assert "its rope_freqs are not those of the default rope" in line
    llama3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    changes = {"rope_parameters": llama3 | {"original_max_position_embeddings": 64}}
    line = refusal("qwen3-4B", tmp_path, changes=changes)
    assert "has no rope_freqs, but" in line and "of the llama3 rope" in line


TOKENS = [f"<{id}>" for id in range(88)]


def tokenizer(folder: Path, count: int) -> None:
    vocabulary = {f"<{id}>": id for id in range(count - 1)}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": count - 1, "content": "<last>", "special": True, **plain}]
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<0>"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": added}))


@pytest.mark.first(1)
@pytest.mark.parametrize("listed", [True, False])
def test_a_gguf_embedding_without_padding_rows_is_accepted(listed, tmp_path):
    """llama.cpp's converter removes the rows of a Gemma 3 after the tokenizer's last token."""
    fields = {"vocab_size": None} | ({".tokenizer.ggml.tokens": TOKENS} if listed else {})
    tokenizer(tmp_path, 88)
    heads = {"changes": {}}
    model = random_model("gemma3-27B")
    file = transformers_gguf(tmp_path / "m.gguf", model, "gemma3", {}, fields=fields, rows=88)
    model.config.save_pretrained(tmp_path)

    def spoken(tensors):
        ids = torch.arange(48) if tensors else torch.arange(48, 96)
        told = torch.zeros(96, dtype=torch.bool).index_fill_(0, ids, True)
        return {"d2t": ids - torch.arange(48), "t2d": told}

    for within in (True, False):
        heads[within] = save_random_draft(tmp_path / str(within), model.config, changes=spoken(within))
    flags = {"backend": "xnnpack", "max_seq_len": 64}
    plan = make_plan(ExportConfig("gemma3-27B", None, file, heads[True], **flags))
    assert plan.target_config.vocab_size == 88 and plan.draft.target_vocab_size == 88
    speculator = eager_speculator(plan)
    assert speculator.target.lm_head.weight.shape == speculator.target.embed_tokens.weight.shape == (88, 64)
    session = eager_session(plan, speculator)
    prompt = [2, 7, 11, 30, 51, 9]
    said, expected = complete(session, prompt, max_new_tokens=24, stop_ids=()).token_ids, list(prompt)
    for _ in range(24):
        expected.append(int(model(torch.tensor([expected])).logits[0, -1, :88].argmax()))
    assert said == expected[len(prompt) :]
    with pytest.raises(
        ValueError, match="the draft has ids up to 95, but the target's file has rows for only 88 tokens"
    ):
        make_plan(ExportConfig("gemma3-27B", None, file, heads[False], **flags))


@pytest.mark.parametrize("listed", [True, False])
def test_a_gguf_embedding_without_rows_of_tokens_is_refused(listed, tmp_path):
    tokenizer(tmp_path, 92)
    fields = {"vocab_size": None} | ({".tokenizer.ggml.tokens": [*TOKENS, "a", "b"]} if listed else {})
    line = refusal("gemma3-27B", tmp_path, fields, rows=88)
    assert f"its embedding has 88 rows, but the tokenizer has {90 if listed else 92} tokens" in line


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("own", "files", "says"),
    [
        ("A", {}, "has a chat template, which is not read, and {folder} has none"),
        ("A", {"chat_template.jinja": "A"}, None),
        ("A", {"chat_template.jinja": "B"}, "the chat template of {folder} is used"),
        ("A", {"tokenizer_config.json": json.dumps({"chat_template": "B"})}, "the chat template of {folder} is used"),
        ("A", {"chat_template.jinja": "A", "tokenizer_config.json": json.dumps({"chat_template": "B"})}, None),
        (
            "A",
            {"tokenizer_config.json": json.dumps({"chat_template": [{"name": "default", "template": "B"}]})},
            "the chat template of {folder} is used",
        ),
        (None, {"chat_template.jinja": "B"}, None),
    ],
)
def test_the_chosen_chat_template_is_reported_if_there_are_two(own, files, says, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    _, plan = planned("qwen3-4B", tmp_path, {".tokenizer.chat_template": own} if own else {})
    told = [line for line in plan.warnings if "chat template" in line]
    assert len(told) == (says is not None)
    assert says is None or (says.format(folder=tmp_path) in told[0] and "m.gguf" in told[0])


def test_16_bit_norms_of_a_gguf_file_are_shifted_back_without_loss(tmp_path):
    norm = torch.tensor([1 + 2**-7, 2.0, 0.25]).bfloat16()
    fields = {"block_count": 1, "context_length": 8}
    file = write_gguf(tmp_path / "m.gguf", "gemma3", fields, {"blk.0.attn_norm.weight": (norm, "BF16")})
    ((_, value),) = GGUFFile(file).tensors()
    assert value.dtype == torch.float32 and torch.equal(value, norm.float() - 1)
