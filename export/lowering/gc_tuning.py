"""Python's search for garbage, while graphs of millions of objects are built that nearly all stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (50_000, 20, 100)
"""700, 10 and 10 otherwise. The last search, through all that there is, takes seconds: it is left to ExecuTorch, which
asks for one before and after a method is compiled."""


@contextmanager
def collected_rarely() -> Iterator[None]:
    """Within it, what is there already is never looked through, and what is made is so seldom."""
    earlier = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*earlier)
        gc.unfreeze()
