"""Makes Inductor fuse more than it does by default, because a round has many hundreds of launches.

Kernels that do not depend on each other are combined into one, such as the norms and rotary embeddings of queries and
keys, or the norms of a draft head's two inputs. A program of the combined kernel does the work of one program of one of
them. The rotary tables are computed once per forward. Otherwise each kernel that applies them would compute them, and
the exact sine of a large angle takes additional memory.
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

from eagle3.export.patching.patches import replaced, with_items

COMBINED = {
    "combo_kernels": True,
    "combo_kernel_per_subkernel_blocks": True,
    "combo_kernel_peak_memory_pct_threshold": None,  # see MOST
}
MOST = 1 << 18
"""The most elements of a kernel that is combined with others, chosen for few rows. The kernels that dequantize weights
for a chunk of prefill do not depend on each other either, but each must stay next to the use of its weights."""
KEPT = (torch.ops.aten.cos.default, torch.ops.aten.sin.default)
"""Operations whose results are computed once and stored, however many kernels read them."""


@contextmanager
def fused_further() -> Iterator[None]:
    """Make Inductor combine independent kernels, with and without reductions, and keep the results of ``KEPT``.

    With a torch that cannot give the parts of a combined kernel their own block sizes, nothing is combined.
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
