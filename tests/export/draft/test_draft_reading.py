"""A draft head's checkpoint is read strictly: an unexpected value is refused by name."""

import json

import pytest
import torch
from draft_oracle import check_draft
from random_checkpoints import save_random_draft
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from eagle3.export.draft.loading import check_computed
from eagle3.export.draft.reading import read_draft
from eagle3.export.planning.pairing import check_pair, check_vocabulary_map

TARGET = LlamaConfig(hidden_size=64, vocab_size=96, num_hidden_layers=6)


@pytest.fixture
def head(tmp_path):
    """A function that saves a head with changed tensors, and with dotted keys of its config.json set."""

    def save(changes=None, **keys):
        folder = save_random_draft(tmp_path / "draft", TARGET, changes=changes)
        file = folder / "config.json"
        config = json.loads(file.read_text())
        for name, value in keys.items():
            owner = config
            *path, last = name.split("__")
            for part in path:
                owner = owner[part]
            owner[last] = value
        file.write_text(json.dumps(config))
        return folder

    return save


def refusal(folder) -> str:
    with pytest.raises(ValueError) as refused:
        draft = read_draft(folder)
        check_pair(draft, TARGET, (1, 3, 4))
        check_computed(draft, 3)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("ids", [[1.0, 3.0, 4.0], "1,3,4", [True, 3, 4]])
def test_layer_ids_that_are_not_whole_numbers_are_refused(ids, head):
    assert "list of layer ids" in refusal(head(eagle_aux_hidden_state_layer_ids=ids))


def test_a_rope_that_depends_on_the_text_length_is_refused(head):
    rope = {"rope_theta": 10000.0, "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    assert "rope_type longrope" in refusal(head(transformer_layer_config__rope_parameters=rope))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32])
def test_head_weights_of_an_unsupported_dtype_are_refused(dtype, head):
    name = "layers.0.mlp.up_proj.weight"
    line = refusal(head({name: torch.ones(128, 64).to(dtype)}))
    assert "layers.0.mlp.up_proj.weight" in line and "floating-point" in line


def ids_of(folder):
    tensors = load_file(folder / "model.safetensors")
    return tensors, tensors["d2t"] + torch.arange(48)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors, ids: tensors.update(d2t=tensors["d2t"].float()), "d2t is F32"),
        (lambda tensors, ids: tensors.update(d2t=ids), "offsets"),
        (lambda tensors, ids: tensors.update(t2d=tensors["t2d"].roll(1)), "t2d names 48 target ids, d2t maps to 48"),
    ],
)
def test_a_vocabulary_map_that_contradicts_itself_is_refused(change, says, head):
    folder = head()
    tensors, ids = ids_of(folder)
    change(tensors, ids)
    save_file(tensors, folder / "model.safetensors")
    assert says in refusal(folder)


@pytest.mark.parametrize(
    ("draft_id", "target_id", "ids"), [(47, 96, "2..96, 0 of"), (0, -1, "-1..93, 0 of"), (1, 2, "2..93, 1 of")]
)
def test_a_vocabulary_map_beyond_the_targets_ids_or_with_a_repeated_id_is_refused(draft_id, target_id, ids, head):
    folder = head()
    tensors, _ = ids_of(folder)
    del tensors["t2d"]  # since t2d would show the fault too
    tensors["d2t"][draft_id] = target_id - draft_id
    save_file(tensors, folder / "model.safetensors")
    assert f"d2t maps draft ids to {ids} them twice, but must map to different ids in 0..95" in refusal(folder)


def test_a_vocabulary_map_that_may_hold_ids_or_offsets_is_refused(head):
    folder = head()
    tensors, _ = ids_of(folder)
    del tensors["t2d"]
    save_file(tensors | {"d2t": torch.arange(48)}, folder / "model.safetensors")  # ids 0 to 47, or offsets of even ids
    draft = read_draft(folder)
    with pytest.raises(ValueError, match="could hold ids or offsets"):
        check_vocabulary_map(draft, 96)


def test_a_vocabulary_map_of_32_bit_offsets_is_read(head):
    folder = head()
    tensors, _ = ids_of(folder)
    save_file(tensors | {"d2t": tensors["d2t"].int()}, folder / "model.safetensors")
    check_pair(read_draft(folder), TARGET, (1, 3, 4))


def windowed(**keys):
    written = {"layer_types": ["sliding_attention"], "sliding_window": 6, "max_position_embeddings": 256} | keys
    return {f"transformer_layer_config__{key}": value for key, value in written.items()}


@pytest.mark.parametrize(("layer", "before_residual"), [("llama", False), ("qwen3", True)])
def test_a_head_with_a_sliding_window_equals_its_formulas_beyond_the_window(layer, before_residual, head):
    norms = {f"layers.0.self_attn.{name}_norm.weight": 1 + 0.3 * torch.randn(16) for name in "qk"}
    keys = windowed(model_type=layer, use_sliding_window=True) | {"norm_before_residual": before_residual}
    draft = read_draft(head(norms if layer == "qwen3" else {}, **keys))
    assert draft.window == 6
    compared = check_draft(draft, 3)
    assert compared["tokens"] > 6 and compared["logits"] < 1e-4


def test_a_window_without_a_sliding_layer_type_is_ignored_and_a_sliding_type_without_a_window_refused(head):
    assert read_draft(head(**windowed(layer_types=["full_attention"]))).window == 0
    assert "sliding_window" in refusal(head(**windowed(sliding_window=None)))
    assert "chunked_attention" in refusal(head(**windowed(layer_types=["chunked_attention"])))
