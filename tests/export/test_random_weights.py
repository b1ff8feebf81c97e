"""Exports without weights use the shapes of published checkpoints, random values and fewer layers."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from commands import fail_command, run_command
from hub_commands import HEAD, TARGET
from huggingface_hub import constants
from published import gemma4_config, save_target
from published_checkpoints import GOLDEN, packed
from random_checkpoints import random_model
from torchao.quantization.quantize_.workflows.int4.int4_tensor import Int4Tensor
from transformers import Gemma4TextConfig, Qwen3MoeConfig

from eagle3.export.checkpoints import open_source
from eagle3.export.checkpoints.finite import check_finite
from eagle3.export.checkpoints.random_folder import random_folder
from eagle3.export.checkpoints.safetensors_file import DTYPES, random_tensor
from eagle3.export.cli import main as export_main
from eagle3.export.draft.reading import read_draft
from eagle3.export.planning.taps import spread_taps
from eagle3.export.twin.layers import fewer_layers
from eagle3.export.twin.shrink import common_fields, from_common_fields
from eagle3.runner import load
from eagle3.targets import TARGETS

TINY = TARGETS["gemma4-tiny"]


@pytest.mark.whole
def test_random_weights_of_hub_names_give_a_running_artifact_without_fetching_weights(hub_pair, tmp_path):
    given = "--checkpoint", TARGET, "--draft", HEAD, "--random-weights", "--layers", 4
    lengths = "--max-seq-len", 64, "--max-prefill", 16, "--draft-qlinear", "none", "--with-decode"
    done = run_command(
        export_main, *given, *lengths, "--backend", "xnnpack", "--output-dir", tmp_path / "out", "--json"
    )
    record = json.loads(done.stdout)
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.safetensors"))
    assert record["manifest"]["random_weights"] and record["manifest"]["draft"] == HEAD
    assert record["check"]["compared_with_eager"] and "hardly any" not in done.stderr
    with load(tmp_path / "out") as model:
        assert model.metadata.n_layers == 4
        said = [model.generate([2, 40, 700], chain_len=length, max_new_tokens=24).token_ids for length in (None, 0)]
    assert said[0] == said[1] and len(set(said[0])) > 2


def headers_and_values(folder: Path, random: Path, layers=None):
    source = open_source(random_folder(folder, random, layers))
    check_finite(source, lambda name: True)
    return source.headers(), dict(source.tensors())


@pytest.mark.parametrize("name", [packed(kind)[0] for kind in ("compressed_tensors", "awq", "gptq")])
def test_random_weights_of_packed_checkpoints_keep_their_format(name, tmp_path):
    expected = open_source(GOLDEN / name).headers()
    headers, values = headers_and_values(GOLDEN / name, tmp_path / "random")
    assert headers == expected
    assert {name: tuple(value.shape) for name, value in values.items() if name in headers} == {
        name: header.shape for name, header in headers.items()
    }


def test_random_weights_of_torchao_checkpoints_stay_quantized_with_fewer_layers(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256, "vocab_size_per_layer_input": 256}
    config = Gemma4TextConfig(**gemma4_config(12).to_dict() | sizes)
    (tmp_path / "target").mkdir()
    save_target(tmp_path / "target", config)
    _, values = headers_and_values(tmp_path / "target", tmp_path / "random", layers=[0, 1, 5])
    queries = {name: value for name, value in values.items() if name.endswith("q_proj.weight")}
    assert sorted(queries) == [f"layers.{index}.self_attn.q_proj.weight" for index in range(3)]
    assert all(type(value) is Int4Tensor for value in queries.values())
    rows = [queries[f"layers.{index}.self_attn.q_proj.weight"].shape[0] for index in range(3)]
    assert rows == [32 * 256, 32 * 256, 32 * 512]  # the sixth has full attention


def test_random_values_depend_on_the_tensors_name_and_differ_in_every_row():
    first, again, other = (random_tensor(name, (64, 96), "BF16") for name in ("a.weight", "a.weight", "b.weight"))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert len(first.float().unique(dim=0)) == 64
    large = random_tensor("embed.weight", (3000, 1024), "F32")
    assert len(large.unique(dim=0)) == 3000 and 0.019 < large.std() < 0.021


def test_every_dtype_has_random_values_norms_are_around_one_and_biases_around_zero():
    for dtype in DTYPES:
        value = random_tensor("layers.0.weight", (8, 16), dtype)
        assert value.dtype == DTYPES[dtype] and value.shape == (8, 16)
        assert len(value.view(torch.uint8 if value.dtype.itemsize == 1 else value.dtype).unique()) > 1
    assert random_tensor("norm.weight", (512,), "F32").mean() == pytest.approx(1, abs=0.01)
    assert random_tensor("q_proj.bias", (512,), "F32").mean() == pytest.approx(0, abs=0.01)


def fewer(config, count: int):
    return fewer_layers(common_fields(config), partial(from_common_fields, config), count)


def test_fewer_layers_are_the_first_ones_if_they_include_every_kind():
    config, layers = fewer(gemma4_config(60), 6)
    assert layers == list(range(6)) and config.num_hidden_layers == 6
    assert config.layer_types == ["sliding_attention"] * 5 + ["full_attention"]


def test_a_late_kind_of_layer_replaces_a_repeated_kind():
    config, layers = fewer(gemma4_config(60), 4)
    assert layers == [0, 1, 2, 5] and config.layer_types[-1] == "full_attention"


def test_fewer_layers_keep_a_layer_of_experts_that_begin_late():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8}
    config = Qwen3MoeConfig(**sizes, **heads, vocab_size=128, mlp_only_layers=[0, 1, 2])
    kept, layers = fewer(config, 2)
    assert layers == [0, 3] and kept.mlp_only_layers == [0]


@pytest.mark.parametrize(
    ("count", "line"),
    [
        (1, "--layers 1 leaves out some of the target's 2 kinds of layers: type --layers 2"),
        (60, "--layers 60: the target has 60 layers: type a smaller number"),
    ],
)
def test_an_impossible_number_of_layers_is_refused(count, line):
    with pytest.raises(ValueError, match=line):
        fewer(gemma4_config(60), count)


def test_taps_are_spread_over_fewer_layers_and_a_final_state_head_has_none():
    draft = read_draft(TINY.draft)
    assert [spread_taps(draft, layers) for layers in (3, 6, 12)] == [(1, 2, 2), (2, 3, 4), (3, 6, 9)]


def test_random_weights_without_known_shapes_are_refused_in_one_line(tmp_path):
    model = random_model("llama3.1-8B")
    model.config.save_pretrained(tmp_path / "target")
    torch.save(model.state_dict(), tmp_path / "target" / "pytorch_model.bin")
    given = "--checkpoint", tmp_path / "target", "--draft", TINY.draft, "--backend", "xnnpack", "--dry-run"
    _, line = fail_command(export_main, *given, "--random-weights")
    assert "--random-weights takes the shapes of weights in safetensors" in line and "/target has no" in line
    _, line = fail_command(export_main, *given, "--layers", 2)
    assert "--layers 2 needs --random-weights: type both" in line
