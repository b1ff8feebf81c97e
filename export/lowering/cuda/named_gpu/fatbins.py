"""Makes a kernel's images for the further GPUs of a list, and packs them beside the first one's.

Triton compiles a kernel once for each configuration, for the lowest architecture of the list. Its PTX holds for all
later ones, so ptxas alone makes their machine code. One image serves all GPUs that run it and have equal limits.

The PTX in a fatbin is that of the lowest architecture, and that of the highest if it has another configuration, since
a GPU that no machine code is for compiles the latest PTX that it may.
"""

import hashlib
import re
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch._inductor.runtime.triton_heuristics import CompileResult
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from eagle3.export.lowering.cuda.kernels.sums import Division
from eagle3.runner.artifact.cuda_library import runs_on
from eagle3.runner.system.gpus import Gpu

LIMITS = ("shared_memory_per_block", "shared_memory_per_multiprocessor", "threads_per_multiprocessor")
"""The properties that decide which configuration of a kernel is the best on a GPU."""


PLAIN_CODE = Lock()
"""A lock, held while ptxas is called for a plain architecture in another thread, and while Triton's names of
architectures are not those of plain ones."""


class Packed(NamedTuple):
    """An image that fatbinary packs: its form ("elf" or "ptx"), architecture, such as "90a", and data, which may still
    be made."""

    form: str
    arch: str
    data: "bytes | Future[bytes]"


def with_own_images(gpus: Sequence[Gpu], divisions: Mapping[Gpu, Division | None]) -> list[Gpu]:
    """Return the GPUs that get an image of their own; each other one runs the image of one before it, which divides
    K in the same way."""
    own: list[Gpu] = []
    for gpu in gpus:
        if not any(
            runs_on("sass", f"sm_{before.arch}", gpu.capability)
            and divisions.get(before) == divisions.get(gpu)
            and all(getattr(before, limit) == getattr(gpu, limit) for limit in LIMITS)
            for before in own
        ):
            own.append(gpu)
    return own


def common_gpu(gpus: Sequence[Gpu]) -> Gpu:
    """Return a GPU that stands for all ``gpus`` where one is asked for: the first, with the least of all limits, and as
    many multiprocessors as the largest."""
    first, *others = gpus
    if not others:
        return first
    least = {limit: min(getattr(gpu, limit) for gpu in gpus) for limit in (*LIMITS, "blocks_per_multiprocessor")}
    return replace(first, multiprocessors=max(gpu.multiprocessors for gpu in gpus), **least)


def assembled(kernel: Any, gpu: Gpu) -> bytes:  # noqa: ANN401 - a kernel as Triton compiles it
    """Return the machine code for ``gpu`` of a kernel that was compiled for an earlier one. Raises PTXASError."""
    target = GPUTarget("cuda", gpu.arch, 32)
    with PLAIN_CODE:
        return CUDABackend(target).make_cubin(kernel.asm["ptx"], {}, kernel.metadata, gpu.arch)


def on_card(first: CompileResult, gpu: Gpu) -> Any:  # noqa: ANN401 - with the fields of Inductor's CompileResult
    """Return a kernel that was compiled for an earlier GPU as it is compiled for ``gpu``. Raises PTXASError."""
    asm = {"ptx": first.kernel.asm["ptx"], "cubin": assembled(first.kernel, gpu)}
    return SimpleNamespace(kernel=SimpleNamespace(metadata=first.kernel.metadata, asm=asm), config=first.config)


class Fatbins:
    """The images that are packed beside each kernel's first one, by the digest of that one's machine code."""

    def __init__(self) -> None:
        self.known: dict[str, list[Packed]] = {}
        self.pool: ThreadPoolExecutor | None = None

    def start(self, kernel: Any, gpu: Gpu) -> "Future[bytes]":  # noqa: ANN401 - a kernel as Triton compiles it
        """Begin to make the machine code of ``assembled``."""
        if self.pool is None:  # in the process that compiles, which may be a fork
            self.pool = ThreadPoolExecutor(1)
        return self.pool.submit(assembled, kernel, gpu)

    def keep(self, cubin: bytes, images: Sequence[Packed]) -> None:
        """Keep ``images`` for the kernel whose first machine code is ``cubin``."""
        if images:
            self.known[_digest(cubin)] = list(images)

    def run(self, command: list[str], *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - as subprocess.run
        """Run a command in place of ``subprocess.run`` where Inductor calls ``fatbinary``, with the kernel's other
        images added.

        Raises ValueError if nvcc is called in place of ``fatbinary``, which would leave them out.
        """
        if "-fatbin" in command and self.known:
            raise ValueError("nvcc makes a fatbin with one image: fatbinary is not beside nvcc")
        if any(word.startswith("--create=") for word in command):
            command = [*command, *self._words(command)]
        return subprocess.run(command, *arguments, **options)

    def _words(self, command: list[str]) -> list[str]:
        """Write the other images of the kernel that ``command`` packs, and return the words that pack them."""
        (cubin,) = (Path(word.partition("file=")[2]) for word in command if word.startswith("--image3=kind=elf"))
        words = []
        for form, arch, data in self.known.get(_digest(cubin.read_bytes()), ()):
            file = cubin.with_suffix(f".{arch}.{form}")
            file.write_bytes(data.result() if isinstance(data, Future) else data)
            words.append(f"--image3=kind={form},sm={arch},file={file}")
        return words


def retargeted(ptx: str, gpu: Gpu) -> bytes:
    """Return PTX as that of a later architecture."""
    return re.sub(r"^\.target sm_\d+", f".target sm_{gpu.arch}", ptx, count=1, flags=re.MULTILINE).encode()


def _digest(cubin: bytes) -> str:
    return hashlib.sha256(cubin).hexdigest()
