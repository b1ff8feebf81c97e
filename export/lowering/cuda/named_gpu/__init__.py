"""Lowering to CUDA for a GPU that is named instead of present: no GPU, no driver, no CUDA toolkit.

AOTInductor asks the GPU at hand what it is, compiles for it, times kernels on it, keeps weights on it, and links with
its driver. Six parts answer in its place, each a context manager in a file of its own, and a seventh saves time:

1. ``answers``    what PyTorch says of the GPU
2. ``compiling``  Triton compiles for the named architecture; nothing is loaded or launched. Of the configurations of a
   kernel written by hand the one is kept that ``configurations`` takes, by spills and by what is in flight
3. ``choices``    nothing is timed: templates for products are ranked by ``matmuls``, from their tiles
4. ``weights``    weights are fake CUDA tensors that remember where their data lies on the host
5. ``operators``  Python's operators of fake CUDA tensors do not ask for their device
6. ``toolchain``  nvcc from pip packages, a stub of the driver's library to link with
7. ``processes``  methods are compiled in two processes: ``in_two_processes``

They reach into private parts of PyTorch, Triton and ExecuTorch, so they are refused outside the versions that they were
tested with. Where there is a GPU nothing here is used.
"""

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from eagle3.export.lowering.cuda.named_gpu.gpus import GPUS
from eagle3.export.patches import FOR_CUDA, TESTED, check_versions


def check_named_versions() -> None:
    """Raise ValueError for a version of a package that lowering without a GPU was not tested with."""
    check_versions(FOR_CUDA, TESTED, "lowering for CUDA without a GPU", ", or export on a machine with a GPU")


@contextmanager
def named_gpu(arch: str) -> Iterator[None]:
    """Within it, ExecuTorch's CUDA backend lowers for ``arch`` (a key of ``GPUS``, such as "sm_90").

    Raises ValueError for versions of torch or triton that were not tested, FileNotFoundError without a toolchain.
    """
    check_named_versions()
    from eagle3.export.lowering.cuda.inductor.toolchain import toolchain
    from eagle3.export.lowering.cuda.named_gpu.answers import answers
    from eagle3.export.lowering.cuda.named_gpu.choices import choices
    from eagle3.export.lowering.cuda.named_gpu.compiling import compiling
    from eagle3.export.lowering.cuda.named_gpu.operators import operators
    from eagle3.export.lowering.cuda.named_gpu.weights import weights_on_host

    gpu = GPUS[arch]
    with ExitStack() as parts:
        for part in (toolchain(), answers(gpu), compiling(gpu), choices(gpu), weights_on_host(), operators()):
            parts.enter_context(part)
        yield


def in_two_processes(recorded: MutableMapping[str, Any], check: Callable[[str], None]) -> AbstractContextManager[None]:
    """See ``processes.two_processes``."""
    from eagle3.export.lowering.cuda.named_gpu.processes import two_processes

    return two_processes(recorded, check)
