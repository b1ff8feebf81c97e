"""The imports between folders: arrows point down, nothing imports a command, the runner never imports the exporter."""

import ast
from functools import cache
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
    "mlx": 8,
}
COMMANDS = {"runner.commands.run", "runner.commands.inspect", "runner.commands.bench"}
OPEN_TO_THE_EXPORTER = ("runner.contract", "runner.artifact", "runner.system")


@cache
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


@pytest.mark.parametrize(("parent", "layers"), [("runner", RUNNER), ("export", EXPORT), ("export.lowering", LOWERING)])
def test_arrows_between_folders_point_down(parent, layers):
    upward = []
    for file in files(parent.replace(".", "/")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        folder = folder_of(module.removesuffix(".__init__"), parent, layers)
        for other in imports_of(file):
            where = folder_of(other, parent, layers)
            if where not in (None, folder) and layers[where] >= layers[folder]:
                upward.append(f"{module} imports {other}")
    assert upward == []


@pytest.mark.parametrize(
    ("top", "permitted"),
    [("runner", ("runner",)), ("targets", ("targets",)), ("export", ("export", "targets", *OPEN_TO_THE_EXPORTER))],
)
def test_a_room_imports_only_the_permitted_ones(top, permitted):
    wrong = [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in files(top)
        for module in imports_of(file)
        if not f"{module}.".startswith(tuple(f"{each}." for each in permitted))
    ]
    assert wrong == []


def test_nothing_imports_a_command():
    found = [(file, module) for top in ("runner", "scripts") for file in files(top) for module in imports_of(file)]
    assert [each for each in found if each[1] in COMMANDS] == []
    assert [each for each in found if each[0].is_relative_to(ROOT / "scripts") and "cli" in each[1].split(".")] == []


def test_every_folder_has_a_layer():
    for top, layers in (("runner", RUNNER), ("export", EXPORT)):
        found = {path.parent.name for path in (ROOT / top).glob("*/__init__.py")}
        assert found == set(layers) - {""}
    picture = (ROOT / ".github" / "CONTRIBUTING.md").read_text().split("```mermaid")[1].split("```")[0]
    assert [folder for folder in RUNNER if folder not in picture and folder != "sampling"] == []
