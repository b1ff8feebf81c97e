"""Makes Inductor keep a whole row in registers where it reduces one, such as the row of a norm.

Beyond 1,024 elements Inductor writes a loop over pieces of the row, and another loop for what it computes from the sum:
a row is loaded again, and each loop waits for memory, which is most of such a kernel's time with the few rows of a
round. A program of 8 warps holds a row of 8,192 elements in its registers.
"""

from contextlib import AbstractContextManager

from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V

LONGEST = 8192
"""The most elements of a row in registers. Inductor divides longer rows among programs, if they are few."""


class WholeRows(InductorChoices):
    """Inductor's own choices, but for the rows of up to ``LONGEST`` elements that lie in memory one after the other."""

    @staticmethod
    def should_use_persistent_reduction(features: SIMDKernelFeatures, cooperative_reduction: bool) -> bool:
        if features.get_reduction_hint() == ReductionHint.INNER and not cooperative_reduction:
            return V.graph.sizevars.statically_known_leq(features.reduction_numel, LONGEST)
        return InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)


def rows_in_registers() -> AbstractContextManager[None]:
    """Return a context in which Inductor reduces rows in registers."""
    return V.set_choices_handler(WholeRows())
