"""Lets a kernel start before the one in front of it has ended: programmatic dependent launches, sm_90 and later.

AOTInductor's C++ starts kernels by ``cuLaunchKernel``, one after the other: a GPU has nothing to do between the last
program of a kernel and the first of the next. Here every kernel is started by ``cuLaunchKernelEx`` with the attribute
of programmatic stream serialization. Its programs take their places as soon as all programs of the kernel in front have
started and places are free. They wait for that kernel's end (``griddepcontrol.wait``) before anything else.

**Every kernel waits**, in its first statement, so that a kernel's end includes the end of all before it. A kernel that
is called with the constant ``EARLY`` (``Product.asks_l2``) waits
itself, after it has loaded weights or asked L2 for them. No kernel writes these.

Inductor's own option, ``triton.enable_pdl``, lets a kernel skip the wait if the kernel in front writes nothing that it
reads. That is right only if no kernel releases the next one before its own wait.
"""

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager

from torch._inductor.codegen.cpp_wrapper_gpu import CppWrapperGpu
from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

from eagle3.export.patching.patches import all_replaced
from eagle3.runner.system.gpus import BY_ARCH, archs_of

FIRST_WITH = 90
RELEASE, WAIT = "tl.extra.cuda.gdc_launch_dependents()", "tl.extra.cuda.gdc_wait()"
OWN = "EARLY"
"""The constant of a kernel that waits itself."""
SOURCE = re.compile(r"async_compile\.triton\('\w+', (?P<source>'''.*''')", re.DOTALL)
IN_ORDER = """CUDA_DRIVER_CHECK(cuLaunchKernel(
                    func, gridX, gridY, gridZ, 32*numWarps, 1, 1, sharedMemBytes, stream, args, nullptr
                ));"""
EARLY = """CUlaunchAttribute early = {};
                early.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
                early.value.programmaticStreamSerializationAllowed = 1;
                CUlaunchConfig config = {};
                config.gridDimX = gridX;
                config.gridDimY = gridY;
                config.gridDimZ = gridZ;
                config.blockDimX = 32 * numWarps;
                config.blockDimY = 1;
                config.blockDimZ = 1;
                config.sharedMemBytes = sharedMemBytes;
                config.hStream = stream;
                config.attrs = &early;
                config.numAttrs = 1;
                CUDA_DRIVER_CHECK(cuLaunchKernelEx(&config, func, args, nullptr));"""


def can_start_early(arch: str) -> bool:
    """Return True if an architecture, such as "sm_90", has early launches, and with them prefetches into L2; of a list,
    if all have, since all images of a kernel are made of one source."""
    return all(BY_ARCH[each].arch >= FIRST_WITH for each in archs_of(arch))


@contextmanager
def early_launches() -> Iterator[None]:
    """Make Inductor write kernels that start early."""
    define, driver = CppWrapperGpu._define_kernel_helper, CUDADeviceOpOverrides.kernel_driver

    def define_waiting(
        self: CppWrapperGpu,
        kernel_name: str,
        kernel_body: str,
        metadata: str | None = None,
        gpu: bool = True,
        cpp_definition: str | None = None,
    ) -> None:
        define(self, kernel_name, waiting(kernel_body) if gpu else kernel_body, metadata, gpu, cpp_definition)

    def launch_early(self: CUDADeviceOpOverrides) -> str:
        return launching_early(driver(self))

    wrapper = "torch._inductor.codegen.cpp_wrapper_gpu.CppWrapperGpu."
    overrides = "torch._inductor.codegen.cuda.device_op_overrides.CUDADeviceOpOverrides."
    parts = {f"{wrapper}_define_kernel_helper": define_waiting, f"{overrides}kernel_driver": launch_early}
    with all_replaced(parts):
        yield


def launching_early(helpers: str) -> str:
    """Return the C++ helpers of AOTInductor's wrapper with a launch that may begin early. Raises ValueError if they
    launch kernels in another way than the tested version."""
    if helpers.count(IN_ORDER) != 1:
        raise ValueError("AOTInductor's launchKernel is not the one that is replaced: type --int4-layout tiles")
    return helpers.replace(IN_ORDER, EARLY)


def waiting(kernel: str) -> str:
    """Return Inductor's definition of a Triton kernel with a wait as its first statement, or as it is if the kernel
    waits itself. Raises ValueError for a definition without a kernel."""
    found = SOURCE.search(kernel)
    source = "" if found is None else ast.literal_eval(found["source"])
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    heads = [node for node in functions if any("triton_heuristics" in ast.unparse(it) for it in node.decorator_list)]
    if len(heads) != 1:
        raise ValueError(f"{len(heads)} kernels are in a definition of Inductor, where one is expected")
    (head,) = heads
    if waits_itself(head):
        return kernel
    first = source.splitlines()[head.body[0].lineno - 1]
    at = kernel.index(first + "\n", kernel.index(f"def {head.name}("))
    indent = " " * head.body[0].col_offset
    return f"{kernel[:at]}{indent}{RELEASE}\n{indent}{WAIT}\n{kernel[at:]}"


def waits_itself(kernel: ast.FunctionDef) -> bool:
    """Return True if Inductor's decorators give the kernel the constant EARLY, with which it waits."""
    tables = (node for each in kernel.decorator_list for node in ast.walk(each) if isinstance(node, ast.Dict))
    constants = (pair for table in tables for pair in zip(table.keys, table.values, strict=True))
    is_early = any(
        isinstance(name, ast.Constant) and name.value == OWN and isinstance(value, ast.Constant) and value.value is True
        for name, value in constants
    )
    return is_early and WAIT in ast.unparse(kernel)
