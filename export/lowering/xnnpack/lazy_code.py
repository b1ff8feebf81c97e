"""Graphs without the Python that torch.fx makes of them, until it is called: a lowering calls hardly any.

``GraphModule.recompile`` writes and compiles a ``forward`` for each graph that a pass builds or changes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.fx import GraphModule
from torch.fx.graph import _PyTreeCodeGen

from eagle3.export.patches import original, replaced

RECOMPILE = "torch.fx.GraphModule.recompile"


@contextmanager
def code_on_call() -> Iterator[None]:
    """Make the code of graphs that appear in the context only when they are first called."""
    recompile = original(RECOMPILE)

    def put_off(self: GraphModule) -> None:
        def forward(self: GraphModule, *args: Any, **kwargs: Any) -> object:
            recompile(self)
            return type(self).forward(self, *args, **kwargs)

        codegen = self.graph._codegen
        if isinstance(codegen, _PyTreeCodeGen):
            self._in_spec, self._out_spec = codegen.pytree_info.in_spec, codegen.pytree_info.out_spec
        self._code = "(made when it is called)"  # which ExecuTorch writes for a log that nobody keeps
        type(self).forward = forward

    with replaced(RECOMPILE, put_off):
        yield
