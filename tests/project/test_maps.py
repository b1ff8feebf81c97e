"""Lists are complete: each README's map of its folder, and the lists of CUDA kernels that are searched for missing
barriers and for races."""

import importlib
import re
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import triton
from places import ROOT
from ptx_of_kernels import KERNELS
from small_launches import SMALL

from eagle3.export.lowering.cuda import kernels

ROOMS = [
    path.parent
    for top in ("export", "runner", "targets", "scripts")
    for path in sorted((ROOT / top).rglob("README.md"))
]


ALL_READMES = [ROOT / "README.md", ROOT / ".github" / "CONTRIBUTING.md", *(room / "README.md" for room in ROOMS)]
TOPS = ("export", "runner", "targets", "scripts", "tests")
OF_OTHERS = {"export/test_x.py", "tests/export/test_x.py"}
"""Files that a README names as an example."""


def unnamed(folder: Path) -> list[str]:
    """Return the Python files in ``folder`` that no row of its README's tables names, neither directly nor by a
    folder."""
    rows = "\n".join(line for line in (folder / "README.md").read_text().splitlines() if line.startswith("| `"))
    named = [word for code in re.findall(r"`([^`]+)`", rows) for word in code.split()]
    files = [str(path.relative_to(folder)) for path in (*folder.glob("*.py"), *folder.glob("*/*.py"))]
    whole = {name for name in named if name.endswith("/")}
    files = [name for name in files if not name.endswith("__init__.py") and f"{name.split('/')[0]}/" not in whole]
    return [name for name in sorted(files) if not any(fnmatch(name, each) for each in named)]


def test_the_map_of_a_readme_names_every_file_of_its_folder():
    assert {folder: names for folder in ROOMS if (names := unnamed(folder))} == {}


def test_every_file_that_a_readme_names_exists():
    """A path may be relative to the root, to the README's folder, or to a folder that the row names first."""
    listed = [path.relative_to(ROOT) for top in TOPS for path in (ROOT / top).rglob("*") if path.is_file()]
    tails = {"/".join(path.parts[start:]) for path in listed for start in range(len(path.parts))}
    for readme in ALL_READMES:
        named = {word for code in re.findall(r"`([^`\n]+)`", readme.read_text()) for word in code.split()}
        paths = {word for word in named if re.fullmatch(r"[\w/]+\.py", word)}
        assert sorted(paths - tails - OF_OTHERS) == [], readme


def modules() -> dict[str, ModuleType]:
    home = Path(kernels.__path__[0])
    names = (path.relative_to(home).with_suffix("").parts for path in home.rglob("*.py") if path.stem != "__init__")
    return {".".join(name): importlib.import_module(".".join((kernels.__name__, *name))) for name in names}


def jitted(module: ModuleType) -> list[triton.JITFunction]:
    values = [each for each in vars(module).values() if isinstance(each, triton.JITFunction)]
    return [each for each in values if each.fn.__module__ == module.__name__]


def launched() -> list[triton.JITFunction]:
    """Return the kernels: the Triton functions that no other one calls."""
    functions = [each for module in modules().values() for each in jitted(module)]
    called = {name for each in functions for name in each.fn.__code__.co_names}
    return [each for each in functions if each.fn.__name__ not in called]


def test_every_kernel_is_searched_for_missing_barriers():
    searched = [kernel for kernel, _ in KERNELS.values()]
    assert len(launched()) >= 8
    assert [each.fn.__qualname__ for each in launched() if each not in searched] == []


def test_every_file_with_code_for_a_gpu_is_searched_for_races():
    searched = {module.__name__ for small in SMALL.values() for module in small.modules}
    files = {module.__name__ for module in modules().values() if jitted(module)}
    assert len(files) >= 11 and files <= searched
