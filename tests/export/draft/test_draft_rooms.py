"""The packages of draft heads: kinds import the registry of names, which imports nothing, and no other kind."""

import ast
from pathlib import Path

import pytest
from places import ROOT

ORDER = ("twin", "draft/kinds", "draft/common", "KIND", "draft")
"""Rooms of ``export/``, from below; ``KIND`` stands for the folder of any kind."""


def rooms(export: Path) -> list[str]:
    return [
        str(path.parent.relative_to(export))
        for top in ("draft", "twin")
        for path in sorted((export / top).rglob("__init__.py"))
    ]


def height(room: str) -> int:
    return ORDER.index(room) if room in ORDER else ORDER.index("KIND")


def arrows(export: Path, room: str) -> set[str]:
    """Return the other packages that the files of a package import, including imports within functions."""
    found: set[str] = set()
    for file in (export / room).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    paths = [export / name.removeprefix("eagle3.export.").replace(".", "/") for name in found]
    files = [path for path in paths if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()]
    others = {str((path if path.is_dir() else path.parent).relative_to(export)) for path in files}
    return {other for other in others if other.split("/")[0] in ("draft", "twin")} - {room}


@pytest.mark.parametrize("room", rooms(ROOT / "export"))
def test_a_package_of_draft_heads_imports_only_lower_packages(room):
    upward = [other for other in arrows(ROOT / "export", room) if height(other) >= height(room)]
    assert upward == []
