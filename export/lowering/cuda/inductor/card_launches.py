"""Launches a kernel with the threads and the shared memory of the image that the GPU takes.

A fatbin has images for several GPUs. Their arguments are the same, but an image may have a number of warps, a size of
shared memory and, along K, a number of programs of its own. AOTInductor's C++ has one number for each. Here it gets a
table by compute capability if the images differ; the largest of all would not do, since smaller GPUs refuse it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch._inductor.codegen.common import IndentedBuffer
from torch._inductor.codegen.cpp_wrapper_gpu import CppWrapperGpu, DeferredTritonCallWrapper
from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

from eagle3.export.patching.patches import all_replaced
from eagle3.runner.artifact.cuda_library import TEGRA, runs_on
from eagle3.runner.system.gpus import capability_of

CARDS = "cards"
"""The key of a kernel's table in Inductor's parameters of the kernel, and in the record of its launches."""
HELPERS = """
            #include <atomic>

            struct CardLaunch { int first; uint32_t warps, shared, parts, whole; };

            template <size_t N>
            static inline const CardLaunch& launchOn(const CardLaunch (&cards)[N], int32_t device) {
                static std::atomic<int> capabilities[64] = {};  // of the devices that were asked for it
                auto& known = capabilities[device & 63];
                int capability = known;
                if (capability == 0) {
                    CUdevice handle;
                    int major, minor;
                    CUDA_DRIVER_CHECK(cuDeviceGet(&handle, device));
                    constexpr auto MAJOR = CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
                    constexpr auto MINOR = CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR;
                    CUDA_DRIVER_CHECK(cuDeviceGetAttribute(&major, MAJOR, handle));
                    CUDA_DRIVER_CHECK(cuDeviceGetAttribute(&minor, MINOR, handle));
                    known = capability = 10 * major + minor;
                }
                const CardLaunch* found = nullptr;
                for (auto& card : cards) {
                    if (card.first <= capability) found = &card;
                }
                if (!found || !found->warps) {
                    throw std::runtime_error("no image of the kernel is for sm_" + std::to_string(capability));
                }
                return *found;
            }
"""


class Image(NamedTuple):
    """An image of a kernel: its form ("sass" or "ptx"), its architecture, such as "sm_90a", its launch (warps, bytes
    of dynamic shared memory), the constants of its configuration, (name, value), and its programs along K of a tile, 0:
    those of the launch. The first ``whole`` tiles have one program each."""

    form: str
    arch: str
    warps: int
    shared: int
    constants: tuple[tuple[str, int], ...] = ()
    parts: int = 0
    whole: int = 0


class CardLaunch(NamedTuple):
    """The launch on GPUs from a compute capability on (``first``, 90 for 9.0). Without an image it has 0 warps."""

    first: int
    warps: int
    shared: int
    constants: tuple[tuple[str, int], ...] = ()
    parts: int = 0
    whole: int = 0

    def record(self) -> dict[str, Any]:
        """Return the entry of ``export.json``, which ``gpus.launch_on`` reads."""
        taken = {"threads": 32 * self.warps, "shared_bytes": self.shared}
        divided = {"parts": self.parts, "whole": self.whole}
        return {"first": self.first, **taken, "constants": dict(self.constants), **divided}


def taken(images: Sequence[Image], capability: int) -> Image | None:
    """Return the image that CUDA's driver takes on a GPU: machine code for that GPU alone, then the latest machine
    code, then the latest PTX; None if it runs none."""
    running = [each for each in images if runs_on(each.form, each.arch, divmod(capability, 10))]
    return max(
        running, key=lambda each: (each.form == "sass", each.arch[-1] == "a", capability_of(each.arch)), default=None
    )


def launches_by_card(images: Sequence[Image]) -> tuple[CardLaunch, ...]:
    """Return the launches of a kernel with these images, in the order of ``first``; neighbours differ."""
    numbers, orin = {capability_of(each.arch) for each in images}, 10 * TEGRA[0] + TEGRA[1]
    starts = numbers | {each + 1 for each in numbers} | {(each // 10 + 1) * 10 for each in numbers} | {orin, orin + 1}
    found: list[CardLaunch] = []
    for first in sorted(start for start in starts if start >= min(numbers)):
        image = taken(images, first)
        launch = CardLaunch(first, *image[2:]) if image else CardLaunch(first, 0, 0)
        if not found or found[-1][1:] != launch[1:]:
            found.append(launch)
    return tuple(found)


@contextmanager
def launches_of_images() -> Iterator[None]:
    """Make Inductor write the launch of a kernel that has a table in its parameters."""
    load, launch = DeferredTritonCallWrapper.generate_load_kernel, DeferredTritonCallWrapper.generate_launch_kernel
    driver = CUDADeviceOpOverrides.kernel_driver

    def load_own(
        self: DeferredTritonCallWrapper, prefix: IndentedBuffer, kernel: str, params: Mapping[str, Any]
    ) -> None:
        if CARDS in params:
            rows = ((each.first, each.warps, each.shared, each.parts, each.whole) for each in params[CARDS])
            cards = ", ".join(f"{{{', '.join(map(str, row))}}}" for row in rows)
            prefix.writeline(f"static constexpr CardLaunch cards_[] = {{{cards}}};")
            prefix.writeline("const auto& card_ = launchOn(cards_, device_idx_);")
            prefix.writeline("if (card_.parts) grid_2 = card_.whole ? 1 : card_.parts;")
            prefix.writeline("if (card_.whole) grid_1 = card_.whole + (grid_1 - card_.whole) * card_.parts;")
        load(self, prefix, kernel, _of_card(params))

    def launch_own(
        self: DeferredTritonCallWrapper,
        prefix: IndentedBuffer,
        wrapper: CppWrapperGpu,
        kernel: str,
        params: Mapping[str, Any],
    ) -> None:
        launch(self, prefix, wrapper, kernel, _of_card(params))

    def with_helpers(self: CUDADeviceOpOverrides) -> str:
        return driver(self) + HELPERS

    deferred = "torch._inductor.codegen.cpp_wrapper_gpu.DeferredTritonCallWrapper."
    overrides = "torch._inductor.codegen.cuda.device_op_overrides.CUDADeviceOpOverrides."
    with all_replaced(
        {
            f"{deferred}generate_load_kernel": load_own,
            f"{deferred}generate_launch_kernel": launch_own,
            f"{overrides}kernel_driver": with_helpers,
        }
    ):
        yield


def _of_card(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return Inductor's parameters of a kernel with C++ in place of its numbers, if it has a table."""
    own = {"num_warps": "card_.warps", "shared_mem": "card_.shared"} if CARDS in params else {}
    return {**params, **own}
