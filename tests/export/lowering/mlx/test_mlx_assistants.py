"""A Gemma 4 assistant is a program of its own for MLX, with copies of the target's keys, and the check reads them."""

import pytest

pytest.importorskip("mlx.core", reason="pip install 'mlx[cpu]' computes programs for MLX")

from mlx_nodes import add, changed, drop, named, nodes, rename, swap  # noqa: E402 - without MLX they are not needed
from random_checkpoints import random_model, save_random_assistant  # noqa: E402
from transformers import Gemma4TextConfig  # noqa: E402

from eagle3.export import ExportConfig  # noqa: E402
from eagle3.export.draft.kinds.gemma4_assistant.twin import states_are_shared  # noqa: E402
from eagle3.export.lowering.backend import load_backend  # noqa: E402
from eagle3.export.lowering.mlx.exact import compare  # noqa: E402
from eagle3.export.lowering.mlx.program import methods  # noqa: E402
from eagle3.export.output.contents import write_files  # noqa: E402
from eagle3.export.pipeline import load_speculator, make_metadata, trace  # noqa: E402
from eagle3.export.planning.plan import make_plan  # noqa: E402
from eagle3.runner.contract import DRAFT_DECODE, TARGET_ROWS  # noqa: E402


@pytest.fixture(scope="module")
def lowered(tmp_path_factory):
    """The methods of a target with rings and full layers and its assistant with centroids, the eager module and the
    metadata."""
    folder = tmp_path_factory.mktemp("assistant")
    with states_are_shared(Gemma4TextConfig):
        model = random_model("gemma4-31B")
    model.save_pretrained(folder / "target")
    save_random_assistant(folder / "draft", model.config, ordered=True)
    paths = {"checkpoint": folder / "target", "draft": folder / "draft"}
    config = ExportConfig("gemma4-31B", **paths, backend="mlx", chain_len=3, max_seq_len=128, fit=False)
    plan, backend = make_plan(config), load_backend("mlx")
    speculator = load_speculator(plan, backend.attention, backend.dtype, backend.conversion(plan))
    programs = {}
    for method in plan.programs:
        with backend.tracing(speculator, plan):
            programs[method.name] = trace(speculator, method, plan.draft.feature_size, backend.dtype)
    metadata = make_metadata(plan, {})
    files, _ = backend.lower(programs, metadata.constant_methods(), plan)
    write_files(files, folder)
    return methods(folder / "model.pte"), speculator, metadata


def test_an_assistants_program_equals_the_eager_module(lowered):
    loaded, speculator, metadata = lowered
    assert metadata.has_draft_cache and metadata.draft_sliding_window == 16
    assert compare(loaded, speculator, metadata) < 1e-4


def slices(method, axis):
    return [each for each in nodes(method, "SliceNode") if each["axis"]["literal"] == axis]


def positions_for_slots(method):
    full, *_, ring = nodes(method, "IndexCopyNode")[::-1]
    ring["indices"] = full["indices"]


def first_row(method):
    for each in slices(method, 1):
        each["start"]["literal"], each["stop"]["literal"] = 0, 1


FAULTS = {
    TARGET_ROWS: {
        "the keys of another layer": lambda m: nodes(m, "TakeNode")[-2]["x"].update(nodes(m, "SdpaNode")[0]["k"]),
        "values before keys": lambda m: (parts := nodes(m, "ConcatenateNode")[-1]["tensors"]).insert(2, parts.pop(3)),
        "the kinds exchanged": lambda m: nodes(m, "ConcatenateNode")[-1]["tensors"].reverse(),
        "positions for the slots of a ring": lambda m: nodes(m, "TakeNode")[-2]["index"].update(
            nodes(m, "TakeNode")[-3]["index"]
        ),
    },
    DRAFT_DECODE: {
        "a chain's step taken for a row of the target": lambda m: rename(m, "SubtractNode", "MaximumNode"),
        "steps added": lambda m: rename(m, "SubtractNode", "AddNode"),
        "rotated for the row itself": lambda m: add(m, nodes(m, "AddNode")[1]["b"], ..., -1),
        "no keys written": lambda m: drop(m, "IndexCopyNode"),
        "positions for the slots of a ring": positions_for_slots,
        "the first row in place of the last": first_row,
        "keys written as values": lambda m: [swap(slices(m, 2), end, 2, 3) for end in ("start", "stop")],
        "no mask": lambda m: nodes(m, "SdpaNode")[0].pop("mask"),
        "a mask without the row itself": lambda m: rename(m, "LessEqualNode", "LessNode"),
        "no step counted": lambda m: nodes(m, "ConcatenateNode")[-1]["tensors"].reverse(),
        "other tokens of a centroid": lambda m: add(m, named(m, "token_ordering"), (3, 1), 1),
    },
}


@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name, faults in FAULTS.items() for fault in faults])
def test_the_check_finds_a_fault_of_an_assistants_program(name, fault, lowered):
    loaded, speculator, metadata = lowered
    with pytest.raises(ValueError, match="differs from the eager module|index_copy writes slots"):
        compare(changed(loaded, name, FAULTS[name][fault]), speculator, metadata)
