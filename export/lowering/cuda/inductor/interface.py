"""Compiles the C++ that all methods have in common once.

AOTInductor writes a C++ file for each method, whose compilation takes 8 s of a core. Nearly all of it goes into the
functions through which a runtime calls a library, and into the base class of its model, whose text is the same for
every method. They are compiled once, and the object is kept in Inductor's cache folder, as its precompiled headers are.
"""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._inductor.cpp_builder import CppBuilder, run_compile_cmd
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.utils._filelock import FileLock

from eagle3.export.patching.patches import original, replaced

BUILD = "torch._inductor.cpp_builder.CppBuilder.build"
INTERFACE = re.compile(r'^extern "C" \{\n.*?^\} // extern "C"\n', re.DOTALL | re.MULTILINE)
BASE = "template class torch::aot_inductor::AOTInductorModelBase<torch::aot_inductor::AOTInductorModel>;\n"
"""The instantiation of the model's base class, which the file of a method only declares."""

SOURCE, OBJECT = "<source>", "<object>"
"""The names that stand for the two files in a command."""


@contextmanager
def interface_once() -> Iterator[None]:
    """Make Inductor link each method's own code with the common object."""
    build = original(BUILD)

    def build_in_parts(self: CppBuilder) -> None:
        target = Path(self.get_target_file_path())
        if not compiled_in_parts(self.get_command_line(), target.with_suffix(".cpp"), target):
            build(self)

    with replaced(BUILD, build_in_parts):
        yield


def compiled_in_parts(command: str, source: Path, target: Path) -> bool:
    """Run a command that compiles ``source`` to ``target``, the common part once. Returns False, and does nothing, if
    it is not the C++ of a method, or if it links."""
    is_method = source.name.endswith(".wrapper.cpp") and target.suffix == ".o"
    parts = split(source.read_text()) if is_method else None
    if parts is None:
        return False
    common, own = parts
    command = command.replace(str(source), SOURCE).replace(str(target), OBJECT)
    own_source, own_object = target.with_suffix(".own.cpp"), target.with_suffix(".own.o")
    own_source.write_text(own)
    compile_cpp(command, own_source, own_object)
    objects = f"{common_object(common, command)} {own_object}"
    run_compile_cmd(f"{command.split()[0]} -r -nostdlib {objects} -o {target}", str(target.parent))
    own_source.unlink()
    own_object.unlink()
    return True


def split(text: str) -> tuple[str, str] | None:
    """Return the part of a method's C++ that all methods share, and the rest; None if it does not begin as expected."""
    found = INTERFACE.search(text)
    if found is None or "model_container.h" not in text[: found.start()]:
        return None
    return text[: found.end()] + BASE, f"{text[: found.start()]}extern {BASE}{text[found.end() :]}"


def common_object(text: str, command: str) -> Path:
    """Return the object of ``text``, which ``command`` compiles unless it is in the cache. Processes that need it at
    the same time wait for one of them."""
    folder = Path(cache_dir()) / "aoti_interface"
    folder.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256("\n".join((torch.__version__, command, text)).encode()).hexdigest()
    made, source, partial = (folder / f"{key}{suffix}" for suffix in (".o", ".cpp", ".partial.o"))
    with FileLock(folder / f"{key}.lock"):
        if not made.exists():
            source.write_text(text)
            compile_cpp(command, source, partial)
            partial.rename(made)
            source.unlink()
    return made


def compile_cpp(command: str, source: Path, target: Path) -> None:
    """Run a command that compiles ``SOURCE`` to ``OBJECT``."""
    run_compile_cmd(command.replace(SOURCE, str(source)).replace(OBJECT, str(target)), str(target.parent))
