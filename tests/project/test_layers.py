"""The imports between folders: arrows point down, nothing imports a command, the runner never imports the exporter."""

import ast
from pathlib import Path

import pytest
from places import ROOT

RUNNER = {  # a folder imports its own files, and folders with a lower number
    "contract": 0,
    "system": 1,
    "artifact": 2,
    "text": 2,
    "hosts": 3,
    "loop": 4,
    "sampling": 5,
    "": 6,  # the library: the files of runner/ itself
    "commands": 7,
    "serve": 8,
}
EXPORT = {  # the same for the exporter
    "patching": 0,
    "output": 0,
    "checkpoints": 1,
    "configuration": 1,
    "twin": 2,
    "draft": 3,
    "planning": 4,
    "speculator": 4,
    "hub": 5,
    "lowering": 6,
    "checks": 7,
    "": 8,  # the commands, the library and one export from its plan on
}
LOWERING = {  # the folders of export/lowering
    "": 0,
    "cuda.kernels": 1,
    "cuda.weights": 2,
    "cuda.graph": 3,
    "cuda.inductor": 4,
    "edge": 5,
    "cuda.named_gpu": 6,
    "xnnpack": 7,
    "cuda": 7,
}
COMMANDS = {"runner.commands.run", "runner.commands.inspect", "runner.commands.bench"}
OPEN_TO_THE_EXPORTER = {"contract", "artifact", "system"}


def imports_of(file: Path) -> set[str]:
    """Return the dotted modules below ``eagle3`` that a file imports, also within functions."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name.removeprefix("eagle3.") for name in found if name.startswith("eagle3.")}


def folder_of(module: str, parent: str = "runner", layers: dict[str, int] = RUNNER) -> str | None:
    """Return the folder below ``parent`` that has a module, "" for ``parent`` itself; None for a module outside it."""
    if not f"{module}.".startswith(f"{parent}."):
        return None
    inside = module.removeprefix(parent).lstrip(".")
    return max(
        (folder for folder in layers if f"{inside}.".startswith(f"{folder}.") or not folder), key=len, default=""
    )


def files(top: str) -> list[Path]:
    return sorted((ROOT / top).rglob("*.py"))


@pytest.mark.parametrize("file", files("runner"), ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_in_the_runner_point_to_lower_layers(file):
    inside = file.relative_to(ROOT / "runner").parts[:-1]
    folder = inside[0] if inside else ""
    for module in imports_of(file):
        other = folder_of(module)
        assert other is not None, f"the runner imports {module}"
        assert other == folder or RUNNER[other] < RUNNER[folder], f"an arrow upward: {module}"
        assert module not in COMMANDS, f"nothing imports a command: {module}"


@pytest.mark.parametrize(("parent", "layers"), [("export", EXPORT), ("export.lowering", LOWERING)])
def test_arrows_in_the_exporter_point_down(parent, layers):
    upward = []
    for file in files(parent.replace(".", "/")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        folder = folder_of(module.removesuffix(".__init__"), parent, layers)
        for other in imports_of(file):
            where = folder_of(other, parent, layers)
            if where is None or where == folder:
                continue
            if layers[where] >= layers[folder]:
                upward.append(f"{module} imports {other}")
    assert upward == []


@pytest.mark.parametrize("file", files("export"), ids=lambda file: str(file.relative_to(ROOT)))
def test_the_exporter_imports_only_the_permitted_folders_of_the_runner(file):
    folders = {folder_of(module) for module in imports_of(file)} - {None}
    assert folders <= OPEN_TO_THE_EXPORTER


@pytest.mark.parametrize("file", files("targets"), ids=lambda file: str(file.relative_to(ROOT)))
def test_targets_import_nothing_above_them(file):
    assert {module.split(".")[0] for module in imports_of(file)} <= {"targets"}


def test_no_script_imports_a_command_line():
    for file in files("scripts"):
        assert not [module for module in imports_of(file) if "cli" in module.split(".") or module in COMMANDS], file


def test_every_folder_of_the_runner_has_a_layer():
    for top, layers in (("runner", RUNNER), ("export", EXPORT)):
        found = {path.parent.name for path in (ROOT / top).glob("*/__init__.py")}
        assert found == set(layers) - {""}


def test_the_layers_in_contributing_list_every_folder():
    picture = (ROOT / ".github" / "CONTRIBUTING.md").read_text().split("```mermaid")[1].split("```")[0]
    for folder in set(RUNNER) - {"", "sampling"}:
        assert folder in picture, folder


def test_an_import_of_a_higher_layer_is_found(tmp_path):
    file = tmp_path / "wrong.py"
    file.write_text("def f():\n    from eagle3.runner import model\n    import eagle3.runner.commands.bench\n")
    assert {folder_of(module) for module in imports_of(file)} == {"", "commands"}
