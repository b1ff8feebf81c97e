"""Any fault in a checkpoint's files is reported in one line that names the file and the remedy, not by a Python
traceback."""

import json
import os
import random
import shutil
import struct
from pathlib import Path

import pytest
import torch
from random_checkpoints import save_random_draft
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from eagle3.export.checkpoints.safetensors_folder import SafetensorsFolder, read_headers, shard_paths
from eagle3.export.checkpoints.target_config import SIZES, read_target_config, special_ids
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.planning.plan import make_plan
from eagle3.runner.system.command import one_line
from eagle3.targets import TARGETS

TINY = TARGETS["gemma4-tiny"]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def target(tmp_path) -> Path:
    """Return a copy of the shipped target, which a test may damage."""
    return Path(shutil.copytree(TINY.checkpoint, tmp_path / "target"))


def change(folder: Path, **fields) -> Path:
    """Set fields of a config.json; ``...`` deletes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
    return file


def read(folder: Path, name: str = "gemma4-tiny"):
    return read_target_config(folder, name)


def refusal(call, *args) -> str:
    """Return the line that a user would see. The test fails for an error that is not one of this package's refusals."""
    with pytest.raises((ValueError, OSError)) as refused:
        call(*args)
    line = one_line(refused.value)
    assert len(line) < 600 and "Error:" not in line and "<class" not in line
    return line


# --- the folder of weights


@pytest.fixture
def sharded(tmp_path) -> Path:
    """Write two shards and their index, and return the folder."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    for number in (1, 2):
        save_file({f"t{number}": torch.zeros(number, 3)}, folder / f"part{number}.safetensors")
    index(folder, {"weight_map": {"t1": "part1.safetensors", "t2": "part2.safetensors"}})
    return folder


def index(folder: Path, content) -> None:
    (folder / INDEX).write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not JSON"),
        ([], "holds a list"),
        ({"weight_map": ["part1.safetensors"]}, "no weight_map"),
        ({"weight_map": {"t1": 1}}, "no weight_map"),
        ({"weight_map": {"t1": "../part1.safetensors"}}, "'../part1.safetensors', which is no file of this folder"),
        ({"weight_map": {"t1": "/etc/passwd"}}, "no file of this folder"),
    ],
)
def test_an_invalid_index_of_shards_is_refused_by_name(content, says, sharded):
    index(sharded, content)
    for call in (shard_paths, read_headers):
        line = refusal(call, sharded)
        assert str(sharded / INDEX) in line and says in line


def test_an_index_that_does_not_match_its_shards_is_refused(sharded):
    names = {"t1": "part1.safetensors", "t2": "part2.safetensors"}
    index(sharded, {"weight_map": names | {"t3": "part2.safetensors"}})
    assert "puts t3 into part2.safetensors, but no file has it" in refusal(read_headers, sharded)
    index(sharded, {"weight_map": names | {"t3": "part3.safetensors"}})
    assert f"{sharded / 'part3.safetensors'} is missing" in refusal(read_headers, sharded)
    (sharded / INDEX).unlink()
    assert f"part1.safetensors, but no {INDEX}" in refusal(read_headers, sharded)


@pytest.mark.parametrize("shards", [["part1.safetensors"], ["model.safetensors", "gone.safetensors"]])
def test_a_whole_file_beside_a_stale_index_is_read_alone_as_transformers_reads_it(shards, target, tmp_path):
    index(target, {"weight_map": {f"old.{number}": shard for number, shard in enumerate(shards)}})
    save_file({"old.0": torch.zeros(1)}, target / "part1.safetensors")
    expected = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).state_dict()
    flags = ExportConfig("gemma4-tiny", tmp_path / "out", target, TINY.draft, backend="xnnpack")
    plan = make_plan(flags)
    assert [file.name for file in plan.target_source.files()] == ["model.safetensors"]
    assert torch.equal(plan.target_source.tensor("model.norm.weight"), expected["model.norm.weight"])
    [line] = [line for line in plan.warnings if INDEX in line]
    assert f"{target}: model.safetensors is read and {INDEX} beside it is not" in line


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["adapter_model.safetensors", "adapter_config.json"], "merge_and_unload"),
        (["adapter_config.json"], "merge_and_unload"),
        (["training_args.bin", "consolidated.00.pth"], "pickled weights (consolidated.00.pth), which are not read"),
        (["model-Q4_K_M.gguf"], "has GGUF weights: type --checkpoint"),
        ([], "no complete safetensors checkpoint"),
    ],
)
def test_a_folder_with_weights_in_another_format_is_refused_with_what_to_do(names, says, tmp_path):
    for name in names:
        (tmp_path / name).write_text("{}")
    line = refusal(read_headers, tmp_path)
    assert says in line and f"{tmp_path / 'model.safetensors'} is missing" in line
    line = refusal(read, tmp_path)
    assert says in line or "takes a Hugging Face folder" in line


def test_an_adapter_beside_the_weights_is_refused(target):
    (target / "adapter_config.json").write_text("{}")
    assert "merge_and_unload" in refusal(read, target)


def with_metadata(folder: Path, **metadata: str) -> Path:
    file = folder / "model.safetensors"
    save_file({"layer._weight_qdata": torch.zeros(2, 2), "other": torch.zeros(1)}, file, metadata=metadata)
    return file


QUANTIZED = {"_type": "Int4Tensor", "_data": {}, "_tensor_data_names": ["qdata"]}


@pytest.mark.parametrize(
    "metadata",
    [
        {"tensor_names": "["},
        {"tensor_names": "[7]"},
        {"tensor_names": '["layer.weight"]'},
        {"tensor_names": '["layer.weight"]', "layer.weight": "{"},
        *(
            {"tensor_names": '["layer.weight"]', "layer.weight": json.dumps(QUANTIZED | broken)}
            for broken in (
                {"_tensor_data_names": [7]},
                {"_data": []},
                {"_data": {"shape": ["2"]}},
                {"_type": None},
            )
        ),
    ],
)
def test_garbled_metadata_of_quantized_weights_is_refused(metadata, tmp_path):
    file = with_metadata(tmp_path, **metadata)
    assert str(file) in refusal(read_headers, tmp_path)


def test_quantized_weights_are_read_and_missing_parts_are_named(tmp_path):
    described = {"tensor_names": '["layer.weight"]', "layer.weight": json.dumps(QUANTIZED)}
    with_metadata(tmp_path, **described)
    assert read_headers(tmp_path)["layer.weight"].quantized
    described["layer.weight"] = json.dumps(QUANTIZED | {"_tensor_data_names": ["qdata", "scale"]})
    with_metadata(tmp_path, **described)
    assert "layer._weight_scale is not there" in refusal(read_headers, tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 8, struct.pack("<Q", 2**60) + b"{}", struct.pack("<Q", 2) + b"[]"],
)
def test_a_file_that_is_not_safetensors_is_refused(content, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(content)
    assert "no safetensors file" in refusal(read_headers, tmp_path)


def test_a_file_larger_than_memory_is_read(tmp_path):
    file, value = tmp_path / "model.safetensors", torch.arange(4.0)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    parts = {"first": 16, "hole": 4 * memory, "last": 16}  # a hole takes no room on the disk
    at, header = 0, {}
    for name, size in parts.items():
        header[name] = {"dtype": "F32", "shape": [size // 4], "data_offsets": [at, at + size]}
        at += size
    described = json.dumps(header).encode()
    with file.open("wb") as sparse:
        sparse.write(struct.pack("<Q", len(described)) + described + value.numpy().tobytes())
        sparse.seek(parts["hole"], 1)
        sparse.write(value.numpy().tobytes())
    assert read_headers(tmp_path)["hole"].bytes == parts["hole"]
    folder = SafetensorsFolder(tmp_path)
    assert torch.equal(folder.tensor("last"), value)
    name, first = next(folder.tensors())
    assert name == "first" and torch.equal(first, value)


# --- the target's configuration


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff\xfe{}", b"[" * 50_000])
def test_an_invalid_config_json_is_refused_by_name(content, target):
    (target / "config.json").write_bytes(content)
    assert str(target / "config.json") in refusal(read, target)


@pytest.mark.parametrize(
    ("size", "value"),
    [*((size, 0) for size in SIZES), *(("hidden_size", value) for value in (-1, 1.5, "x", [], {}, True, 10**12))],
)
def test_an_invalid_size_is_refused_by_name_with_its_value(size, value, target):
    file = change(target, **{size: value})
    line = refusal(read, target)
    assert f"{file}: {size} is {json.dumps(value)}" in line


def test_sizes_in_a_text_config_and_of_single_layers_are_checked(target):
    file = change(target, per_layer_config={"5": {"head_dim": -128, "num_key_value_heads": 1}})
    assert f"{file}: head_dim is -128" in refusal(read, target)
    config = json.loads(file.read_text())
    file.write_text(json.dumps({"model_type": "gemma4", "text_config": config | {"vocab_size": 0}}))
    assert f"{file}: vocab_size is 0" in refusal(read, target)


def test_attention_heads_that_are_no_multiple_of_kv_heads_are_refused(target):
    change(target, per_layer_config={"5": {"num_key_value_heads": 3}})
    line = refusal(read, target)
    assert "num_attention_heads 4 is no multiple of num_key_value_heads 3" in line


def test_a_sliding_window_that_differs_between_layers_is_refused(target):
    change(target, per_layer_config={"5": {"sliding_window": 32}})
    assert "sliding_window" in refusal(read, target)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model_type": ...}, "model_type is null"),
        ({"model_type": 7}, "model_type is 7"),
        ({"model_type": "gemma9"}, "knows no model_type gemma9"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}, "auto_map"),
        ({"model_type": "bert"}, "is a bert"),
        ({"attention_bias": "false"}, 'attention_bias is "false"'),
        ({"layer_types": ["sliding_attention"]}, "layer_types is"),
        ({"dtype": "float17"}, 'dtype is "float17"'),
        ({"per_layer_config": 7}, "per_layer_config is 7"),
        ({"rope_parameters": {}}, "rope_parameters has no entry for sliding_attention"),
        ({"eagle_config": 1, "draft_vocab_size": 32000}, "type --draft"),
    ],
)
def test_a_field_that_makes_the_export_impossible_is_named(fields, says, target):
    file = change(target, **fields)
    line = refusal(read, target)
    assert says in line and (str(file) in line or str(target) in line)


# --- special ids


@pytest.mark.parametrize(
    ("file", "value"),
    [("config.json", "1"), *(("generation_config.json", value) for value in ("</s>", 1.0, -1, True, [1, "2"], 2**31))],
)
def test_a_stop_token_that_is_not_an_id_is_refused_by_name(file, value, target):
    config = read(target)
    (target / "generation_config.json").unlink()
    (target / file).write_text(json.dumps({"eos_token_id": value}))
    line = refusal(special_ids, target, config)
    assert str(target / file) in line and "eos_token_id" in line


@pytest.mark.parametrize(("file", "value"), [("config.json", 2048), ("generation_config.json", [1, 5000])])
def test_a_stop_token_beyond_the_vocabulary_is_refused_with_both_numbers(file, value, target):
    config = read(target)
    (target / "generation_config.json").unlink()
    (target / file).write_text(json.dumps({"eos_token_id": value}))
    line = refusal(special_ids, target, config)
    assert f"{target / file}: eos_token_id has {value if isinstance(value, int) else 5000}" in line
    assert f"has {config.vocab_size} tokens" in line
    (target / file).write_text(json.dumps({"eos_token_id": config.vocab_size - 1}))
    assert special_ids(target, config)[1] == (config.vocab_size - 1,)


@pytest.mark.parametrize("content", ["[]", "{"])
def test_an_invalid_generation_config_is_refused_by_name(content, target):
    (target / "generation_config.json").write_text(content)
    assert "generation_config.json" in refusal(special_ids, target, read(target))


def test_valid_stop_tokens_of_generation_config_are_read(target):
    config = read(target)
    for value, expected in ((3, (3,)), ([3, 4], (3, 4)), ([], ()), (None, (1,))):
        (target / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        assert special_ids(target, config) == (2, expected)


# --- everything at once


def spoiled(config: dict, rng: random.Random, count: int):
    """Yield configurations with one field, at any depth, replaced or deleted: (path, value, configuration)."""
    values = [0, -1, 1.5, "x", None, [], {}, True, 10**12, ...]
    cases = [(path, value) for path in sorted(_paths(config)) for value in values]
    for path, value in rng.sample(cases, min(count, len(cases))):
        changed = json.loads(json.dumps(config))
        owner = changed
        for key in path[:-1]:
            owner = owner[key]
        if value is ...:
            del owner[path[-1]]
        else:
            owner[path[-1]] = value
        yield path, value, changed


def _paths(config: dict, above: tuple[str, ...] = ()):
    for key, value in config.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from _paths(value, (*above, key))


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "which"),
    [("gemma4-31B", "target"), ("llama3.1-8B", "draft")],
)
def test_no_spoiled_field_raises_an_unexpected_error(name, which, checkpoints, tmp_path):
    model, folder = checkpoints(name)
    folders = {
        "target": Path(shutil.copytree(folder, tmp_path / "target")),
        "draft": save_random_draft(tmp_path / "draft", model.config),
    }
    flags = ExportConfig(name, tmp_path / "out", folders["target"], folders["draft"], backend="xnnpack")
    make_plan(flags)
    file = folders[which] / "config.json"
    for path, value, config in spoiled(json.loads(file.read_text()), random.Random(5), 12):
        file.write_text(json.dumps(config))
        try:
            make_plan(flags)
        except (ValueError, OSError) as error:
            assert len(one_line(error)) < 640, (path, value)
        except Exception as error:
            pytest.fail(f"{'.'.join(path)} = {value!r}: {error!r}")
