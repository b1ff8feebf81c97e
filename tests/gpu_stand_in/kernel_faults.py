"""Puts faults into kernels, which a check of kernels must find."""

import ast
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

from race_detector import Detector
from race_hooks import watching
from torch import Tensor


@contextmanager
def fault(folder: Path, module: ModuleType, old: str, new: str, *users: ModuleType) -> Iterator[None]:
    """Replace the kernels of ``module`` by kernels from its source with ``new`` in place of ``old``; also in ``users``,
    the modules that imported them.

    The source is kept in ``folder``, for line numbers. Raises ValueError if ``old`` does not occur exactly once.
    """
    source = Path(module.__file__).read_text()
    if source.count(old) != 1:
        raise ValueError(f"{module.__file__} has {source.count(old)} times what is to be replaced: {old!r}")
    path = folder / Path(module.__file__).name
    path.write_text(kernels_alone(source.replace(old, new)))
    made: dict = {}
    exec(compile(path.read_text(), str(path), "exec"), vars(module), made)
    with ExitStack() as stack:
        for user in (module, *users):
            same = {name: kernel for name, kernel in made.items() if name in vars(user)}
            stack.enter_context(patch.multiple(user, **same))
        yield


def kernels_alone(source: str) -> str:
    """Return the source with only the functions that Triton compiles, on their original lines. A copy of the whole
    module would register its ops again, which deletes the original ops: their next call would read freed memory."""
    lines, kept = source.splitlines(), set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and "triton.jit" in map(ast.unparse, node.decorator_list):
            kept.update(range(node.decorator_list[0].lineno, node.end_lineno + 1))
    return "\n".join(line if number in kept else "" for number, line in enumerate(lines, 1)) + "\n"


def noticed(compute: Callable[[], Tensor], assert_right: Callable[[Tensor], None]) -> bool:
    """Return True if the detector finds a fault while ``compute`` launches kernels, or if the assertion about its
    result fails."""
    detector = Detector(("forward",))
    with watching(detector, of_arguments=True):
        found = compute()
    try:
        assert_right(found)
    except AssertionError:
        return True
    return bool(detector.findings)
