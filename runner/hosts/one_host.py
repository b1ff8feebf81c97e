"""Allows one host of CUDA artifacts per process.

PyTorch and ExecuTorch export different functions under the same names to a method's library, and the loader takes those
that were loaded first. With the wrong ones, the first call would crash the process.
"""

import ctypes
from pathlib import Path

SHARED = "aoti_torch_get_data_ptr"  # every library calls this function, and both hosts define it


class _Place(ctypes.Structure):
    """The layout of the C struct ``Dl_info`` of dlfcn.h."""

    _fields_ = [
        ("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("symbol", ctypes.c_char_p), ("address", ctypes.c_void_p)
    ]  # fmt: skip


def provider() -> str | None:
    """Return the file name of the library whose functions a method's library would call; None before either host
    ran."""
    process, place = ctypes.CDLL(None), _Place()
    try:
        function = ctypes.cast(getattr(process, SHARED), ctypes.c_void_p)
    except AttributeError:
        return None
    process.dladdr(function, ctypes.byref(place))
    return Path(place.file.decode()).name


def check_only_host(torch: bool) -> None:
    """Raise ValueError if the other host has already run an artifact. ``torch``: PyTorch is the host, not
    ExecuTorch."""
    found = provider()
    if found is None or found.startswith("libtorch") == torch:
        return
    host, other = ("PyTorch", "ExecuTorch") if torch else ("ExecuTorch", "PyTorch")
    raise ValueError(
        f"{host} cannot run a CUDA artifact in a process in which {other} has run one (libraries would call {found}): "
        "use one --runtime per process"
    )
