"""Docstrings are sentences or noun phrases, not fragments that make sense only together with the name above them."""

import ast
from collections.abc import Iterator

import pytest
from places import ROOT

FRAGMENTS = ("By ", "How ", "Of ", "What ", "Where ", "Whether ", "Which ", "Whose ", "Within ")


def docstrings(source: str) -> Iterator[ast.Constant]:
    """Yield the strings that stand alone: those of modules, classes and functions, and those below a name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


@pytest.mark.first(1)
@pytest.mark.parametrize("top", ["export", "runner", "targets", "scripts", "tests"])
def test_no_docstring_begins_as_a_fragment(top):
    found = [
        f"{file.relative_to(ROOT)}:{each.lineno}: {each.value.split()[0]}"
        for file in sorted((ROOT / top).rglob("*.py"))
        for each in docstrings(file.read_text())
        if each.value.startswith(FRAGMENTS)
    ]
    assert found == []


def test_a_docstring_that_begins_as_a_fragment_is_found():
    source = 'X = 1\n"""Of a head."""\n\n\ndef f():\n    """Whether it is."""\n\n\ndef g():\n    """Return it."""\n'
    assert [each.lineno for each in docstrings(source) if each.value.startswith(FRAGMENTS)] == [2, 6]
