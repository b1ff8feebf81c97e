"""8da4w, 8da8w and an 8-bit embedding on the CPU quantize the right weights, refuse others, and rows are
independent."""

import gc
import re

import executorch.backends.cuda.quantize_op_dispatch  # noqa: F401  (gives torchao's tensors CUDA's products)
import pytest
import torch
from commands import fail_command, run_command
from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch.exir.lowered_backend_module import get_lowered_submodules
from executorch.extension.llm.export.quantize import _default_group_size, quantize_model_
from random_checkpoints import random_model
from torch import nn
from torch.nn import functional as F
from xnnpack_lowered import lowered

from eagle3.export.checks import preflight
from eagle3.export.cli import main as export_main
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.lowering.xnnpack import quantization
from eagle3.export.lowering.xnnpack.backend import BACKEND as backend
from eagle3.export.lowering.xnnpack.backend import _model_bytes
from eagle3.export.lowering.xnnpack.partition import LevelPartitioner
from eagle3.export.lowering.xnnpack.quantization import DynamicWeight, Int8Rows, Recipe, XnnpackWeights
from eagle3.export.lowering.xnnpack.recipe import DEFAULT_GROUP
from eagle3.export.lowering.xnnpack.shortcuts import applicable_passes
from eagle3.export.pipeline import stored_bytes
from eagle3.export.planning.plan import make_plan
from eagle3.runner.contract import MODEL_FILE
from eagle3.runner.hosts.packed_file import packed_weights_shared
from eagle3.targets import TARGETS
from eagle3.targets.attention import EagerAttention

RECIPES = {"8da4w": Recipe("8da4w", "8w", 32), "8da8w": Recipe("8da8w", "8w", 0)}


class Model(nn.Module):
    """An embedding and a linear that map ids [1, T] to [1, T, 96]."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.linear = nn.Embedding(50, 128), nn.Linear(128, 96, bias=False)

    def forward(self, ids):
        return self.linear(self.embedding(ids))


class Multiples(nn.Module):
    """Linears of one weight times each of ``factors``, with equal codes. Maps ids [1, T] to [factors, 1, T, 96]."""

    def __init__(self, *factors: float):
        super().__init__()
        one = Model()
        self.embedding, self.linears = one.embedding, nn.ModuleList(nn.Linear(128, 96, False) for _ in factors)
        for linear, factor in zip(self.linears, factors, strict=True):
            linear.weight.data = factor * one.linear.weight.data

    def forward(self, ids):
        x = self.embedding(ids)
        return torch.stack([linear(x) for linear in self.linears])


def quantized(recipe: Recipe, model: nn.Module | None = None) -> nn.Module:
    model = (model or Model()).eval().requires_grad_(False)
    for module in model.modules():
        if recipe.covers(module):
            module.weight = nn.Parameter(
                quantization.quantized(recipe, module, module.weight.data), requires_grad=False
            )
    return model


def test_the_default_group_size_is_executorchs():
    assert _default_group_size("8da4w") == DEFAULT_GROUP


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_of_quantized_linears_are_independent_to_the_last_bit(recipe):
    """The rows of a verify must equal those of single steps, which lossless speculation needs."""
    model, ids = quantized(RECIPES[recipe]), torch.randint(50, (1, 12))
    left, program = lowered(model, ids)
    method = program.load_method("forward")
    assert not any("linear" in target or "quantize" in target for target in left)

    def run(rows: int) -> torch.Tensor:
        return torch.cat([method.execute((part.contiguous(),))[0].clone() for part in ids.split(rows, 1)], 1)

    assert torch.equal(run(1), run(4)) and torch.equal(run(4), run(12))
    moved = (run(4) - model(ids)).abs().amax(-1)[0]
    assert moved.median() < 1e-5 and moved.max() < 0.02  # a different rounding of a sum may change a code of a row


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_with_equal_codes_are_packed_with_their_own_scales(recipe):
    """The weights are in one program, and in two programs of one process, since packed weights are shared by name."""
    ids, loaded = torch.randint(50, (1, 5)), []
    for factors in ((1, 2), (4, 1)):
        model = quantized(RECIPES[recipe], Multiples(*factors))
        assert torch.equal(model.linears[0].weight.qdata, model.linears[1].weight.qdata)
        program = lowered(model, ids)[1]
        with packed_weights_shared() as shared:
            loaded.append(program.load_method("forward"))
        assert shared
        torch.testing.assert_close(loaded[-1].execute((ids,))[0], model(ids), rtol=0, atol=0.05)


@pytest.mark.parametrize("recipe", RECIPES)
def test_8da4w_and_8da8w_codes_equal_executorchs(recipe, monkeypatch):
    monkeypatch.setattr(quantization, "ELEMENTS", 7 * 128)  # a few rows at a time
    ours, theirs = quantized(RECIPES[recipe]), Model()
    quantize_model_(theirs, qlinear_config=recipe, qembedding_config="8w")
    for name in ("linear", "embedding"):
        mine, other = getattr(ours, name).weight, getattr(theirs, name).weight
        assert torch.equal(mine.qdata, other.qdata)
        torch.testing.assert_close(mine.scale, other.scale, rtol=2**-8, atol=0)  # XNNPACK stores bfloat16 scales
    ids = torch.arange(50)[None]
    assert torch.equal(ours.embedding(ids), F.embedding(ids, theirs.embedding.weight.dequantize()))


def test_codes_of_4_bits_are_counted_as_halves_of_bytes():
    weight = quantized(RECIPES["8da4w"]).linear.weight.data
    parts = weight.scale.nbytes + weight.zero_point.nbytes
    assert stored_bytes(weight) == 96 * 128 // 2 + parts
    assert stored_bytes(quantized(RECIPES["8da8w"]).linear.weight.data) >= 96 * 128


def test_a_tied_lm_head_and_its_embedding_are_quantized_separately():
    model = random_model("qwen3-4B", num_hidden_layers=1)
    family, config = TARGETS["qwen3-4B"].module(), model.config
    convert = XnnpackWeights(family.skeleton(config, 64).model, RECIPES["8da4w"])
    weights = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    target = family.load(weights.items(), config, 64, torch.float32, EagerAttention, convert)
    assert type(target.embed_tokens.weight.data) is Int8Rows
    kinds = {type(module.weight.data) for module in target.modules() if isinstance(module, nn.Linear)}
    assert kinds == {DynamicWeight} and target.lm_head.weight.target_dtype == torch.int4


@pytest.mark.parametrize("module", [nn.Linear(64, 320, bias=False), nn.Embedding(320, 64)])
def test_quantized_codes_do_not_outlive_their_weight(module):
    """An export collects garbage rarely, so codes in a reference cycle would stay in memory for every weight."""
    gc.collect()
    gc.disable()
    try:
        made = quantization.quantized(RECIPES["8da4w"], module, module.weight.data)
        assert made.qdata.shape == (320, 64)
        del made
        left = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.dtype == torch.int8]
    finally:
        gc.enable()
    assert not [each for each in left if each.shape == (320, 64)]


@pytest.mark.parametrize("name", ["gpt-oss-20b", "llama4-scout", "qwen3-30B-A3B"])
def test_experts_are_quantized_and_their_routers_are_not(name):
    skeleton = TARGETS[name].module().skeleton(random_model(name, num_hidden_layers=2).config, 64)
    covered = XnnpackWeights(skeleton.model, RECIPES["8da4w"]).covered
    experts = {key for key in covered if "experts.gate_up" in key or "experts.down" in key}
    names = dict(skeleton.model.named_parameters())
    routers = {key for key in names if key.endswith(("router.weight", "mlp.gate.weight"))}
    assert len(experts) == 4 and len(routers) == 2 and not routers & covered.keys()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--qlinear", "default"), "none, 8da4w, 8da8w"),
        (("--draft-qlinear", "sensitive"), "none, 8da4w, 8da8w"),
        (("--backend", "cuda", "--qlinear", "8da4w"), "none, default, sensitive"),
        (("--backend", "cuda", "--qembedding", "8w"), "has no effect with --backend cuda"),
        (("--group-size", 64), "--group-size 64 is for 8da4w: type --qlinear 8da4w"),
        (("--qlinear", "8da4w", "--group-size", 48), "q_proj takes 256 inputs, .* type --group-size 32, 64, 128, 256"),
        (("--draft-qlinear", "8da4w", "--group-size", 512), "fc takes 768 inputs"),
    ],
)
def test_recipes_that_do_not_fit_are_refused_before_weights_are_read(flags, says, tmp_path):
    asked = ("--target-model", "gemma4-tiny", "--backend", "xnnpack", *flags, "--output-dir", tmp_path / "out")
    code, line = fail_command(export_main, *asked)
    assert code == 1 and str(flags[-2]) in line
    assert re.search(says, line), line


def test_an_export_that_exceeds_the_memory_is_refused_with_the_amount(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "free_memory", lambda: 1_000_000_000)
    plan = make_plan(ExportConfig("gemma4-tiny", tmp_path / "out", backend="xnnpack"))
    says = "takes about 1.1 GB of memory, but only 1.0 GB are free: free some, or type --qlinear 8da4w"
    with pytest.raises(ValueError, match=says):
        preflight.check_export_memory(plan, backend)
    asked = ("--target-model", "gemma4-tiny", "--backend", "xnnpack", "--output-dir", tmp_path / "out")
    assert says in fail_command(export_main, *asked)[1]  # before the twin check, whose line would be a second one
    planned = run_command(export_main, *asked, "--dry-run")
    assert f"Warning: the export {says}" in planned.stderr and "the export takes about" in planned.stdout
    monkeypatch.undo()
    assert "Warning" not in run_command(export_main, *asked, "--dry-run").stderr


def test_the_estimated_size_of_an_artifact_is_that_of_its_program(artifact, tmp_path):
    flags = {"draft_qlinear": "none", "with_decode": True, "speculate": False}  # as in beforehand.py
    plan = make_plan(ExportConfig("gemma4-tiny", tmp_path / "out", backend="xnnpack", **flags))
    assert backend.artifact_bytes(plan) == pytest.approx((artifact / MODEL_FILE).stat().st_size, rel=0.02)


def test_the_estimated_memory_of_an_export_is_that_of_its_weights_held_and_written():
    skeleton = TARGETS["qwen3-4B"].module().skeleton(random_model("qwen3-4B").config, 64)
    linears = sum(m.weight.numel() for m in skeleton.model.modules() if isinstance(m, nn.Linear))
    embedding = skeleton.model.get_input_embeddings().weight.numel()
    rest = sum(p.numel() for p in skeleton.model.parameters()) - linears  # counts a tied lm_head as the embedding
    found = _model_bytes(skeleton.model, RECIPES["8da8w"])
    assert found == (linears + embedding + 4 * rest, linears + embedding + 4 * rest)


def test_a_weight_is_in_memory_once_as_held_and_once_as_written_for_all_methods(monkeypatch):
    programs = []
    preprocess = XnnpackBackend.preprocess

    def seen(program, specs):
        programs.append(program)
        return preprocess(program, specs)

    monkeypatch.setattr(XnnpackBackend, "preprocess", seen)
    model, ids = quantized(RECIPES["8da8w"]), torch.zeros(1, 4, dtype=torch.long)
    traced = {name: torch.export.export(model, (ids[:, :rows],), strict=False) for name, rows in (("a", 4), ("b", 2))}
    with applicable_passes():
        edge = to_edge_transform_and_lower(
            traced,
            partitioner=[LevelPartitioner()],
            compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
        )
    held = [value.data_ptr() for program in programs for value in program.state_dict.values() if value.ndim == 2]
    assert model.linear.weight.qdata.data_ptr() in held and len(held) == 2 * len(set(held))
    written = [
        lowered.named_data_store_output.buffers
        for name in traced
        for _, lowered, _ in get_lowered_submodules(edge.exported_program(name).graph_module)
    ]
    assert [id(data) for data in written[0]] == [id(data) for data in written[1]]
