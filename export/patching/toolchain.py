"""Part 6 of lowering for a named GPU: finds the tools that compile and link a CUDA program.

nvcc and CUDA's headers come from the pip packages of the extra ``cuda``, or else from the system's toolkit. The link
needs libcuda, the driver's library. A stub with the same name and functions takes its place; at run time the driver
provides the real one. Without the functions, a linker with ``--as-needed`` (the default of Ubuntu's g++) would drop the
library, and ExecuTorch's runtime, which does not load libcuda itself, would not find them.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle3.export.patching.patches import environment


def cuda_home() -> Path:
    """Return the folder with ``bin/nvcc`` and ``include/cuda.h``. Raises FileNotFoundError, which says what to
    install."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(place) / "cu13" for place in (spec and spec.submodule_search_locations or ())]
    folders += [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places = [folder / "bin" / "nvcc" for folder in folders]
    places += [Path(found).resolve() for found in [shutil.which("nvcc")] if found]
    places.append(Path("/usr/local/cuda/bin/nvcc"))
    for nvcc in filter(Path.is_file, places):
        home = nvcc.parent.parent
        home = home if _has_headers(home) else _toolkit_of(nvcc)
        if _has_headers(home):
            return home
    raise FileNotFoundError(
        "nvcc with CUDA's headers is neither among the pip packages nor in CUDA_HOME, PATH or /usr/local/cuda: "
        "type pip install 'eagle3-export[cuda]'"
    )


def _has_headers(toolkit: Path) -> bool:
    return (toolkit / "include" / "cuda.h").is_file()


def _toolkit_of(nvcc: Path) -> Path:
    """Ask an nvcc for the toolkit that it uses. That nvcc may be a script around the real one."""
    said = subprocess.run([nvcc, "-dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.+)$", said, re.MULTILINE)
    return Path(top[1]).resolve() if top else nvcc.parent.parent


def cpp_compiler() -> str:
    """Return the C++ compiler that Inductor will call. Raises FileNotFoundError, which says what to install."""
    return _compiler("CXX", "g++", "lowering for CUDA compiles C++: install g++ (apt install g++)")


def cross_compiler(host: str) -> str:
    """Return the C++ compiler for another host, such as "aarch64". Raises FileNotFoundError, which says what to
    install."""
    package = f"g++-{host.replace('_', '-')}-linux-gnu"
    needed = f"--host-arch {host} compiles C++ for another processor: install it (apt install {package})"
    return _compiler(f"CXX_{host}", f"{host}-linux-gnu-g++", needed)


def _compiler(variable: str, default: str, needed: str) -> str:
    name = os.environ.get(variable, default)
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is not on PATH, and {needed}, or set {variable}")
    return found


def nvcc_version() -> str:
    """Return nvcc's version, such as "13.0.88"."""
    printed = subprocess.run([cuda_home() / "bin" / "nvcc", "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"V([\d.]+)", printed.stdout)
    assert found is not None, printed.stdout
    return found[1]


def driver_functions(home: Path) -> list[str]:
    """Return the functions that libcuda exports, according to the header of the toolkit in ``home``. Some functions are
    declared under another name than the exported one."""
    header = (home / "include" / "cuda.h").read_text(errors="replace")
    declared = re.findall(r"\bCUDAAPI\s+(cu\w+)\s*\(", header)
    renamed = re.findall(r"^\s*#\s*define\s+cu\w+\s+(cu\w+)\s*$", header, re.MULTILINE)
    return sorted({*declared, *renamed})


def driver_stub(compiler: str, home: Path, folder: Path) -> None:
    """Make a stub of libcuda in a new ``folder``, for the processor that ``compiler`` compiles for."""
    folder.mkdir()
    stub = ["-shared", "-Wl,-soname,libcuda.so.1", "-w", "-x", "c", "-", "-o", str(folder / "libcuda.so")]
    source = "".join(f"void {name}(void) {{}}\n" for name in driver_functions(home))
    subprocess.run([compiler, *stub], input=source, text=True, check=True)


@contextmanager
def toolchain() -> Iterator[None]:
    """Point ``CUDA_HOME``, ``PATH`` and ``LIBRARY_PATH`` to ``cuda_home`` and a stub of libcuda."""
    home = cuda_home()
    with tempfile.TemporaryDirectory() as folder:
        stubs = Path(folder) / "stubs"
        driver_stub(cpp_compiler(), home, stubs)
        libraries = [str(stubs), *filter(None, [os.environ.get("LIBRARY_PATH")])]
        variables = {
            "CUDA_HOME": str(home),
            "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "LIBRARY_PATH": os.pathsep.join(libraries),
        }
        with environment(variables):
            yield
