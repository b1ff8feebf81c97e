"""Each patch of the register applies to the installed packages and is removed afterwards, and code is replaced only by
the register."""

import ast
import importlib.metadata
import re
from fnmatch import fnmatchcase

import pytest
import torch
from commands import run_command
from places import ROOT

from eagle3.export.cli import main as export_main
from eagle3.export.lowering.cuda.named_gpu import check_named_versions
from eagle3.export.lowering.mlx.generated import use_generated
from eagle3.export.patching import patches
from eagle3.export.patching.patches import PATCHES, Patch, replaced
from eagle3.export.patching.tested_versions import FOR_CPU, FOR_CUDA, TESTED, TESTED_WITH_GPU, check_versions

SOURCES = [path for top in ("export", "runner", "targets") for path in (ROOT / top).rglob("*.py")]


@pytest.mark.parametrize("name", PATCHES)
def test_each_patch_applies_alone_to_the_installed_versions_and_is_removed(name):
    use_generated()  # so that ExecuTorch's part for MLX is importable
    owner, attribute = patches._owner(name), name.rpartition(".")[2]
    before = vars(owner).get(attribute)
    value = getattr(owner, attribute, None)  # the same value, so that nothing changes for other code in this process
    with replaced(name, value):
        assert vars(owner)[attribute] is value and name in patches.used()
    assert vars(owner).get(attribute) is before


def test_a_name_that_upstream_removed_is_reported(monkeypatch):
    monkeypatch.setitem(PATCHES, "torch._inductor.graph.no_such_name", Patch("a reason"))
    monkeypatch.setitem(PATCHES, "torch._inductor.graph.NoSuchClass.method", Patch("a reason"))
    for name in ("torch._inductor.graph.no_such_name", "torch._inductor.graph.NoSuchClass.method"):
        line = rf"torch {torch.__version__.split('+')[0]}.* has no {name}.*\(a reason\): type pip install 'torch==2.13"
        with pytest.raises(ValueError, match=line), replaced(name, None):
            pass
        with pytest.raises(ValueError, match=line):
            patches.original(name)
    with pytest.raises(KeyError), replaced("torch.cuda.unregistered", None):
        pass


def test_replaced_attributes_are_restored_after_a_failure_and_static_methods_stay_static(monkeypatch):
    class Owner:
        @staticmethod
        def kept(x):
            return x

    stored = vars(Owner)["kept"]
    monkeypatch.setitem(PATCHES, "here.Owner.kept", Patch("a test"))
    with pytest.raises(RuntimeError), replaced("here.Owner.kept", staticmethod(lambda x: -x), Owner):
        assert Owner().kept(1) == -1
        raise RuntimeError
    assert vars(Owner)["kept"] is stored


def test_replaced_items_of_a_table_are_restored(monkeypatch):
    table = {"kept": 1, "replaced": 2}
    monkeypatch.setitem(PATCHES, "here.table", Patch("a test"))
    with patches.with_items("here.table", {"replaced": 3, "new": 4}, table):
        assert table == {"kept": 1, "replaced": 3, "new": 4}
    assert table == {"kept": 1, "replaced": 2}


def test_every_patch_is_used_and_nothing_is_replaced_outside_the_register():
    texts = {path: path.read_text() for path in SOURCES if path.name != "patches.py"}
    whole = "\n".join(texts.values())
    assert [name for name in PATCHES if name.rpartition(".")[2] not in whole] == []
    for path, text in texts.items():
        imported = {
            module
            for node in ast.walk(ast.parse(text))
            for module in ([node.module] if isinstance(node, ast.ImportFrom) else [])
            + ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [])
        }
        assert not {"unittest", "unittest.mock"} & imported, path


def test_the_readme_has_a_row_for_every_replaced_part_and_for_nothing_else():
    readme = (ROOT / "export" / "README.md").read_text()
    rows = readme.split("## Replaced parts of other packages")[1].split("\n## ")[0].splitlines()
    parts = [part for row in rows if row.startswith("| `") for part in re.findall("`([^`]+)`", row.split("|")[1])]

    def names(part: str) -> list[str]:
        return [name for name in PATCHES if fnmatchcase(name, part) or fnmatchcase(name, f"*.{part}")]

    assert [part for part in parts if not names(part)] == []
    assert PATCHES.keys() - {name for part in parts for name in names(part)} == set()


@pytest.mark.parametrize(("package", "version"), [*((name, "4.0.0") for name in FOR_CUDA), ("torch", "2.12.1")])
def test_untested_versions_of_patched_packages_are_refused(monkeypatch, package, version):
    real = importlib.metadata.version
    check_named_versions()
    monkeypatch.setattr("importlib.metadata.version", lambda name: version if name == package else real(name))
    for check in (check_named_versions, lambda: check_versions(FOR_CUDA, TESTED_WITH_GPU, "lowering for CUDA", "")):
        wanted = f"{package} {version}: .* type pip install '{package}=={TESTED[package][-1]}"
        with pytest.raises(ValueError, match=wanted):
            check()


def test_the_versions_of_every_patched_package_are_checked():
    for_cpu = {name.split(".")[0] for name in PATCHES if ".xnnpack" in name or name.startswith("transformers")}
    assert for_cpu <= set(FOR_CPU)
    public = {"ruamel.yaml.YAML"}  # only documented parts of it are replaced, so any version will do
    assert {name.split(".")[0] for name in PATCHES.keys() - public} <= {*FOR_CPU, *FOR_CUDA}


def test_verbose_lists_the_patches_of_an_export(tmp_path, monkeypatch):
    monkeypatch.setattr("eagle3.export.pipeline.run_export", lambda *given: {})
    monkeypatch.setattr("eagle3.export.report.result_text", lambda *given: "")
    export = ("--target-model", "gemma4-tiny", "--backend", "xnnpack", "--output-dir", tmp_path / "out")
    said = [run_command(export_main, *export, *verbose).stderr for verbose in ((), ("--verbose",))]
    with replaced("torch.accelerator.is_available", torch.accelerator.is_available):
        said.append(run_command(export_main, *export, "--verbose").stderr)
    assert "replaced for this export" not in said[0]
    assert "replaced for this export: torch.accelerator.is_available: it would query a GPU" in said[2]
