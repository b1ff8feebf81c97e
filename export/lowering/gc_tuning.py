"""Makes Python's garbage collector run rarely while graphs of millions of long-lived objects are built."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (50_000, 20, 100)
"""Thresholds of the three generations; Python's defaults are 700, 10 and 10. A full collection takes seconds.
ExecuTorch requests one before and after a method is compiled, which is enough."""


@contextmanager
def collected_rarely() -> Iterator[None]:
    """Exempt existing objects from garbage collection within the context, and collect new objects rarely."""
    earlier = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*earlier)
        gc.unfreeze()


def not_collected_at_exit() -> None:
    """Make this process end without a final garbage collection, which takes seconds after an export."""
    atexit.register(gc.freeze)
