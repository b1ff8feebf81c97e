"""An exported program for MLX is computed over ``mlx.core`` on the CPU, and the check finds faults in it."""

import json

import pytest
import torch

pytest.importorskip("mlx.core", reason="pip install 'mlx[cpu]' computes programs for MLX")

from family_exports import random_family, taps  # noqa: E402 - without MLX they are not needed
from mlx_nodes import add, changed, drop, named, nodes, rename, swap  # noqa: E402
from random_checkpoints import save_random_draft  # noqa: E402

from eagle3.export import ExportConfig, export  # noqa: E402
from eagle3.export.lowering.backend import load_backend  # noqa: E402
from eagle3.export.lowering.mlx.exact import InFloat32, compare, wide_caches  # noqa: E402
from eagle3.export.lowering.mlx.lowering import lower  # noqa: E402
from eagle3.export.lowering.mlx.program import BACKEND, methods  # noqa: E402
from eagle3.export.pipeline import load_speculator  # noqa: E402
from eagle3.export.planning.plan import make_plan  # noqa: E402
from eagle3.runner.artifact.opening import open_artifact  # noqa: E402
from eagle3.runner.contract import DRAFT_DECODE, TARGET_ROWS  # noqa: E402
from eagle3.runner.hosts.opening import open_session  # noqa: E402
from eagle3.runner.hosts.session import EagerSession, MethodsSession  # noqa: E402
from eagle3.runner.loop.generation import complete  # noqa: E402

WINDOW = 16


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The artifact of a target with a ring and a full layer and its EAGLE-3 head, in 4 and 8 bits, its record and its
    eager module."""
    folder = tmp_path_factory.mktemp("mlx")
    model = random_family("gemma3_text", ["sliding_attention", "full_attention"])
    model.save_pretrained(folder / "target")
    save_random_draft(folder / "draft", model.config, taps(model.config))
    paths = {"checkpoint": folder / "target", "draft": folder / "draft", "output_dir": folder / "out"}
    recipes = {"qlinear": "4w", "draft_qlinear": "8w", "group_size": 32}
    config = ExportConfig(**paths, **recipes, backend="mlx", chain_len=3, max_seq_len=128, fit=False)
    record = export(config).record
    plan, backend = make_plan(config), load_backend("mlx")
    speculator = load_speculator(plan, backend.attention, backend.dtype, backend.conversion(plan))
    backend.prepare(speculator, plan)
    return open_artifact(folder / "out"), record, speculator


@pytest.fixture(scope="module")
def loaded(exported):
    return methods(exported[0].model)


def test_an_export_is_checked_on_a_machine_without_apples_gpu(exported):
    artifact, record, _ = exported
    check = record["check"]
    assert check["compared_with_eager"] and check["prompts"] == 4 and check["proposals_compared"] > 0
    assert 0 < check["largest_difference"] < 1e-4
    assert "rounds" not in check  # its times would be those of another processor
    assert record["manifest"] | {"backend": "mlx", "qembedding": "8w", "group_size": 32} == record["manifest"]
    assert json.loads((artifact.folder / "export.json").read_text())["check"] == check
    with pytest.raises(ValueError, match=f"this ExecuTorch has no {BACKEND}: run it on a Mac"):
        open_session(artifact)


def test_rounds_give_the_eager_modules_tokens_up_to_the_last_slot(exported, loaded):
    artifact, _, speculator = exported
    for method in loaded.values():
        method.clear(exact=True)  # random weights have near-ties, which bfloat16 decides at random
    ours = MethodsSession(loaded, artifact.metadata)
    with InFloat32(), wide_caches(speculator):
        eager = EagerSession(speculator, artifact.metadata)
        for prompt, count in (([5, 7, 11], 8), ([*range(3, 96), *range(3, 24)], 128 - 114)):
            found, wanted = (complete(each, prompt, max_new_tokens=count, stop_ids=()) for each in (ours, eager))
            assert found.token_ids == wanted.token_ids and len(found.token_ids) == count
            assert found.stats.counts() == wanted.stats.counts()


def test_an_operation_that_mlx_lacks_is_refused_or_left_to_executorch(tmp_path):
    class Module(torch.nn.Module):
        def forward(self, x):
            return torch.relu(torch.cdist(torch.relu(x), x))

    program, outside = torch.export.export(Module(), (torch.randn(4, 4),)), {}
    with pytest.raises(ValueError, match="all has 2 delegates .* aten::_cdist_forward;.* --allow-fallback"):
        lower({"all": program}, {})
    (tmp_path / "model.pte").write_bytes(lower({"all": program}, {}, outside).buffer)
    assert outside == {"all": ["aten::_cdist_forward"]}
    with pytest.raises(ValueError, match="is not one delegate"):
        methods(tmp_path / "model.pte")


def test_scalars_of_one_value_and_two_dtypes_are_two_constants(tmp_path):
    """ExecuTorch alone gives an index the bfloat16 0 of the relu, and MLX refuses indices that are floats."""

    class Module(torch.nn.Module):
        def forward(self, x, table, ids):
            return torch.relu(x), table.index_select(0, (ids - 3).clamp_min(0))

    given = torch.randn(2, 4).bfloat16(), torch.randn(5, 3), torch.arange(4)
    (tmp_path / "model.pte").write_bytes(lower({"all": torch.export.export(Module(), given)}, {}).buffer)
    for found, wanted in zip(methods(tmp_path / "model.pte")["all"](*given), Module()(*given), strict=True):
        assert torch.equal(found, wanted)


def in_int32(method):
    method.graph["tensor_meta"][method.graph["input_map"][1]["idx"]]["scalar_type"] = 3


def positions_for_slots(method):
    for each in nodes(method, "IndexCopyNode"):
        each["indices"] = method.graph["input_map"][1]


TARGET_FAULTS = {
    "a ring one slot shorter": lambda m: add(m, named(m, f"_scalar_{2 * WINDOW}_int64"), ..., -1),
    "positions for the slots of a ring": positions_for_slots,
    "a window one token shorter": lambda m: add(m, named(m, f"_scalar_{WINDOW}_int64"), ..., -1),
    "a mask without the row itself": lambda m: rename(m, "LessEqualNode", "LessNode"),
    "the masks of two layers exchanged": lambda m: swap(nodes(m, "SdpaNode"), "mask"),
    "no mask": lambda m: nodes(m, "SdpaNode")[-1].pop("mask"),
    "another scale of attention": lambda m: nodes(m, "SdpaNode")[0].update(scale=0.2),
    "the scale of one group": lambda m: add(m, nodes(m, "QuantizedMatmulNode")[1]["scales"], (3, 1), 0.01),
    "the offset of one group": lambda m: add(m, nodes(m, "QuantizedMatmulNode")[2]["biases"], (5, 0), 0.01),
    "one code": lambda m: add(m, nodes(m, "QuantizedMatmulNode")[0]["w"], (7, 2), 1),
    "a token's row of the head": lambda m: add(m, nodes(m, "QuantizedMatmulNode")[-2]["scales"], (90, 0), 0.05),
    "groups of 64": lambda m: nodes(m, "QuantizedMatmulNode")[0].update(group_size=64),
    "codes of 8 bits": lambda m: nodes(m, "QuantizedMatmulNode")[0].update(bits=8),
    "positions in int32": in_int32,
    "a sum in place of a mean": lambda m: rename(m, "MeanNode", "SumNode"),
    "a weight of a norm": lambda m: add(m, named(m, "layers.0.input_layernorm.weight"), 7, 0.01),
    "a rotation by cosines alone": lambda m: rename(m, "SinNode", "CosNode"),
    "two layers with one cache": lambda m: nodes(m, "SdpaNode")[1].update(k=nodes(m, "SdpaNode")[0]["k"]),
    "ids over another axis": lambda m: nodes(m, "ArgmaxNode")[0].update(axis=1),
    "taps in another order": lambda m: nodes(m, "ConcatenateNode")[-1]["tensors"].reverse(),
}
DRAFT_FAULTS = {
    "a cache that only the other method writes": lambda m: drop(m, "IndexCopyNode"),
    "ids of the draft's vocabulary": lambda m: add(m, named(m, "d2t"), ..., 1),
    "the scale of one group of the draft": lambda m: add(m, nodes(m, "QuantizedMatmulNode")[0]["scales"], (0, 0), 0.01),
}


@pytest.mark.parametrize("fault", [*TARGET_FAULTS, *DRAFT_FAULTS])
def test_the_check_finds_a_fault_of_the_program(fault, exported, loaded):
    artifact, _, speculator = exported
    name = TARGET_ROWS if fault in TARGET_FAULTS else DRAFT_DECODE
    with pytest.raises(ValueError):
        compare(changed(loaded, name, (TARGET_FAULTS | DRAFT_FAULTS)[fault]), speculator, artifact.metadata)


def test_the_check_passes_a_program_without_a_fault(exported, loaded):
    artifact, _, speculator = exported
    assert compare(loaded, speculator, artifact.metadata) < 1e-4
