"""What Inductor fuses besides what it does by itself: each launch saved is time in a round of a thousand of them.

Kernels that do not depend on each other become one, a program of which does the work of one of them: the norms and
rotations of queries and of keys, the norms of a draft head's two inputs. The tables of rotary positions are computed
once a forward instead of by each kernel of each layer that rotates, where the exact sine of a large angle takes memory
of its own.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._inductor import config, lowering
from torch._inductor.ir import TensorBox
from torch._inductor.scheduler import BaseSchedulerNode, ForeachKernelSchedulerNode, Scheduler
from torch._inductor.virtualized import V

from eagle3.export.patches import replaced, with_items

COMBINED = {
    "combo_kernels": True,
    "combo_kernel_per_subkernel_blocks": True,
    "combo_kernel_peak_memory_pct_threshold": None,  # see MOST
}
MOST = 1 << 18
"""Places that a kernel to be combined is over: those of a few rows. Weights that a chunk of prefill dequantizes, which
depend on nothing either, stay where they are wanted."""
KEPT = (torch.ops.aten.cos.default, torch.ops.aten.sin.default)
"""What is computed once, however many read it."""


@contextmanager
def fused_further() -> Iterator[None]:
    """Within it, Inductor combines independent kernels, reductions and others alike, and keeps the results of ``KEPT``.

    A torch that has no such kernels with blocks of their own combines none.
    """
    partition = "torch._inductor.codegen.triton_combo_kernel._custom_combo_kernel_horizontal_partition_algorithm"
    group = "torch._inductor.scheduler.ForeachKernelSchedulerNode.group_algorithm_for_combo_kernels"
    lowerings = "torch._inductor.lowering.lowerings"
    with ExitStack() as stack:
        stack.enter_context(with_items(lowerings, {op: _kept(lowering.lowerings[op]) for op in KEPT}))
        if all(hasattr(config, name) for name in COMBINED):
            stack.enter_context(config.patch(COMBINED))
            stack.enter_context(replaced(partition, lambda nodes, *_: [nodes]))
            stack.enter_context(replaced(group, staticmethod(_independent)))
        yield


def _independent(scheduler: Scheduler) -> list[list[BaseSchedulerNode]]:
    """The small kernels of each level of the graph, none of which depends on another. What reduces over the rows of a
    chunk, as the counting of rows by experts does, is compiled by itself: Inductor refuses some of it."""

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
