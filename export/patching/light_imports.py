"""Delays imports of other packages that a plan and its twin check do not need. They would take two of its five seconds.

With any model, transformers imports torch.distributed, torchao, SciPy and flex attention because they are installed,
and Dynamo for three decorators that only ``torch.compile`` needs. An export imports the ones that it needs later.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from eagle3.export.patching.patches import all_replaced

PLANNERS = ("planning.plan", "checks.preflight", "report")
DYNAMO = "torch._dynamo"
DECORATORS = ("disable", "allow_in_graph", "assume_constant_result")
MASKS = "_trace_wrapped_higher_order_op"
"""The only module of Dynamo that transformers' masks need; it imports no other module of Dynamo."""
ASKED = ("is_torch_distributed_available", "is_torchao_available", "is_scipy_available", "is_torch_flex_attn_available")
PATCHED = tuple(f"transformers.{place}.{name}" for place in ("utils", "utils.import_utils") for name in ASKED)


class LateDynamo(ModuleType):
    """Stands in for Dynamo until something other than ``MASKS`` and ``DECORATORS`` is used. Its decorators return the
    function unchanged."""

    def __init__(self) -> None:
        import torch

        super().__init__(DYNAMO)
        sys.modules[DYNAMO] = self
        self.__path__ = [str(Path(torch.__file__).with_name("_dynamo"))]
        setattr(self, MASKS, importlib.import_module(f"{DYNAMO}.{MASKS}"))
        del self.__path__

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if sys.modules.get(DYNAMO) is self:
            if name in DECORATORS:
                return _undecorated
            if name.startswith("__") and name != "__path__":
                raise AttributeError(name)
            del sys.modules[DYNAMO]
        return getattr(importlib.import_module(DYNAMO), name)


def _undecorated(function: Callable | None = None, *_args: Any, **_options: Any) -> Callable:
    return _undecorated if function is None else function


@contextmanager
def imported_lightly() -> Iterator[None]:
    """Import transformers' models as if only PyTorch were installed, together with the modules of planning.

    Modules that are imported in the context keep this state, so it is for a command's own process only. If Dynamo is
    already imported, it stays.
    """
    with ExitStack() as stack:
        if DYNAMO not in sys.modules:
            stack.callback(_remove, LateDynamo())
        stack.enter_context(all_replaced(dict.fromkeys(PATCHED, _unavailable)))
        for module in PLANNERS:
            importlib.import_module(f"eagle3.export.{module}")
        yield


def _remove(stand_in: LateDynamo) -> None:
    if sys.modules.get(DYNAMO) is stand_in:
        del sys.modules[DYNAMO]


def _unavailable(*_args: Any, **_options: Any) -> bool:
    return False
