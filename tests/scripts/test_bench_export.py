"""``scripts/bench/bench_export.py`` makes an artifact for each layout that is compared, and packs each."""

import shutil

import bench_export
import pytest
from click.testing import CliRunner

from eagle3.export.cli import main as export_main


def run(*flags):
    return CliRunner().invoke(bench_export.main, [str(flag) for flag in flags])


@pytest.mark.parametrize(
    ("layouts", "names"),
    [((), ["artifact"]), (("records",), ["artifact"]), (("tiles", "records"), ["tiles", "records"])],
)
def test_each_layout_is_exported_with_flags_that_the_export_takes(layouts, names, tmp_path, monkeypatch):
    taken = {}

    def exported(place, layers, target, flags, draft, name):
        words = ["--target-model", target, "--output-dir", str(place / name), *flags]
        taken[name] = export_main.make_context("eagle3-export", words).params | {"layers": layers}

    monkeypatch.setattr(bench_export, "exported", exported)
    monkeypatch.setattr(bench_export, "save_pair", lambda *_, **__: None)
    monkeypatch.setattr(bench_export, "show", lambda _: None)
    repeated = [part for layout in layouts for part in ("--int4-layout", layout)]
    done = run("--layers", 6, "--cuda-arch", "sm_90", "--folder", tmp_path / "wide", *repeated, "--", "--chain-len", 7)
    assert done.exit_code == 0, done.output
    assert list(taken) == names
    assert [params["int4_layout"] for params in taken.values()] == list(layouts or (None,))
    assert {(each["cuda_arch"], each["layers"], each["chain_len"]) for each in taken.values()} == {("sm_90", 6, 7)}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--pack",), "name one"),
        (("--backend", "xnnpack", "--int4-layout", "tiles"), "are for cuda"),
        (("--backend", "xnnpack", "--pack", "--folder", "f"), "are for cuda"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, said):
    done = run(*flags)
    assert (done.exit_code, said in done.output) == (2, True), done.output


@pytest.mark.whole
def test_a_packed_artifact_is_deleted_and_one_that_cannot_be_packed_is_kept(cuda_artifact, tmp_path):
    place = tmp_path / "tiles"
    shutil.copytree(cuda_artifact, place)
    bench_export.pack_and_delete(place)
    assert [path.name for path in tmp_path.iterdir()] == ["tiles.tar.xz"]
    place.mkdir()
    with pytest.raises(bench_export.click.ClickException, match="was not packed"):
        bench_export.pack_and_delete(place)
    assert place.is_dir()
