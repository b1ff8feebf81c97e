"""Makes Inductor fuse more than it does by default, because a round has many hundreds of launches.

Kernels that do not depend on each other are combined into one, such as the norms and rotary embeddings of queries and
keys, or the norms of a draft head's two inputs. A program of the combined kernel does the work of one program of one of
them. The rotary tables are computed once per forward. Otherwise each kernel that applies them would compute them, and
the exact sine of a large angle takes additional memory.

An argmax of long rows uses many blocks. Inductor's own uses one block per row, even for 262,144 logits.

A barrier is put between two loops of a kernel if the second loads what the first stored.

A row that is too long for registers, as for the norm of a sum, is stored to memory by one loop and loaded again by the
next. Inductor relies on each thread loading only what the same thread stored. But Triton assigns elements to threads
anew for each load and store. Where the assignments differ, nothing orders the store before the load.

A whole row stays in registers where Inductor reduces one, such as the row of a norm.

Beyond 1,024 elements Inductor writes a loop over pieces of the row, and another loop for what it computes from the sum:
a row is loaded again, and each loop waits for memory, which is most of such a kernel's time with the few rows of a
round. A program of 8 warps holds a row of 8,192 elements in its registers.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from executorch.backends.cuda.cuda_backend import CudaBackend
from torch import Tensor
from torch._inductor import config, decomposition, lowering
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.ir import TensorBox
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.scheduler import BaseSchedulerNode, ForeachKernelSchedulerNode, Scheduler
from torch._inductor.virtualized import V
from torch.nn import functional as F

from eagle3.export.patching.patches import original, replaced, with_items

COMBINED = {
    "combo_kernels": True,
    "combo_kernel_per_subkernel_blocks": True,
    "combo_kernel_peak_memory_pct_threshold": None,  # see MOST
}
MOST = 1 << 18
"""The most elements of a kernel that is combined with others, chosen for few rows. The kernels that dequantize weights
for a chunk of prefill do not depend on each other either, but each must stay next to the use of its weights."""
AROUND = "executorch.backends.cuda.cuda_backend.CudaBackend.get_extra_aoti_compile_context_manager"
KEPT = (torch.ops.aten.cos.default, torch.ops.aten.sin.default)
"""Operations whose results are computed once and stored, however many kernels read them."""


@contextmanager
def fused_further(apart: Collection[str] = ()) -> Iterator[None]:
    """Make Inductor combine independent kernels, with and without reductions, and keep the results of ``KEPT``.

    Nothing is combined in the methods ``apart``, whose kernels are hundreds of copies that differ in their buffers
    alone: they share one kernel's code, and combined they would have more arguments than a kernel may. With a torch
    that cannot give the parts of a combined kernel their own block sizes, nothing is combined either.
    """
    around = CudaBackend.get_extra_aoti_compile_context_manager

    @contextmanager
    def combined_or_not(cls: type[CudaBackend], specs: list[Any]) -> Iterator[None]:
        alone = cls.method_name_from_compile_specs(specs) in apart
        with around(specs), config.patch(combo_kernels=False) if alone else nullcontext():
            yield

    partition = "torch._inductor.codegen.triton_combo_kernel._custom_combo_kernel_horizontal_partition_algorithm"
    group = "torch._inductor.scheduler.ForeachKernelSchedulerNode.group_algorithm_for_combo_kernels"
    lowerings = "torch._inductor.lowering.lowerings"
    with ExitStack() as stack:
        stack.enter_context(with_items(lowerings, {op: _kept(lowering.lowerings[op]) for op in KEPT}))
        if apart:
            stack.enter_context(replaced(AROUND, classmethod(combined_or_not)))
        if all(hasattr(config, name) for name in COMBINED):
            stack.enter_context(config.patch(COMBINED))
            stack.enter_context(replaced(partition, lambda nodes, *_: [nodes]))
            stack.enter_context(replaced(group, staticmethod(_independent)))
        yield


def _independent(scheduler: Scheduler) -> list[list[BaseSchedulerNode]]:
    """Return the small kernels of each level of the graph; kernels of one level do not depend on each other.

    Reductions over the rows of a chunk, such as counting rows by expert, are left out, because Inductor refuses some of
    them.
    """

    def small(node: BaseSchedulerNode) -> bool:
        *_, reduced = numels = node.group[1]
        sizes = (V.graph.sizevars.optimization_hint(size, fallback=MOST + 1) for size in numels)
        static = not V.graph.sizevars.simplify(reduced).free_symbols
        return node.get_device().type == "cuda" and static and math.prod(sizes) <= MOST

    levels = scheduler._topological_sort_nodes()
    return [[node for node in ForeachKernelSchedulerNode.combinable_nodes(level) if small(node)] for level in levels]


def _kept(lower: Callable[..., TensorBox]) -> Callable[..., TensorBox]:
    def kept(*args: Any, **kwargs: Any) -> TensorBox:
        out = lower(*args, **kwargs)
        V.graph.no_fuse_buffer_names.add(out.realize())
        return out

    return kept


BLOCK = 2048


def block_of(width: int) -> int:
    """Return the block size for rows of ``width``: their divisor nearest to ``BLOCK``, if there is one within a factor
    of 2, otherwise ``BLOCK``. A divisor needs no padding of the rows, which would be a separate launch."""
    near = (size for size in range(BLOCK // 2, 2 * BLOCK) if width % size == 0)
    return min(near, key=lambda size: abs(size - BLOCK), default=BLOCK)


def argmax_of_blocks(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Compute ``torch.argmax`` over the last dimension, with the first of equal values as the result.

    Returns NotImplemented, which makes Inductor use its own argmax, for another dimension and for rows of at most two
    blocks.
    """
    if dim not in (-1, x.ndim - 1) or x.shape[-1] <= 2 * BLOCK:
        return NotImplemented
    size = block_of(x.shape[-1])
    blocks = F.pad(x, (0, -x.shape[-1] % size), value=float("-inf")).unflatten(-1, (-1, size))
    greatest, within = blocks.max(-1)
    block = greatest.argmax(-1, keepdim=True)
    ids = block * size + within.gather(-1, block)
    return ids if keepdim else ids.squeeze(-1)


@contextmanager
def argmax_over_blocks() -> Iterator[None]:
    """Make Inductor use ``argmax_of_blocks``."""
    decomposition.fast_random_decomps.cache_clear()
    try:
        with with_items(
            "torch._inductor.decomposition.decompositions", {torch.ops.aten.argmax.default: argmax_of_blocks}
        ):
            yield
    finally:
        decomposition.fast_random_decomps.cache_clear()


BODY = "torch._inductor.codegen.triton.TritonKernel.codegen_body"
STORED, LOADED = (re.compile(rf"tl\.{what}\((\w+)\b") for what in ("store", "load"))


@contextmanager
def barriers_between_loops() -> Iterator[None]:
    """Make Inductor write a barrier before a loop that loads from where an earlier loop has stored."""
    write = original(BODY)
    stored: WeakKeyDictionary[TritonKernel, set[str]] = WeakKeyDictionary()

    def codegen_body(self: TritonKernel) -> None:
        before = stored.setdefault(self, set())
        if before.intersection(LOADED.findall(self.loads.getvalue())):
            self.body.writeline("tl.debug_barrier()")
            before.clear()
        if self.inside_reduction and any(tree.is_loop for tree in self.range_trees):
            before.update(STORED.findall(self.stores.getvalue()))
        write(self)

    with replaced(BODY, codegen_body):
        yield


LONGEST = 8192
"""The most elements of a row in registers. Inductor divides longer rows among programs, if they are few."""


class WholeRows(InductorChoices):
    """Keeps rows of up to ``LONGEST`` elements that are contiguous in memory in registers. All other choices are
    Inductor's own."""

    @staticmethod
    def should_use_persistent_reduction(features: SIMDKernelFeatures, cooperative_reduction: bool) -> bool:
        if features.get_reduction_hint() == ReductionHint.INNER and not cooperative_reduction:
            return V.graph.sizevars.statically_known_leq(features.reduction_numel, LONGEST)
        return InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)


def rows_in_registers() -> AbstractContextManager[None]:
    """Return a context in which Inductor reduces rows in registers."""
    return V.set_choices_handler(WholeRows())
