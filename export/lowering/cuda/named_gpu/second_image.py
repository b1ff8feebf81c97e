"""Adds a second image to a kernel's fatbin: machine code with ``wgmma``, which runs on compute capability 9.0 alone.

These are kernels of many rows: INT4 matmuls, attention of a prefill, and Inductor's templates for matmuls.

Code for plain sm_90 runs on later GPUs too and has no ``wgmma``. CUDA's driver prefers an image for sm_90a on a GPU
with compute capability 9.0; all other GPUs take the plain image or its PTX. Both images have one name, and the host
launches them with the same grid, threads, arguments and shared memory, so ``second_image`` refuses two that differ. The
host passes the larger of the two sizes of shared memory.

A kernel may have an image from another source than Triton's, with the same entry, grid and parameters: ``OFFERED``.
"""

import hashlib
import re
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

from torch._inductor.runtime.hints import HeuristicType
from torch._inductor.runtime.triton_heuristics import CachingAutotuner, CompileResult
from triton import Config
from triton.runtime.errors import OutOfResources, PTXASError

from eagle3.export.lowering.cuda.kernels.int4.records import bulk_copy
from eagle3.export.lowering.cuda.kernels.int4.records.kernel import int4_records_small_m_kernel
from eagle3.export.lowering.cuda.kernels.small_m import WARPS
from eagle3.export.lowering.cuda.kernels.sums import WGMMA_ON
from eagle3.export.lowering.cuda.named_gpu.configurations import usage
from eagle3.runner.system.gpus import Gpu

ARCH = "90a"
AT_A_TIME, PLAIN = "ROWS", "PLAIN_ROWS"
"""The constants of a kernel that may take the rows of a program in several tiles: the rows of a tile, and those in code
without ``wgmma``, which are 0 if no code has ``wgmma``."""
EQUAL = ("name", "num_warps", "num_ctas", "global_scratch_size", "global_scratch_align", "profile_scratch_size")
"""The metadata of Triton that the host's code depends on, apart from shared memory."""
PARAMETERS, SIZES = re.compile(r"\.entry \w+\((.*?)\)", re.DOTALL), re.compile(r"\.[bu](\d+)")


class OwnImage(NamedTuple):
    """A kernel's machine code for ``ARCH``, and its launch: warps, and bytes of dynamic shared memory."""

    cubin: bytes
    warps: int
    shared: int


def _by_bulk_copies(autotuner: CachingAutotuner, plain: Any) -> OwnImage:  # noqa: ANN401 - a kernel of Triton's
    constants = autotuner.triton_meta["constants"]
    found = [int(size) // 8 for size in SIZES.findall(" ".join(_parameters(plain.asm["ptx"])))]
    if found != bulk_copy.parameters(constants):
        raise ValueError(f"{plain.metadata.name}: the parameters have {found} bytes, in CUDA C++ others")
    return OwnImage(bulk_copy.cubin(constants), WARPS, bulk_copy.shared_bytes(constants["BLOCK_M"]))


OFFERED: dict[str, Callable[[CachingAutotuner, Any], OwnImage | None]] = {
    int4_records_small_m_kernel.__name__: _by_bulk_copies
}
"""By the name of a Triton kernel, a function that compiles its image for ``ARCH`` from another source. It gets the
autotuner and the plain kernel; None leaves the image out. Entry, parameters and grid are those of the plain kernel."""


class Image(NamedTuple):
    """A kernel for ``ARCH``, as machine code and as PTX, "" for none. The PTX is searched for barriers by tests."""

    cubin: bytes
    ptx: str


class SecondImages:
    """The second images of one lowering. ``own_code`` is a context in which Triton compiles for ``ARCH``."""

    def __init__(self, gpu: Gpu, own_code: Callable[[], AbstractContextManager[None]]):
        self.gpu, self.own_code = gpu, own_code
        self.known: dict[str, Image] = {}

    def wanted(self, autotuner: CachingAutotuner) -> bool:
        """Return True if the kernel gets a second image for the GPU, unless that has no ``wgmma`` or spills registers.
        This is decided here alone: for kernels with an offer, for those that say how many rows their plain code takes,
        and for Inductor's templates. In other kernels of many rows, ptxas would wait for each product unless K is
        divided."""
        return f"sm_{self.gpu.arch}" in WGMMA_ON and (
            autotuner.fn.__name__ in OFFERED
            or plain_rows(autotuner) > 0
            or autotuner.heuristic_type == HeuristicType.TEMPLATE
        )

    def add(self, autotuner: CachingAutotuner, plain: CompileResult, config: Config) -> None:
        """Compile the second image of a kernel with ``config``, and let the host of ``plain`` pass enough shared memory
        for both. Nothing is added if the image would have no ``wgmma``, would spill registers, or would take more
        shared memory than the GPU has. Raises ValueError if one host cannot launch both.
        """
        if offer := OFFERED.get(autotuner.fn.__name__):
            if offered := offer(autotuner, plain.kernel):
                shared = max(plain.kernel.metadata.shared, offered.shared)
                plain.kernel.metadata = plain.kernel.metadata._replace(shared=shared)
                self.known[_digest(plain.kernel.asm["cubin"])] = Image(offered.cubin, "")
            return
        try:
            with self.own_code():
                own = autotuner._precompile_config(config).kernel
        except (OutOfResources, PTXASError):
            return
        shared, most = own.metadata.shared, self.gpu.shared_memory_per_block
        if "wgmma.mma_async" not in own.asm["ptx"] or shared > most or usage(own.asm["cubin"])[1]:
            return
        shared = shared_by_both(plain.kernel, own)
        plain.kernel.metadata = plain.kernel.metadata._replace(shared=shared)
        self.known[_digest(plain.kernel.asm["cubin"])] = Image(own.asm["cubin"], own.asm["ptx"])

    def run(self, command: list[str], *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - as subprocess.run
        """Run a command in place of ``subprocess.run`` where Inductor calls ``fatbinary``, with the second image of the
        kernel added.

        Raises ValueError if nvcc is called in place of ``fatbinary``, which would leave the image out.
        """
        if "-fatbin" in command and self.known:
            raise ValueError("nvcc makes a fatbin without the code for sm_90a: fatbinary is not beside nvcc")
        if any(word.startswith("--create=") for word in command):
            command = [*command, *self._images(command)]
        return subprocess.run(command, *arguments, **options)

    def _images(self, command: list[str]) -> list[str]:
        """Write the second image of the kernel that ``command`` packs, and return the words that pack it too."""
        (cubin,) = (Path(word.partition("file=")[2]) for word in command if word.startswith("--image3=kind=elf"))
        image = self.known.get(_digest(cubin.read_bytes()))
        if image is None:
            return []
        machine_code, ptx = cubin.with_suffix(f".{ARCH}.cubin"), cubin.with_suffix(f".{ARCH}.ptx")
        machine_code.write_bytes(image.cubin)
        ptx.write_text(image.ptx)
        words = [f"--image3=kind=elf,sm={ARCH},file={machine_code}", f"--image3=kind=ptx,sm={ARCH},file={ptx}"]
        return words if image.ptx else words[:1]


def plain_rows(autotuner: CachingAutotuner) -> int:
    """Return the rows that a kernel's code without ``wgmma`` takes at a time; 0 for a kernel without such a number."""
    return autotuner.triton_meta["constants"].get(PLAIN, 0)


def plain_config(config: Config, rows: int) -> Config:
    """Return the configuration of the plain image, which takes ``rows`` at a time, since it has no ``wgmma``. 0: it is
    the configuration of both."""
    if not rows:
        return config
    plain = copy(config)
    plain.kwargs = {**config.kwargs, AT_A_TIME: rows}
    return plain


def own_config(plain: Config) -> Config:
    """Return the configuration of the second image, which takes all rows of a program at a time."""
    own = copy(plain)
    own.kwargs = {name: value for name, value in plain.kwargs.items() if name != AT_A_TIME}
    own.maxnreg = None
    return own


def shared_by_both(plain: Any, own: Any) -> int:  # noqa: ANN401 - kernels as Triton compiles them
    """Return the bytes of shared memory that the host passes to both kernels. Raises ValueError, which names what
    differs, if one host cannot launch both."""
    for field in EQUAL:
        one, other = getattr(plain.metadata, field), getattr(own.metadata, field)
        if one != other:
            raise ValueError(f"{plain.metadata.name}: {field} is {one}, and {other} in the code for sm_{ARCH}")
    one, other = (_parameters(kernel.asm["ptx"]) for kernel in (plain, own))
    if one != other:
        raise ValueError(f"{plain.metadata.name}: the parameters are {one}, and {other} in the code for sm_{ARCH}")
    return max(plain.metadata.shared, own.metadata.shared)


def _parameters(ptx: str) -> list[str]:
    """Return the types of a kernel's parameters."""
    found = PARAMETERS.search(ptx)
    assert found is not None, ptx[:200]
    return [" ".join(word for word in line.split()[:-1]) for line in found[1].split(",")]


def _digest(cubin: bytes) -> str:
    return hashlib.sha256(cubin).hexdigest()
