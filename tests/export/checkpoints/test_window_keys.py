"""A sliding window in a target's configuration that transformers ignores is ignored, and one too short to export is
refused."""

import json
from pathlib import Path

import pytest
import torch
from family_configs import FAMILIES, SIZE
from random_checkpoints import save_random_draft
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from eagle3.export.checkpoints.target_config import read_target_config
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.planning.plan import make_plan
from eagle3.export.twin.target import check_target
from eagle3.targets import spec_for

LONG = SIZE | {"max_position_embeddings": 4096}
OFF = {"use_sliding_window": False}
UNREAD = {
    "llama": {},
    "seed_oss": {},
    "deepseek_v3": FAMILIES["deepseek_v3"] | OFF,
}


def written(folder: Path, kind: str, **fields) -> Path:
    """Write a configuration of a class with these keys in the file, even if the class has no such fields."""
    config = CONFIG_MAPPING[kind](**LONG | fields)
    config.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


@pytest.mark.parametrize("kind", UNREAD)
def test_a_window_that_transformers_ignores_is_ignored(kind, tmp_path):
    text = read_target_config(written(tmp_path, kind, **UNREAD[kind], sliding_window=16), "auto")
    spec = spec_for("auto", text.model_type)
    assert check_target(spec, "auto", tmp_path, text)["logits"] < 1e-4
    assert spec.max_forward_len(text) == LONG["max_position_embeddings"]


def planned(tmp_path: Path, window: int, **flags):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["mistral"](**LONG, sliding_window=window))
    model.save_pretrained(tmp_path / "target")
    draft = save_random_draft(tmp_path / "draft", model.config, aux_layers=(0, 1, 2))
    return make_plan(ExportConfig("auto", tmp_path / "out", tmp_path / "target", draft, backend="xnnpack", **flags))


@pytest.mark.parametrize("window", [1, 8])
def test_a_window_too_short_for_a_chunk_is_refused_as_such(window, tmp_path):
    with pytest.raises(
        ValueError, match=f"the target's sliding window is {window} tokens.*prefill takes 9 tokens or"
    ) as refused:
        planned(tmp_path, window)
    assert "--max-seq-len" not in str(refused.value) and "--chain-len" not in str(refused.value)


def test_a_window_too_short_for_the_chain_is_refused_with_the_longest_chain(tmp_path):
    with pytest.raises(ValueError, match="the target and --backend xnnpack take 2 to 8: type --chain-len 7 or less"):
        planned(tmp_path, 12, chain_len=9)
    assert planned(tmp_path, 12, chain_len=7).method("prefill").max_len == 12


@pytest.mark.parametrize(
    "fields", [{"n_shared_experts": 0}, {"v_head_dim": 32}], ids=["no shared experts", "wide values"]
)
def test_deepseek_v3_without_shared_experts_or_with_values_wider_than_keys_is_computed(fields, tmp_path):
    text = read_target_config(written(tmp_path, "deepseek_v3", **FAMILIES["deepseek_v3"] | fields), "auto")
    assert check_target(spec_for("auto", text.model_type), "auto", tmp_path, text)["logits"] < 1e-4
