"""A barrier between the loops of a kernel where one loads what another stored.

Inductor keeps a row that is too long for registers in memory and loads it again in the next loop, as for the norm of a
sum. It relies on each thread loading what it has stored itself. Triton chooses which thread has which element for each
load and store anew, and where it chooses differently, nothing orders the two.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch._inductor.codegen.triton import TritonKernel

from eagle3.export.patches import original, replaced

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
