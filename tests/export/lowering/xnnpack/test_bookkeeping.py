"""The facts that an export keeps once while it traces and lowers are those that PyTorch and ExecuTorch would have."""

import subprocess
import sys
from importlib import resources

import executorch.exir.dialects.edge as edge
import torch
from ruamel.yaml import YAML
from torch._export import utils

from eagle3.export.lowering.xnnpack.bookkeeping import LibYaml, kept_once


def test_the_table_of_operators_is_the_same():
    text = (resources.files(edge) / "edge.yaml").read_text(encoding="utf-8")
    read = LibYaml(typ="safe").load(text)
    assert read == YAML(typ="safe").load(text) and len(read) > 100


def test_a_compiler_is_imported_with_it_and_ruamel_is_put_back():
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


def told(source) -> tuple:
    """A node's history without the graphs' addresses."""
    return source.name, source.target, source.pass_name, source.action, tuple(map(told, source.from_node))


def decomposed() -> tuple[list[tuple], list]:
    """The histories of a program's nodes behind two decompositions, and the nodes."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 2))
    program = torch.export.export(model, (torch.ones(3, 4),), strict=False)
    nodes = list(program.run_decompositions().run_decompositions().graph.nodes)
    return [tuple(map(told, node.meta.get("from_node", ()))) for node in nodes], nodes


def test_a_nodes_history_is_the_same_and_shared():
    alone, apart = decomposed()
    with kept_once():
        kept, nodes = decomposed()
    assert kept == alone and max(len(str(each)) for each in kept) > 300

    def oldest(each) -> set[int]:
        return {id(source) for node in each for top in node.meta.get("from_node", ()) for source in top.from_node}

    assert len(oldest(nodes)) < len(oldest(apart))
    assert [node.name for node in nodes] == [node.name for node in apart]
    assert any(node.stack_trace for node in apart) and not any(node.stack_trace for node in nodes)


def test_composites_are_the_same_and_looked_up_once(monkeypatch):
    asked, ask = [], torch._C._dispatch_get_registrations_for_dispatch_key
    monkeypatch.setattr(
        torch._C, "_dispatch_get_registrations_for_dispatch_key", lambda key: asked.append(key) or ask(key)
    )
    alone = utils._collect_all_valid_cia_ops()
    assert len(asked) > 5
    asked.clear()
    with kept_once():
        assert utils._collect_all_valid_cia_ops() == alone
    assert len(asked) == 1
