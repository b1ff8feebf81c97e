"""``executorch.runtime`` as a runner wants it: quick to import, with ExecuTorch's LLM ops, silent."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

from eagle3.runner.contract.console import calm_stderr


def load_runtime():
    """The ``Runtime`` singleton, with ``llama::custom_sdpa`` and the cache updates registered.

    Importing ``executorch.extension.llm.custom_ops`` would register them too, and import all of Inductor (2 s) on the
    way; loading its library does the same.
    """
    with calm_stderr():
        import executorch
        import torch

        with _without_compiler(Path(executorch.__path__[0])):
            from executorch.runtime import Runtime
        runtime = Runtime.get()
        if "llama::custom_sdpa.out" not in runtime.operator_registry.operator_names:
            folder = Path(executorch.__path__[0]) / "extension" / "llm" / "custom_ops"
            for library in folder.glob("*custom_ops_aot_lib.*"):
                torch.ops.load_library(library)
        return runtime


@contextmanager
def _without_compiler(executorch_folder: Path) -> Iterator[None]:
    """Import ``executorch.runtime`` without ``executorch.exir``, the ahead-of-time compiler.

    The runtime's bindings take one warning class from ``executorch.exir._warnings``, and the package around it imports
    dynamo and Inductor: 4 s of a first run's 6. Within this context that package is an empty one with the same path.
    """
    name = "executorch.exir"
    if name in sys.modules:
        yield
        return
    spec = ModuleSpec(name, loader=None, is_package=True)
    spec.submodule_search_locations = [str(executorch_folder / "exir")]
    sys.modules[name] = module_from_spec(spec)
    try:
        yield
    finally:
        for module in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
            del sys.modules[module]
