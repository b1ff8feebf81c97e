"""Lowers to CUDA for the GPU that ``--cuda-arch`` names: the machine needs no GPU, no driver and no CUDA toolkit.

AOTInductor queries the GPU, compiles for it, times kernels on it, keeps weights on it, and links with its driver. Six
context managers, each in a file of its own, replace these steps, and a seventh saves time:

1. ``fake_device``  PyTorch's queries return the properties of the named GPU
2. ``compiling``    Triton compiles for the named architecture; nothing is loaded or launched. ``configurations``
   chooses the configuration of a hand-written kernel by its spills and its loads in flight, ``second_image`` adds code
   with ``wgmma`` to kernels of many rows for sm_90, ``fatbins`` makes and packs the images for a list of GPUs
3. ``choices``      nothing is timed; matmul templates are ranked by ``matmuls``, from their tiles
4. ``weights``      weights are fake CUDA tensors that refer to their data on the host
5. ``operators``    Python operators on fake CUDA tensors do not switch to their device
6. ``toolchain``    nvcc comes from pip packages, and a stub of the driver's library is linked
7. ``processes``    methods are compiled in two processes: ``in_two_processes``

They replace private parts of PyTorch, Triton and ExecuTorch, so other versions than the tested ones are refused. With a
GPU, nothing here is used.
"""

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from eagle3.export.patching.tested_versions import FOR_CUDA, TESTED, check_versions
from eagle3.runner.system.gpus import BY_ARCH, archs_of


def check_named_versions() -> None:
    """Raise ValueError for a version of a package that lowering without a GPU was not tested with."""
    check_versions(FOR_CUDA, TESTED, "lowering for CUDA without a GPU", ", or export on a machine with a GPU")


@contextmanager
def named_gpu(arch: str) -> Iterator[None]:
    """Make ExecuTorch's CUDA backend lower for ``arch``: a key of ``BY_ARCH``, such as "sm_90", or a list of them.

    Raises ValueError for versions of torch or triton that were not tested, FileNotFoundError without a toolchain.
    """
    check_named_versions()
    from eagle3.export.lowering.cuda.named_gpu.choices import choices
    from eagle3.export.lowering.cuda.named_gpu.compiling import compiling
    from eagle3.export.lowering.cuda.named_gpu.fake_device import fake_device, operators
    from eagle3.export.lowering.cuda.named_gpu.fatbins import common_gpu
    from eagle3.export.lowering.cuda.named_gpu.weights import weights_on_host
    from eagle3.export.patching.toolchain import toolchain

    gpus = [BY_ARCH[each] for each in archs_of(arch)]
    device = fake_device(common_gpu(gpus))
    with ExitStack() as parts:
        for part in (toolchain(), device, compiling(*gpus), choices(*gpus), weights_on_host(), operators()):
            parts.enter_context(part)
        yield


def in_two_processes(recorded: MutableMapping[str, Any], check: Callable[[str], None]) -> AbstractContextManager[None]:
    """Compile methods in two processes; see ``processes.two_processes``."""
    from eagle3.export.lowering.cuda.named_gpu.processes import two_processes

    return two_processes(recorded, check)
