"""Adds a second image to a kernel's fatbin: machine code with ``wgmma``, which runs on compute capability 9.0 alone.

These are kernels of many rows: INT4 matmuls, attention of a prefill, and Inductor's templates for matmuls.

Code for plain sm_90 runs on later GPUs too and has no ``wgmma``. CUDA's driver prefers an image for sm_90a on a GPU
with compute capability 9.0; all other GPUs take the plain image or its PTX. Both images have one name, and the host
launches them with the same grid and arguments, so ``check_one_host`` refuses two that differ. Each has its own number
of warps and its own shared memory (``card_launches``).

A kernel may have an image from another source than Triton's, with the same entry, grid and parameters: ``OFFERED``.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

from torch._inductor.runtime.hints import HeuristicType
from torch._inductor.runtime.triton_heuristics import CachingAutotuner, CompileResult
from triton import Config
from triton.runtime.errors import OutOfResources, PTXASError

from eagle3.export.lowering.cuda.kernels import attention_chunk
from eagle3.export.lowering.cuda.kernels.int4.records import bulk_copy
from eagle3.export.lowering.cuda.kernels.int4.records.kernel import int4_records_small_m_kernel
from eagle3.export.lowering.cuda.kernels.small_m import WARPS
from eagle3.export.lowering.cuda.kernels.sums import WGMMA_ON
from eagle3.export.lowering.cuda.named_gpu.configurations import usage
from eagle3.runner.system.gpus import BY_ARCH, Gpu

ARCH = "90a"
AT_A_TIME, PLAIN = "ROWS", "PLAIN_ROWS"
"""The constants of a kernel that may take the rows of a program in several tiles: the rows of a tile, and those in code
without ``wgmma``, which are 0 if no code has ``wgmma``."""
EQUAL = ("name", "num_ctas", "global_scratch_size", "global_scratch_align", "profile_scratch_size")
"""The metadata of Triton that the host's code depends on, apart from warps and shared memory."""
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
"""Functions that compile the image of a kernel for ``ARCH`` from another source, by the name of the Triton kernel. One
gets the autotuner and the plain kernel; None leaves the image out. Entry, parameters, grid are the plain kernel's."""
CONFIGS = {attention_chunk._attention_chunk_kernel.__name__: attention_chunk.CONFIGS}
"""The configurations of plain images, by the name of the kernel: keys of a block, stages, warps. The plain image of
another kernel has the configuration of the second one."""


class SecondImages:
    """Compiles the second images of one lowering for ``gpus``. ``own_code`` is a context in which Triton compiles for
    ``ARCH``."""

    def __init__(self, gpus: Sequence[Gpu], own_code: Callable[[], AbstractContextManager[None]]):
        self.gpu = next((gpu for gpu in gpus if f"sm_{gpu.arch}" in WGMMA_ON), None)
        self.own_code = own_code

    def wanted(self, autotuner: CachingAutotuner) -> bool:
        """Return True if the kernel gets a second image, unless that has no ``wgmma`` or spills registers. This is
        decided here alone: for kernels with an offer, for those that say how many rows their plain code takes, and for
        Inductor's templates. In other kernels of many rows, ptxas would wait for each product unless K is divided."""
        return self.gpu is not None and (
            autotuner.fn.__name__ in OFFERED
            or plain_rows(autotuner) > 0
            or autotuner.heuristic_type == HeuristicType.TEMPLATE
        )

    def compiled(self, autotuner: CachingAutotuner, plain: CompileResult, config: Config) -> OwnImage | None:
        """Compile the second image of a kernel with ``config``. Return None if the image would have no ``wgmma``, would
        spill registers, or would take more shared memory than the GPU has. Raises ValueError if one host cannot launch
        both.
        """
        offer = OFFERED.get(autotuner.fn.__name__)
        own = offer(autotuner, plain.kernel) if offer else self._by_triton(autotuner, plain, config)
        assert self.gpu is not None
        return own if own is not None and own.shared <= self.gpu.shared_memory_per_block else None

    def _by_triton(self, autotuner: CachingAutotuner, plain: CompileResult, config: Config) -> OwnImage | None:
        assert self.gpu is not None
        properties = autotuner.device_props
        try:
            autotuner.device_props = properties._replace(cc=self.gpu.arch)
            with self.own_code():
                own = autotuner._precompile_config(config).kernel
        except (OutOfResources, PTXASError):
            return None
        finally:
            autotuner.device_props = properties
        if "wgmma.mma_async" not in own.asm["ptx"] or usage(own.asm["cubin"])[1]:
            return None
        check_one_host(plain.kernel, own)
        return OwnImage(own.asm["cubin"], own.metadata.num_warps, own.metadata.shared)


def plain_rows(autotuner: CachingAutotuner) -> int:
    """Return the rows that a kernel's code without ``wgmma`` takes at a time; 0 for a kernel without such a number."""
    return autotuner.triton_meta["constants"].get(PLAIN, 0)


def plain_gpu(gpu: Gpu) -> Gpu:
    """Return ``gpu`` with no more shared memory for a block than each later GPU has, since they run its plain code."""
    later = (each.shared_memory_per_block for each in BY_ARCH.values() if each.arch >= gpu.arch)
    return replace(gpu, shared_memory_per_block=min(later))


def plain_configs(autotuner: CachingAutotuner) -> list[Config]:
    """Return the configurations of the plain image of a kernel with one configuration; it takes ``plain_rows`` at a
    time, since it has no ``wgmma``."""
    (given,), rows = autotuner.configs, {AT_A_TIME: plain_rows(autotuner)}
    own = CONFIGS.get(autotuner.fn.__name__)
    if own is None:
        plain = copy(given)
        plain.kwargs = given.kwargs | rows
        return [plain]
    return [
        Config(given.kwargs | rows | {"BLOCK_N": keys}, num_warps=warps, num_stages=stages)
        for keys, stages, warps in own
    ]


def own_config(given: Config) -> Config:
    """Return the configuration of the second image, without a limit of registers."""
    own = copy(given)
    own.maxnreg = None
    return own


def check_one_host(plain: Any, own: Any) -> None:  # noqa: ANN401 - kernels as Triton compiles them
    """Raise ValueError, which names what differs, if one host cannot launch both kernels."""
    for field in EQUAL:
        one, other = getattr(plain.metadata, field), getattr(own.metadata, field)
        if one != other:
            raise ValueError(f"{plain.metadata.name}: {field} is {one}, and {other} in the code for sm_{ARCH}")
    one, other = (_parameters(kernel.asm["ptx"]) for kernel in (plain, own))
    if one != other:
        raise ValueError(f"{plain.metadata.name}: the parameters are {one}, and {other} in the code for sm_{ARCH}")


def _parameters(ptx: str) -> list[str]:
    """Return the types of a kernel's parameters."""
    found = PARAMETERS.search(ptx)
    assert found is not None, ptx[:200]
    return [" ".join(word for word in line.split()[:-1]) for line in found[1].split(",")]
