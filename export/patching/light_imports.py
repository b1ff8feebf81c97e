"""Puts off imports of other packages that a plan and its twin check do not need, two of their five seconds.

With any model transformers imports torch.distributed, torchao, SciPy and flex attention, because they are installed,
and Dynamo, for three decorators that concern ``torch.compile`` alone. An export imports what it needs of them later.
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
"""The one module of Dynamo that transformers' masks need; it imports nothing of the rest."""
ASKED = ("is_torch_distributed_available", "is_torchao_available", "is_scipy_available", "is_torch_flex_attn_available")
PATCHED = tuple(f"transformers.{place}.{name}" for place in ("utils", "utils.import_utils") for name in ASKED)


class LateDynamo(ModuleType):
    """Stands in for Dynamo until anything of it is used but ``MASKS`` and ``DECORATORS``, which leave a function as it
    is."""

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
    """Import transformers' models as if only PyTorch were installed, and the modules of the planning at once.

    Modules imported in the context stay as they are, so this is for a command's own process. A Dynamo that is imported
    already is left alone.
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
