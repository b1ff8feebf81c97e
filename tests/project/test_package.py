"""An install has every sub-package and every command, and an import loads no package that it should not."""

import ast
import importlib
import os
import re
import resource
import subprocess
import sys
import tomllib
from typing import get_type_hints

import click
import pytest
from click.testing import CliRunner
from places import ROOT

from eagle3.runner.options import OptionFields, Options

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_folder_with_python_files_is_a_listed_package():
    found = {
        ".".join(("eagle3", *path.parent.relative_to(ROOT).parts))
        for top in ("export", "runner", "targets")
        for path in (ROOT / top).rglob("*.py")
    }
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])


def test_no_module_imports_a_private_name_of_another():
    taken = [
        f"{path.relative_to(ROOT)}: {alias.name}"
        for top in ("export", "runner", "targets")
        for path in sorted((ROOT / top).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("eagle3")
        for alias in node.names
        if alias.name.startswith("_")
    ]
    assert not taken


@pytest.mark.parametrize("package", ["eagle3.runner", "eagle3.targets"])
def test_each_typed_package_has_py_typed(package):
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"][package]
    assert (ROOT / package.removeprefix("eagle3.") / "py.typed").is_file()


def imported_modules(statement: str) -> set[str]:
    code = f"import sys; {statement}; print('\\n'.join(sys.modules))"
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return set(out.stdout.split())


@pytest.mark.parametrize("command", PROJECT["project"]["scripts"].values())
def test_a_command_answers_help_without_importing_torch(command):
    module = command.split(":")[0]
    assert not {"torch", "transformers", "executorch"} & imported_modules(f"import {module}")


@pytest.mark.parametrize("command", PROJECT["project"]["scripts"].values())
def test_help_shows_every_option_once_and_every_heading(command):
    module, main = command.split(":")
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


def test_the_runner_exports_six_names_and_imports_them_lazily():
    import eagle3.runner

    names = {"load", "Model", "Result", "Options", "Conversation", "BusyError"}
    assert set(eagle3.runner.__all__) == names and all(getattr(eagle3.runner, name).__name__ == name for name in names)
    assert not {"torch", "transformers", "executorch"} & imported_modules("import eagle3.runner")
    assert eagle3.runner.__version__ == PROJECT["project"]["version"]
    with pytest.raises(AttributeError, match="no attribute 'Session'"):
        _ = eagle3.runner.Session


def test_the_exporter_exports_five_names_and_imports_them_lazily():
    import eagle3.export

    names = {"ExportConfig", "Exported", "Prepared", "export", "prepare"}
    assert set(eagle3.export.__all__) == names and all(getattr(eagle3.export, name).__name__ == name for name in names)
    assert not {"torch", "transformers", "executorch"} & imported_modules("import eagle3.export")
    assert eagle3.export.__version__ == PROJECT["project"]["version"]
    with pytest.raises(AttributeError, match="no attribute 'Plan'"):
        _ = eagle3.export.Plan


def test_the_keywords_of_generate_are_the_fields_of_options():
    hints = get_type_hints(Options)
    assert get_type_hints(OptionFields) == hints


def test_threads_are_set_before_a_class_of_the_runner_imports_torch():
    code = "import os; from eagle3.runner import Model, load; print(os.environ['OMP_NUM_THREADS'])"
    bare = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=bare)
    assert done.stdout.split() == ["1"], done.stderr


def test_eagle3_run_help_takes_a_third_of_a_second():
    """The least CPU time of three runs counts, because another process may use the core."""
    code = "from eagle3.runner.commands.run import main; main(['--help'], standalone_mode=False)"
    measured = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        measured.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(measured) < 0.3, measured


def test_a_dry_run_for_the_cpu_imports_no_compiler(tmp_path):
    flags = ["--target-model", "gemma4-tiny", "--backend", "xnnpack", "--dry-run", "--output-dir", str(tmp_path)]
    statement = f"from eagle3.export.cli import main; main({flags})"  # ``main`` exits the process
    loaded = imported_modules(f"import atexit; atexit.register(lambda: print(*sys.modules)); {statement}")
    assert "eagle3.export.lowering.xnnpack.backend" in loaded
    assert not {"executorch.exir", "eagle3.export.lowering.xnnpack.lowering"} & loaded


def test_the_runner_never_imports_the_exporter_nor_the_compiler():
    loaded = imported_modules(
        "import eagle3.runner.loop.generation, eagle3.runner.hosts.executorch_host as r; r.load_runtime()"
    )
    assert not [name for name in loaded if name.startswith(("eagle3.export", "eagle3.targets"))]
    assert "torch._dynamo" not in loaded  # executorch.exir imports it, in 4 s
    assert "executorch.exir" not in loaded  # its stand-in is removed


@pytest.mark.whole
def test_the_compiler_can_be_imported_after_the_runtime():
    loaded = imported_modules(
        "import eagle3.runner.hosts.executorch_host as r; r.load_runtime(); import executorch.exir as e; e.to_edge"
    )
    assert "executorch.exir.program" in loaded
