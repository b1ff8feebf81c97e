"""The imports between folders: arrows point down, nothing imports a command, the runner never imports the exporter."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RUNNER = {  # a room imports rooms of a lower number, and its own files
    "contract": 0,
    "console": 1,
    "hardware": 1,
    "artifact": 2,
    "machine_code": 3,
    "cost": 4,
    "hosts": 4,
    "": 5,  # the model and the loop: the files of runner/ itself
    "sampling": 5,
    "run": 6,
    "inspect": 6,
    "bench": 6,
    "serve": 6,
}
COMMANDS = {"run", "inspect", "bench", "serve"}
OPEN_TO_THE_EXPORTER = {"contract", "artifact", "console", "hardware"}
LOW = {("console", "hardware"), ("hardware", "console")}
"""The rooms for what commands check before they start, and what a check is told by."""


def imports_of(file: Path) -> set[str]:
    """Return the dotted modules below ``eagle3`` that a file imports, also within functions."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name.removeprefix("eagle3.") for name in found if name.startswith("eagle3.")}


def room_of(module: str) -> str | None:
    """Return the room of the runner that a module is in, "" for ``runner/`` itself, None for a module outside the
    runner."""
    top, *rest = module.split(".")
    if top != "runner":
        return None
    return rest[0] if rest and rest[0] in RUNNER else ""


def files(top: str) -> list[Path]:
    return sorted((ROOT / top).rglob("*.py"))


@pytest.mark.parametrize("file", files("runner"), ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_in_the_runner_point_to_lower_layers(file):
    inside = file.relative_to(ROOT / "runner").parts[:-1]
    room = inside[0] if inside else ""
    for module in imports_of(file):
        other = room_of(module)
        assert other is not None, f"the runner imports {module}"
        if other == room or (room, other) in LOW:
            continue
        assert RUNNER[other] <= RUNNER[room], f"an arrow upward: {module}"
        assert other not in COMMANDS, f"nothing imports a command: {module}"


@pytest.mark.parametrize("file", files("export"), ids=lambda file: str(file.relative_to(ROOT)))
def test_the_exporter_imports_only_the_permitted_rooms_of_the_runner(file):
    rooms = {room_of(module) for module in imports_of(file)} - {None}
    assert rooms <= OPEN_TO_THE_EXPORTER


@pytest.mark.parametrize("file", files("targets"), ids=lambda file: str(file.relative_to(ROOT)))
def test_targets_import_nothing_above_them(file):
    assert {module.split(".")[0] for module in imports_of(file)} <= {"targets"}


def test_no_script_imports_a_command_line():
    for file in files("scripts"):
        assert not [module for module in imports_of(file) if module.split(".")[-2:-1] == ["cli"]], file


def test_every_room_of_the_runner_has_a_layer():
    found = {path.parent.name for path in (ROOT / "runner").glob("*/__init__.py")}
    assert found == set(RUNNER) - {""}


def test_the_layers_in_contributing_list_every_room():
    picture = (ROOT / ".github" / "CONTRIBUTING.md").read_text().split("```mermaid")[1].split("```")[0]
    for room in set(RUNNER) - {"", "sampling"}:
        assert room in picture, room


def test_an_import_of_a_higher_layer_is_found(tmp_path):
    file = tmp_path / "wrong.py"
    file.write_text("def f():\n    from eagle3.runner import model\n    import eagle3.runner.bench.cli\n")
    assert {room_of(module) for module in imports_of(file)} == {"", "bench"}
