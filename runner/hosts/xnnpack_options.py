"""Sets options of ExecuTorch's XNNPACK backend through its C++ library, because its Python bindings (1.5) lack them.

``libexecutorch.so`` exports ``executorch::runtime::set_option``. The package's own headers define its arguments
(``include/executorch/runtime/backend/options.h``).
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BACKEND = b"XnnpackBackend"
_SET_OPTION = "_ZN10executorch7runtime10set_optionEPKcNS0_4SpanINS0_13BackendOptionEEE"


class _Value(ctypes.Union):
    """The layout of ``std::variant<bool, int, std::array<char, 256>>``."""

    _fields_ = [("boolean", ctypes.c_bool), ("integer", ctypes.c_int), ("text", ctypes.c_char * 256)]


class _Option(ctypes.Structure):
    _fields_ = [("key", ctypes.c_char * 64), ("value", _Value), ("index", ctypes.c_uint8)]


@contextmanager
def packed_weights_shared() -> Iterator[bool]:
    """Make the methods loaded within this context share one packed copy of each weight instead of holding one copy
    each.

    Programs loaded outside are not affected. The computed numbers are the same. Yields True if this ExecuTorch, which
    must be loaded before, has the option.
    """
    has = _set_weight_cache(True)
    try:
        yield has
    finally:
        _set_weight_cache(False)


def _set_weight_cache(enabled: bool) -> bool:
    import executorch

    for library in (Path(executorch.__path__[0]) / "lib").glob("libexecutorch.*"):
        set_option = getattr(ctypes.CDLL(str(library)), _SET_OPTION, None)
        if set_option is not None:
            option = _Option(b"weight_cache_enabled", _Value(boolean=enabled), 0)
            set_option.argtypes = (ctypes.c_char_p, ctypes.POINTER(_Option), ctypes.c_size_t)
            return set_option(BACKEND, ctypes.byref(option), 1) == 0
    return False
