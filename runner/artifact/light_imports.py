"""Parts of ExecuTorch without its compiler: a run needs neither, and importing it takes seconds."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

COMPILER, SERIALIZER = "executorch.exir", "executorch.exir._serialize"


@contextmanager
def without_compiler() -> Iterator[None]:
    """Import modules below ``executorch.exir`` without the two packages around them.

    The runtime's bindings take one warning class from ``executorch.exir._warnings``, reading a program takes the schema
    and the classes generated from it. The packages' own code imports dynamo and Inductor: 4 s of a first run's 6.
    Within this context they are empty packages with the same paths. Nothing changes where the compiler is imported
    already, and it can be imported afterwards.
    """
    if COMPILER in sys.modules:
        yield
        return
    import executorch

    for name in (COMPILER, SERIALIZER):
        spec = ModuleSpec(name, loader=None, is_package=True)
        spec.submodule_search_locations = [str(Path(executorch.__path__[0]).joinpath(*name.split(".")[1:]))]
        sys.modules[name] = module_from_spec(spec)
    try:
        yield
    finally:
        for module in [key for key in sys.modules if key == COMPILER or key.startswith(f"{COMPILER}.")]:
            del sys.modules[module]
