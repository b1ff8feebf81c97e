"""Backends: a record each. A new one is a module here and a line in ``BACKENDS``.

The module has ``DTYPE`` (of activations), ``attention`` (an ``AttentionFactory``), ``tracing(speculator)`` (a context
manager around each trace) and ``lower(programs, constant_methods) -> ExecutorchProgramManager``; it is imported only
when it is used.
"""

import importlib
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Backend:
    """``module`` is imported on use: lowering pulls in torch and the delegate's compiler."""

    summary: str
    module: str
    flags: frozenset[str] = frozenset()
    """Fields of ``ExportConfig`` that mean something to this backend alone; given to another one they are refused."""

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)


BACKENDS: dict[str, Backend] = {
    "xnnpack": Backend("the CPU in float32 (XNNPACK, ExecuTorch's LLM ops)", "eagle3.export.lowering.xnnpack"),
}
