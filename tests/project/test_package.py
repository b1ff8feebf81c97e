"""An install has every sub-package and every command, and an import loads no package that it should not."""

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from typing import get_type_hints

import click
import pytest
from click.testing import CliRunner
from places import ROOT

import eagle3.export
import eagle3.runner
from eagle3.runner.options import OptionFields, Options

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES, DATA = (PROJECT["tool"]["setuptools"][name] for name in ("packages", "package-data"))
COMMANDS = [command.split(":") for command in PROJECT["project"]["scripts"].values()]
PYTHON_FILES = [path for top in ("export", "runner", "targets") for path in sorted((ROOT / top).rglob("*.py"))]
SLOW = {"torch", "transformers", "executorch", "numpy", "rich", "pydantic", "starlette"}


def test_every_folder_with_python_files_is_a_listed_package():
    found = {".".join(("eagle3", *path.parent.relative_to(ROOT).parts)) for path in PYTHON_FILES}
    assert found == set(PACKAGES)
    for package in ("runner", "targets"):
        assert "py.typed" in DATA[f"eagle3.{package}"] and (ROOT / package / "py.typed").is_file()
    assert DATA["eagle3.runner.serve"] == ["static/*"]  # the page


def test_no_module_imports_a_private_name_of_another():
    taken = [
        f"{path.relative_to(ROOT)}: {alias.name}"
        for path in PYTHON_FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("eagle3")
        for alias in node.names
        if alias.name.startswith("_")
    ]
    assert not taken


def imported_modules(statement: str) -> set[str]:
    code = f"import atexit, sys; atexit.register(lambda: print(*sys.modules)); {statement}"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_a_command_answers_help_and_a_package_is_imported_without_slow_modules():
    names = ["eagle3.runner", "eagle3.export", *(module for module, _ in COMMANDS)]
    loaded = imported_modules(f"import {', '.join(names)}; eagle3.runner.commands.run.main(['--help'])")
    assert not SLOW & loaded


@pytest.mark.parametrize(("module", "main"), COMMANDS)
def test_help_shows_every_option_once_and_every_heading(module, main):
    shown = getattr(importlib.import_module(module), main)
    text = CliRunner().invoke(shown, ["--help"]).output
    lines = [line.split()[0].rstrip(",") for line in text.splitlines() if line.startswith("  --")]
    options = [option.opts[0] for option in shown.get_params(click.Context(shown)) if isinstance(option, click.Option)]
    assert lines == options and len(options) >= 5
    headings = getattr(importlib.import_module(module), "HEADINGS", {"": "Options"})
    assert re.findall(r"^(?!Usage)(\S.*):$", text, re.MULTILINE) == [
        *headings.values(),
        *["Other"][: len(headings) - 1],
    ]


@pytest.mark.parametrize(
    ("package", "names"),
    [
        (eagle3.runner, {"load", "Model", "Result", "Options", "Conversation", "BusyError"}),
        (eagle3.export, {"ExportConfig", "Exported", "Prepared", "export", "prepare"}),
    ],
    ids=["runner", "export"],
)
def test_the_public_names_of_a_package(package, names):
    assert set(package.__all__) == names and all(getattr(package, name).__name__ == name for name in names)
    assert package.__version__ == PROJECT["project"]["version"]
    with pytest.raises(AttributeError, match="no attribute 'Plan'"):
        _ = package.Plan


def test_the_keywords_of_generate_are_the_fields_of_options():
    assert get_type_hints(OptionFields) == get_type_hints(Options)


def test_threads_are_set_before_a_class_of_the_runner_imports_torch():
    code = "import os; from eagle3.runner import Model, load; print(os.environ['OMP_NUM_THREADS'])"
    bare = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=bare)
    assert done.stdout.split() == ["1"], done.stderr


def test_a_dry_run_for_the_cpu_imports_no_compiler(tmp_path):
    flags = ["--target-model", "gemma4-tiny", "--backend", "xnnpack", "--dry-run", "--output-dir", str(tmp_path)]
    loaded = imported_modules(f"from eagle3.export.cli import main; main({flags})")
    assert "eagle3.export.lowering.xnnpack.backend" in loaded
    assert not {"executorch.exir", "eagle3.export.lowering.xnnpack.lowering"} & loaded


def test_the_runner_imports_neither_exporter_nor_compiler():
    runtime = "import eagle3.runner.loop.generation, eagle3.runner.hosts.executorch_host as r; r.load_runtime()"
    loaded = imported_modules(runtime)
    assert not [name for name in loaded if name.startswith(("eagle3.export", "eagle3.targets"))]
    assert not {"torch._dynamo", "executorch.exir"} & loaded  # 4 s; a stand-in of executorch.exir is removed


@pytest.mark.whole
def test_the_compiler_can_be_imported_after_the_runtime():
    runtime = "import eagle3.runner.hosts.executorch_host as r; r.load_runtime()"
    assert "executorch.exir.program" in imported_modules(f"{runtime}; import executorch.exir as e; e.to_edge")
