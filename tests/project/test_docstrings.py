"""Docstrings are sentences or noun phrases, not fragments that make sense only together with the name above them."""

import ast

from places import ROOT

FRAGMENTS = ("By ", "How ", "Of ", "What ", "Where ", "Whether ", "Which ", "Whose ", "Within ")


def test_no_docstring_begins_as_a_fragment():
    """Docstrings are the strings that stand alone: of modules, classes and functions, and below a name."""
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {node.value.value.split()[0]}"
        for top in ("export", "runner", "targets", "scripts", "tests")
        for file in sorted((ROOT / top).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if node.value.value.startswith(FRAGMENTS)
    ]
    assert found == []
