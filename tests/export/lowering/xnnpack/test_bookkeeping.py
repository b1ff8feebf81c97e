"""libyaml reads ExecuTorch's table like the original parser, and nodes without stacks are otherwise the same."""

import subprocess
import sys
from importlib import resources

import executorch.exir.dialects.edge as edge
import pytest
import torch
from ruamel.yaml import YAML

from eagle3.export.lowering.xnnpack.bookkeeping import LibYaml, without_stacks


def test_libyaml_reads_the_same_table_of_operators():
    text = (resources.files(edge) / "edge.yaml").read_text(encoding="utf-8")
    read = LibYaml(typ="safe").load(text)
    assert read == YAML(typ="safe").load(text) and len(read) > 100


@pytest.mark.whole
def test_executorch_is_imported_with_libyaml_and_ruamel_is_restored():
    code = """
import sys
from eagle3.export.lowering.xnnpack.bookkeeping import LibYaml, tables_read_by_libyaml
with tables_read_by_libyaml():
    from executorch.exir.dialects.edge import _ops
import ruamel.yaml
assert _ops.YAML is LibYaml and ruamel.yaml.YAML is not LibYaml and len(_ops._edge_dialect_info) > 100
with tables_read_by_libyaml():
    assert ruamel.yaml is sys.modules["ruamel.yaml"]
"""
    subprocess.run([sys.executable, "-c", code], check=True, stderr=subprocess.DEVNULL)


def decomposed() -> list[torch.fx.Node]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 2))
    program = torch.export.export(model, (torch.ones(3, 4),), strict=False)
    return list(program.run_decompositions().run_decompositions().graph.nodes)


def test_nodes_have_no_stack_and_are_the_same_otherwise():
    with_stacks = decomposed()
    with without_stacks():
        nodes = decomposed()
    assert [(node.name, node.target) for node in nodes] == [(node.name, node.target) for node in with_stacks]
    assert any(node.stack_trace for node in with_stacks) and not any(node.stack_trace for node in nodes)
