"""A target is quantized while it is read, with the weights of a quantization of the whole model, which is never in
memory as a whole. Large results are kept in files."""

import os
import re
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from random_checkpoints import random_model
from torch import Tensor
from torchao.utils import TorchAOBaseTensor

from eagle3.export.checks import preflight
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.lowering.backend import load_backend
from eagle3.export.lowering.cuda.weights import conversion as weights
from eagle3.export.lowering.cuda.weights.conversion import CudaWeights
from eagle3.export.lowering.cuda.weights.quantization import fitted_recipe, lay_out, quantize
from eagle3.export.lowering.xnnpack.quantization import XnnpackWeights
from eagle3.export.lowering.xnnpack.recipe import Recipe
from eagle3.export.output.folder import full_disk_named
from eagle3.export.planning.plan import make_plan
from eagle3.export.speculator import tensor_files
from eagle3.export.speculator.tensor_files import empty, in_files
from eagle3.targets import TARGETS
from eagle3.targets.attention import EagerAttention

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_hidden_layers": 4, "num_attention_heads": 8}
TIED = "qwen3-4B"


class Checkpoint:
    """The tensors of a model one by one, each in memory of its own. ``live`` is the number of bytes of living matrices,
    ``most`` its maximum."""

    def __init__(self, model: torch.nn.Module):
        self.tied = model.config.tie_word_embeddings
        self.state = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
        if self.tied:
            del self.state["lm_head.weight"]
        self.live = self.most = 0

    def tensors(self):
        for name, value in self.state.items():
            yield name, self._tracked(value)

    def _tracked(self, value: Tensor) -> Tensor:
        array = np.array(value.view(torch.int16).numpy())
        if value.ndim == 2:
            self.live += array.nbytes
            self.most = max(self.most, self.live)
            weakref.finalize(array, self._gone, array.nbytes)
        return torch.from_numpy(array).view(torch.bfloat16)

    def _gone(self, size: int) -> None:
        self.live -= size

    @property
    def sizes(self) -> list[int]:
        return [value.nbytes for value in self.state.values() if value.ndim == 2]


def checkpoint(name: str) -> tuple[Checkpoint, object]:
    model = random_model(name, **WIDE)
    return Checkpoint(model), model.config


def loaded(name: str, given: Checkpoint, config, convert=None, dtype=torch.bfloat16):
    return TARGETS[name].module().load(given.tensors(), config, 64, dtype, EagerAttention, convert)


def conversion(name: str, config) -> CudaWeights:
    skeleton = TARGETS[name].module().skeleton(config, 64)
    return CudaWeights(skeleton.model, fitted_recipe("default", config), torch.bfloat16)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["llama3.1-8B", TIED, "gemma4-31B"])
def test_streamed_quantization_gives_the_weights_of_a_whole_model_bit_for_bit(name, monkeypatch):
    given, config = checkpoint(name)
    whole = loaded(name, given, config)
    quantize(whole, fitted_recipe("default", config))
    lay_out(whole)
    monkeypatch.setattr(weights, "ELEMENTS", 7 * 256)  # a few rows at a time
    streamed = loaded(name, given, config, conversion(name, config)).state_dict()
    quantized = 0
    for key, expected in whole.state_dict().items():
        found = streamed[key]
        assert type(found) is type(expected) and found.dtype == expected.dtype, key
        if isinstance(expected, TorchAOBaseTensor):
            names, attributes = expected.__tensor_flatten__()
            assert found.__tensor_flatten__() == (names, attributes), key
            assert all(torch.equal(getattr(found, part), getattr(expected, part)) for part in names), key
            quantized += 1
        elif "kv_cache" not in key:
            assert torch.equal(found, expected), key
    assert quantized == len(given.sizes) + given.tied


@pytest.mark.parametrize("name", ["llama3.1-8B", TIED])
def test_at_most_two_unquantized_matrices_are_in_memory(name):
    given, config = checkpoint(name)
    target = loaded(name, given, config, conversion(name, config))
    assert given.live == 0  # and the model holds none of them
    embedding = given.state["model.embed_tokens.weight"].nbytes if given.tied else 0
    assert given.most <= 2 * max(given.sizes) + embedding < sum(given.sizes) / 4
    assert isinstance(target.causal_lm.lm_head.weight, TorchAOBaseTensor)


def test_an_unquantized_model_has_all_matrices_in_memory():
    given, config = checkpoint(TIED)
    target = loaded(TIED, given, config)
    assert given.live == given.most == sum(given.sizes)
    assert target.causal_lm.lm_head.weight is target.embed_tokens.weight


def for_the_cpu(name: str, config, recipe: str) -> XnnpackWeights:
    return XnnpackWeights(TARGETS[name].module().skeleton(config, 64).model, Recipe(recipe, "none", 32))


CONVERSIONS = {
    "cuda": (conversion, torch.bfloat16),
    "8da4w": (lambda name, config: for_the_cpu(name, config, "8da4w"), torch.float32),
    "float32": (lambda name, config: for_the_cpu(name, config, "none"), torch.float32),
}


def parts(weight: Tensor) -> dict[str, Tensor]:
    if isinstance(weight, TorchAOBaseTensor):
        return {name: getattr(weight, name) for name in tensor_files.part_names(weight)}
    return {"itself": weight}


@pytest.mark.first(2)
@pytest.mark.parametrize("kind", CONVERSIONS)
@pytest.mark.parametrize("name", ["llama3.1-8B", TIED])
def test_large_quantized_tensors_are_kept_in_unnamed_files(name, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "LARGE", large := 4096)
    made, dtype = CONVERSIONS[kind]
    given, config = checkpoint(name)
    expected = loaded(name, given, config, made(name, config), dtype)
    kept = loaded(name, given, config, in_files(made(name, config), dtype, tmp_path), dtype)
    assert not list(tmp_path.iterdir())
    in_files_now, in_memory = 0, []
    for key, weight in expected.named_parameters():
        found = kept.get_parameter(key)
        assert type(found) is type(weight) and found.dtype == weight.dtype, key
        for part, values in parts(weight).items():
            assert torch.equal(parts(found)[part], values) and parts(found)[part].stride() == values.stride(), key
            size, file = values.nbytes, parts(found)[part].untyped_storage().filename
            in_files_now += size if file else 0
            in_memory += [] if file or size < large else [key]
    # a CUDA artifact's embedding and norms are as the checkpoint has them, which is mapped
    assert in_memory in ([], ["embed_tokens.weight"])
    assert (kept.causal_lm.lm_head.weight is kept.embed_tokens.weight) == (
        expected.causal_lm.lm_head.weight is expected.embed_tokens.weight
    )
    mapped = mapped_from(tmp_path)
    assert mapped >= in_files_now > 0
    del kept, found
    assert mapped_from(tmp_path) == 0


def mapped_from(folder: Path) -> int:
    """Return the bytes of this process's memory that are mapped from files in ``folder``, including deleted ones."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [re.match(r"(\w+)-(\w+) ", line) for line in lines if str(folder) in line]
    return sum(int(found[2], 16) - int(found[1], 16) for found in ranges)


def test_a_full_disk_is_named_before_anything_is_written(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="the artifact takes about 3.0 GB"), full_disk_named(tmp_path, 3_000_000_000):
        empty((1024, 1024), torch.float32, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("backend", "flags"), [("xnnpack", {}), ("cuda", {"cuda_arch": "sm_90", "qlinear": "default"})]
)
def test_weights_are_kept_in_files_from_a_third_of_the_free_memory_on(backend, flags, tmp_path, monkeypatch):
    if backend == "cuda" and torch.cuda.is_available():
        flags = {"qlinear": "default"}
    plan = make_plan(ExportConfig("gemma4-tiny", tmp_path / "out", backend=backend, **flags))
    loaded = load_backend(backend)
    with_weights = loaded.held_bytes(plan) + (loaded.export_bytes(plan) or 0)
    assert loaded.held_bytes(plan) > 1_000_000
    for free, in_files_then in ((3 * with_weights, False), (3 * with_weights - 1, True), (None, False)):
        monkeypatch.setattr(preflight, "free_memory", lambda free=free: free)
        memory = preflight.memory_of_export(plan, loaded)
        assert memory.in_files == in_files_then
        takes = loaded.export_bytes(plan) if in_files_then or backend == "cuda" else with_weights
        assert memory.takes == takes
