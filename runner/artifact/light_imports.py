"""Imports parts of ExecuTorch without its compiler, which a run does not need and which takes seconds to import."""

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

    The runtime's bindings need one warning class from ``executorch.exir._warnings``. Reading a program needs the schema
    and the classes generated from it. The two packages themselves import dynamo and Inductor, which is 4 s of a first
    run's 6 s. Within this context they are empty packages with the same paths. If the compiler is already imported,
    nothing changes. It can be imported afterwards.
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
