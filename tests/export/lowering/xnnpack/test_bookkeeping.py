"""Facts that an export caches while it traces and lowers equal those that PyTorch and ExecuTorch would compute."""

import subprocess
import sys
from importlib import resources

import executorch.exir.dialects.edge as edge
import torch
from ruamel.yaml import YAML
from torch._export import utils

from eagle3.export.lowering.xnnpack.bookkeeping import LibYaml, kept_once


def test_libyaml_reads_the_same_table_of_operators():
    text = (resources.files(edge) / "edge.yaml").read_text(encoding="utf-8")
    read = LibYaml(typ="safe").load(text)
    assert read == YAML(typ="safe").load(text) and len(read) > 100


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


def told(source) -> tuple:
    """Return a node's history without the addresses of graphs."""
    return source.name, source.target, source.pass_name, source.action, tuple(map(told, source.from_node))


def decomposed() -> tuple[list[tuple], list]:
    """Return the histories of a program's nodes after two decompositions, and the nodes."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 2))
    program = torch.export.export(model, (torch.ones(3, 4),), strict=False)
    nodes = list(program.run_decompositions().run_decompositions().graph.nodes)
    return [tuple(map(told, node.meta.get("from_node", ()))) for node in nodes], nodes


def test_cached_node_histories_are_equal_and_shared():
    alone, apart = decomposed()
    with kept_once():
        kept, nodes = decomposed()
    assert kept == alone and max(len(str(each)) for each in kept) > 300

    def oldest(each) -> set[int]:
        return {id(source) for node in each for top in node.meta.get("from_node", ()) for source in top.from_node}

    assert len(oldest(nodes)) < len(oldest(apart))
    assert [node.name for node in nodes] == [node.name for node in apart]
    assert any(node.stack_trace for node in apart) and not any(node.stack_trace for node in nodes)


def test_composite_operators_are_the_same_and_looked_up_once(monkeypatch):
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
