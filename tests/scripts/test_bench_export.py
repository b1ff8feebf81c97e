"""``scripts/bench/bench_export.py`` makes every combination of the flags that are compared, and packs each artifact."""

import shutil

import bench_export
import pytest
from click.testing import CliRunner

from eagle3.export.cli import main as export_main

ARTIFACTS = ["tiles-in-order", "tiles-early", "records-in-order", "records-early"]
REPEATED = ["--int4-layout", "tiles", "--int4-layout", "records", "--launches", "in-order", "--launches", "early"]


def run(*flags):
    return CliRunner().invoke(bench_export.main, [str(flag) for flag in flags])


@pytest.mark.parametrize(
    ("layouts", "orders", "names"),
    [
        ((), (), ["artifact"]),
        (("records",), ("early",), ["artifact"]),
        ((), ("in-order", "early"), ["in-order", "early"]),
    ],
)
def test_an_artifact_is_named_after_what_tells_it_from_the_others(layouts, orders, names):
    assert list(bench_export.combinations(layouts, orders)) == names


def test_every_combination_is_exported_with_flags_that_the_export_takes(tmp_path, monkeypatch):
    taken = {}

    def exported(place, layers, target, flags, draft, name):
        words = ["--target-model", target, "--output-dir", str(place / name), *flags]
        taken[name] = export_main.make_context("eagle3-export", words).params | {"layers": layers}
        return {"layers": layers, "artifact": name}

    monkeypatch.setattr(bench_export, "exported", exported)
    monkeypatch.setattr(bench_export, "save_target", lambda *_: None)
    monkeypatch.setattr(bench_export, "save_head", lambda *_: None)
    done = run("--layers", 6, "--cuda-arch", "sm_90", "--folder", tmp_path / "wide", "--json", *REPEATED)
    assert done.exit_code == 0, done.output
    assert list(taken) == ARTIFACTS
    for name, params in taken.items():
        assert f"{params['int4_layout']}-{params['launches']}" == name
        assert (params["cuda_arch"], params["layers"]) == ("sm_90", 6)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--pack",), "name one"),
        (("--backend", "xnnpack", "--launches", "early"), "are for cuda"),
        (("--backend", "xnnpack", "--pack", "--folder", "f"), "are for cuda"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, said):
    done = run(*flags)
    assert (done.exit_code, said in done.output) == (2, True), done.output


@pytest.mark.whole
def test_a_packed_artifact_is_deleted_and_one_that_cannot_be_packed_is_kept(cuda_artifact, tmp_path):
    place = tmp_path / "tiles-early"
    shutil.copytree(cuda_artifact, place)
    bench_export.pack_and_delete(place)
    assert [path.name for path in tmp_path.iterdir()] == ["tiles-early.tar.xz"]
    place.mkdir()
    with pytest.raises(bench_export.click.ClickException, match="was not packed"):
        bench_export.pack_and_delete(place)
    assert place.is_dir()
