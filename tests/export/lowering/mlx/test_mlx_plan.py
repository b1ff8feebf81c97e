"""A plan for MLX has one method for the target and refuses flags and heads; code that Linux's wheel lacks is made."""

import sys
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import torch
from eager import eager_speculator
from refusals import refusal

from eagle3.export import ExportConfig, prepare
from eagle3.export.configuration.flags import check_flags
from eagle3.export.lowering.mlx import generated
from eagle3.export.lowering.mlx.forms import gathered, scattered
from eagle3.export.output.progress import Progress
from eagle3.export.pipeline import check, make_metadata
from eagle3.export.planning.plan import make_plan
from eagle3.runner.contract import DECODE, DRAFT_DECODE, PREFILL, TARGET_ROWS, TARGET_VERIFY, Metadata
from eagle3.runner.hosts.session import EagerSession, MethodsSession
from eagle3.targets import TARGETS

TINY = TARGETS["gemma4-tiny"]
GIVEN = ExportConfig("gemma4-tiny", backend="mlx", fit=False)


@pytest.fixture(scope="module")
def plan():
    return make_plan(GIVEN)


def test_one_method_computes_all_rows_of_the_target_and_older_metadata_names_none(plan):
    assert [(each.name, each.min_len, each.max_len) for each in plan.programs] == [
        (TARGET_ROWS, 1, 64),
        (DRAFT_DECODE, 1, 64),
    ]
    metadata = make_metadata(plan, {"format_version": 3})
    assert metadata.served_by == dict.fromkeys((PREFILL, TARGET_VERIFY, DECODE), TARGET_ROWS)
    constants = {name: [value] for name, value in metadata.constant_methods().items()}
    constants["get_eos_ids"] = list(metadata.eos_ids)
    assert Metadata.read(set(constants), constants.__getitem__) == metadata
    older = make_plan(replace(GIVEN, backend="xnnpack"))
    assert older.programs == older.methods and "get_served_by" not in make_metadata(older, {}).constant_methods()


def test_a_session_cuts_the_rows_of_the_one_method_to_those_of_each_method(plan):
    speculator, metadata = eager_speculator(plan), make_metadata(plan, {})
    methods = {TARGET_ROWS: speculator.target_rows, DRAFT_DECODE: speculator.draft_decode}
    ours, eager = MethodsSession(methods, metadata), EagerSession(speculator, replace(metadata, served_by=None))
    assert ours.has_decode and not ours.has_speculate
    tokens = torch.randint(metadata.vocab_size, (1, 30))
    with torch.no_grad():
        for method, start, rows in ((PREFILL, 0, 24), (TARGET_VERIFY, 24, 4), (TARGET_VERIFY, 25, 2), (DECODE, 26, 1)):
            given = tokens[:, start : start + rows], ours.positions[start : start + rows]
            for found, wanted in zip(getattr(ours, method)(*given), getattr(eager, method)(*given), strict=True):
                assert found.shape == wanted.shape
                torch.testing.assert_close(found, wanted)
    assert set(ours.calls) == {PREFILL, TARGET_VERIFY, DECODE}


@pytest.mark.parametrize(
    ("flags", "fact"),
    [
        ({"speculate": True}, "--speculate adds a method, and methods for --backend mlx share no caches"),
        ({"with_forward": True}, "--with-forward adds a method"),
        ({"with_decode": True}, "--with-decode adds a method"),
        ({"sessions": True}, "--sessions: --backend mlx does not export read_state and write_state"),
        ({"group_size": 64}, "--group-size 64 is for 4w or 8w"),
        ({"qlinear": "8da4w"}, "--qlinear 8da4w: --backend mlx has no kernels for it"),
        ({"kv_cache": "int8"}, "--kv-cache int8 has no effect with --backend mlx"),
    ],
)
def test_flags_that_need_shared_caches_or_other_kernels_are_refused(flags, fact):
    assert refusal(check_flags, replace(GIVEN, **flags)).startswith(fact)


def test_a_head_that_reads_the_targets_caches_gets_their_rows_with_the_feature():
    given = replace(GIVEN, draft=TINY.draft.parent / "assistant")
    plan, shared = make_plan(given), make_plan(replace(given, backend="xnnpack"))
    assert plan.method(DRAFT_DECODE).max_len == 64 and shared.method(DRAFT_DECODE).max_len == 1
    assert plan.draft.windows == (0, 64) and shared.draft.windows == ()
    assert plan.draft.feature_size == 256 + 1 + 2 * (2 * 64 + 128) and shared.draft.feature_size == 256
    assert plan.cache_bytes - shared.cache_bytes // 2 == 2 * 2 * (2 * 64 * 2 * 64 + 128 * plan.max_seq_len)


def test_groups_that_do_not_fit_are_refused_in_a_dry_run(tmp_path):
    line = refusal(prepare, replace(GIVEN, dry_run=True, output_dir=tmp_path / "out", qlinear="4w", group_size=96))
    assert "--backend mlx takes groups of 32, 64, 128" in line and "type --group-size 32 or 64" in line


def test_an_artifact_with_operations_between_delegates_is_not_checked_without_its_runtime(tmp_path, capsys):
    assert check(tmp_path, make_plan(GIVEN), None, Progress(), None, mixed=True) is None
    assert "not checked: only the artifact's own runtime" in capsys.readouterr().err


def test_a_chosen_column_is_read_and_written_as_gather_and_scatter_do():
    x, index = torch.randn(2, 3, 7), torch.stack([torch.randperm(7)[:3] for _ in range(6)]).view(2, 3, 3)
    assert torch.equal(gathered(x, index), x.gather(-1, index))
    value = torch.randn(2, 3, 3)
    assert torch.equal(scattered(x, index, value), x.scatter(-1, index, value))
    assert torch.equal(scattered(x, index, 2.0), x.scatter(-1, index, 2.0))


def test_the_code_that_the_wheel_lacks_is_made_once_in_a_cache_folder(tmp_path, monkeypatch):
    if (generated._installed() / generated.SCHEMA).exists():
        pytest.skip("this wheel has the code")
    installed = sorted(generated._installed().iterdir())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, generated.PACKAGE, None)  # afterwards it is as it was before
    del sys.modules[generated.PACKAGE]
    generated.use_generated()
    (folder,) = map(Path, sys.modules[generated.PACKAGE].__path__)
    assert folder.parent == tmp_path / "eagle3-export" and list(folder.parent.iterdir()) == [folder]
    spec = PathFinder.find_spec(f"{generated.PACKAGE}.mlx_graph_schema", sys.modules[generated.PACKAGE].__path__)
    assert spec.origin == str(folder / generated.SCHEMA)
    assert sorted(generated._installed().iterdir()) == installed
    made = (folder / generated.SCHEMA).stat().st_mtime_ns
    del sys.modules[generated.PACKAGE]
    generated.use_generated()
    assert (folder / generated.SCHEMA).stat().st_mtime_ns == made
