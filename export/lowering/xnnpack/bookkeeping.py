"""Removes repeated bookkeeping of PyTorch and ExecuTorch while they trace and lower. The resulting program is the same.

- For each traced node the Python stack is collected and formatted, although ExecuTorch does not write it.
- ExecuTorch's table of the edge dialect, 138 kB of YAML, is read by a parser written in Python.
- Each graph that a pass builds or changes is converted to Python and compiled, but a lowering calls hardly any of them.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import yaml
from torch.fx import GraphModule
from torch.fx.graph import _PyTreeCodeGen

from eagle3.export.patching.patches import original, replaced

PARSER, TABLE = "ruamel.yaml", "executorch.exir.dialects.edge._ops"
NO_STACKS = "torch.fx.config.do_not_emit_stack_traces"
RECOMPILE = "torch.fx.GraphModule.recompile"


@contextmanager
def without_stacks() -> Iterator[None]:
    """Trace nodes without their Python stacks."""
    with replaced(NO_STACKS, True):
        yield


class LibYaml:
    """Implements the part of ruamel's ``YAML`` that ExecuTorch uses, with libyaml."""

    def __init__(self, typ: str):
        assert typ == "safe"

    def load(self, text: str) -> Any:  # noqa: ANN401
        return yaml.load(text, yaml.CSafeLoader)


@contextmanager
def tables_read_by_libyaml() -> Iterator[None]:
    """Make ExecuTorch's compiler read its table with libyaml when it is imported within the context. This has no effect
    if the compiler is imported already, or if PyYAML lacks libyaml."""
    if not hasattr(yaml, "CSafeLoader") or TABLE in sys.modules:
        yield
        return
    ruamel, sys.modules[PARSER] = sys.modules.get(PARSER), ModuleType(PARSER)
    sys.modules[PARSER].YAML = LibYaml  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del sys.modules[PARSER]
        if ruamel is not None:
            sys.modules[PARSER] = ruamel


@contextmanager
def code_on_call() -> Iterator[None]:
    """Compile the Python code of graphs made within the context only when a graph is first called."""
    recompile = original(RECOMPILE)

    def put_off(self: GraphModule) -> None:
        def forward(self: GraphModule, *args: Any, **kwargs: Any) -> object:
            recompile(self)
            return type(self).forward(self, *args, **kwargs)

        codegen = self.graph._codegen
        if isinstance(codegen, _PyTreeCodeGen):
            self._in_spec, self._out_spec = codegen.pytree_info.in_spec, codegen.pytree_info.out_spec
        self._code = "(made when it is called)"  # ExecuTorch writes the code only to a debug log
        type(self).forward = forward

    with replaced(RECOMPILE, put_off):
        yield
