"""Puts a barrier between two loops of a kernel if the second loads what the first stored.

A row that is too long for registers, as for the norm of a sum, is stored to memory by one loop and loaded again by the
next. Inductor relies on each thread loading only what the same thread stored. But Triton assigns elements to threads
anew for each load and store. Where the assignments differ, nothing orders the store before the load.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch._inductor.codegen.triton import TritonKernel

from eagle3.export.patching.patches import original, replaced

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
