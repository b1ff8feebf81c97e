"""Compiles the libraries for hosts with another processor than this machine's, from the same generated C++.

Inductor calls this machine's compiler for the C++ of a method, for an object with its kernels, and for the link. Each
of these commands is run again by the cross compiler of each other host. A method's code for a GPU does not depend on
the host, so both libraries hold the same kernels, and a program for another host is this machine's with other
libraries. Weights are the same file.

The headers are those of this machine's PyTorch. In the wheels of 2.13 for x86_64 and aarch64, three of 9,425 common
ones differ (``sleef.h``, ``ATen/Config.h``, ``caffe2/core/macros.h``), and none of these declares what a library calls.
"""

import hashlib
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executorch.exir._serialize._named_data_store import NamedDataStoreOutput
from executorch.exir._serialize._program import PTEFile, serialize_pte_binary
from executorch.exir.backend.compile_spec_schema import CompileSpec
from torch._inductor import config as inductor
from torch._inductor.cpp_builder import CppBuilder, run_compile_cmd

from eagle3.export.lowering.cuda.inductor.interface import BUILD, compiled_in_parts
from eagle3.export.patching.patches import all_replaced, original
from eagle3.export.patching.toolchain import cross_compiler, cuda_home, driver_stub

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager
    from executorch.exir._serialize._cord import Cord

EMBED = "torch._inductor.codecache.batch_convert_cubins_to_obj"
SIGN = "executorch.backends.cuda.cuda_backend.CudaBackend.codesign_so"
LIBRARY_KEY = "_so_blob"
"""The end of the name under which ExecuTorch stores a library, after its sha256."""
ANY_PROCESSOR: dict[str, Any] = {"cpp.march": ""} if hasattr(inductor.cpp, "march") else {}
"""Inductor's option to compile for any processor of a kind. It would compile for this machine's own, and the library of
an export on a processor with AVX-512 would end with SIGILL on one without. PyTorch 2.11 does not have the option."""


class CrossHosts:
    """The libraries for other hosts: ``folder`` holds each as SHA256.HOST, with the sha256 of this machine's."""

    def __init__(self, hosts: Sequence[str], folder: Path):
        self.folder = folder
        self.compilers = {host: cross_compiler(host) for host in hosts}
        for host, compiler in self.compilers.items():
            driver_stub(compiler, cuda_home(), self._stubs(host))

    def _stubs(self, host: str) -> Path:
        return self.folder / f"stubs-{host}"

    def command(self, host: str, command: str) -> str:
        """Return one of Inductor's commands as the compiler of a host takes it. Its objects are those that were
        compiled for the host."""
        _, *words = shlex.split(command)
        words = [str(of_host(Path(word), host)) if word.endswith((".o", ".so")) else word for word in words]
        words = [word for word in words if not word.startswith("-march=")]  # PyTorch 2.11 names this machine's
        return shlex.join([self.compilers[host], f"-L{self._stubs(host)}", *words])

    def build(self, builder: CppBuilder) -> None:
        """Run the command of ``builder`` for each host."""
        target, given = Path(builder.get_target_file_path()), builder.get_command_line()
        objects = [Path(word) for word in shlex.split(given) if word.endswith(".o")] if target.suffix == ".so" else []
        for host in self.compilers:
            command = self.command(host, given)
            if not compiled_in_parts(command, target.with_suffix(".cpp"), of_host(target, host)):
                run_compile_cmd(command, str(target.parent))
            for linked in objects:  # as Inductor removes its own
                of_host(linked, host).unlink(missing_ok=True)

    def keep(self, library: Path) -> None:
        """Move the libraries for other hosts that lie beside ``library`` into the folder."""
        key = hashlib.sha256(library.read_bytes()).hexdigest()
        for host in self.compilers:
            shutil.move(of_host(library, host), self.folder / f"{key}.{host}")

    def program(self, program: "ExecutorchProgramManager", host: str) -> "Cord":
        """Return the contents of the ``.pte`` for a host: that of this machine's with the host's libraries."""
        store, emitted = program._named_data, program._emitter_output
        assert store is not None
        buffers, keys = list(store.buffers), {}
        for key, entry in store.pte_data.items():
            if key.endswith(LIBRARY_KEY):
                library = (self.folder / f"{key.removesuffix(LIBRARY_KEY)}.{host}").read_bytes()
                buffers[entry.buffer_index] = library
                keys[key] = hashlib.sha256(library).hexdigest() + LIBRARY_KEY
        data = {keys.get(key, key): entry for key, entry in store.pte_data.items()}
        tables = [replace(blob, data=renamed(blob.data, keys)) for blob in emitted.program.backend_delegate_data]
        return serialize_pte_binary(
            PTEFile(
                program=replace(emitted.program, backend_delegate_data=tables),
                mutable_data=emitted.mutable_data,
                named_data=NamedDataStoreOutput(buffers, data, {}),
            ),
            extract_delegate_segments=True,
        )


def of_host(file: Path, host: str) -> Path:
    """Return the path of an object or a library for another host: NAME.HOST.o beside NAME.o."""
    return file.with_suffix(f".{host}{file.suffix}")


def renamed(table: bytes, keys: Mapping[str, str]) -> bytes:
    """Return a weight table with other keys of libraries. They are as long as the earlier ones."""
    for before, after in keys.items():
        table = table.replace(before.encode(), after.encode())
    return table


@contextmanager
def compiled_for(hosts: Sequence[str], folder: Path) -> Iterator[CrossHosts]:
    """Make Inductor compile each method for these ``hosts`` as well. ``folder`` keeps their libraries.

    Raises FileNotFoundError without a cross compiler.
    """
    cross = CrossHosts(hosts, folder)
    if not hosts:
        yield cross
        return
    build, embed, sign = original(BUILD), original(EMBED), original(SIGN)

    def build_for_all(self: CppBuilder) -> None:
        build(self)
        of_method = self._build_option.get_aot_mode()  # others try this machine's instructions
        if of_method and self.get_target_file_path().endswith((".o", ".so")):
            cross.build(self)

    def embedded_for_all(cubins: list[tuple[str, str]], output_dir: str, cpp_compiler: str) -> str:
        made = embed(cubins, output_dir, cpp_compiler)
        for host, compiler in cross.compilers.items():
            apart = Path(output_dir) / host
            apart.mkdir(exist_ok=True)
            shutil.move(embed(cubins, str(apart), compiler), of_host(Path(made), host))
            shutil.rmtree(apart)
        return made

    def signed(so_path: str, compile_specs: list[CompileSpec]) -> None:
        sign(so_path, compile_specs)
        cross.keep(Path(so_path))

    with all_replaced({BUILD: build_for_all, EMBED: embedded_for_all, SIGN: staticmethod(signed)}):
        yield cross
