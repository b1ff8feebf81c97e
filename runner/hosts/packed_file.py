"""Keeps packed weights in a file, which later starts map instead of packing the weights again.

XNNPACK packs weights in the order in which its kernels for this processor read them, at every start: seconds for a
model of a few gigabytes. ExecuTorch's backend (1.5) can keep them in a file and map it. It takes the file's path only
as a load-time option (``init`` in ``XNNPACKBackend.cpp``), which its Python bindings do not pass on
(``PyProgram::load_method``). So the path is set on the backend's cache itself, through its C++ library, before the
first method loads.

Sets options of ExecuTorch's XNNPACK backend through its C++ library, because its Python bindings (1.5) lack them.

``libexecutorch.so`` exports ``executorch::runtime::set_option``. The package's own headers define its arguments
(``include/executorch/runtime/backend/options.h``).
"""

import ctypes
import fcntl
import hashlib
import os
import shutil
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle3.runner.artifact.pte import program_bytes
from eagle3.runner.system.command import tell, verbose_note
from eagle3.runner.system.cpu_features import processor
from eagle3.runner.system.machine import size_text, version_of

LIBRARIES = ("libexecutorch.so", "libexecutorch_backend_xnnpack.so")
VERSION = "1.5."
"""The ExecuTorch version whose memory layout is known: the options are the first member of its backend."""
_STRING = "RKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
_BACKEND_OF_NAME = "_ZN10executorch7runtime17get_backend_classEPKc"
_CACHE_OF_PATH = f"_ZN10executorch8backends7xnnpack21XnnpackBackendOptions27get_or_create_weights_cacheE{_STRING}"
_SET_PATH = f"_ZN10executorch8backends7xnnpack8delegate15XNNWeightsCache21set_packed_cache_pathE{_STRING}"
_RELEASE = "_ZNSt16_Sp_counted_baseILN9__gnu_cxx12_Lock_policyE2EE10_M_releaseEv"
_FOOTER = struct.Struct("<QIII")
"""The layout of a complete file's last bytes: the offset of its index, the number of entries, a magic number, the
format's version."""
_WHOLE = (0x58505743, 2)
_POINTER = ctypes.sizeof(ctypes.c_void_p)


class _String(ctypes.Structure):
    """The layout of a ``std::string`` of libstdc++."""

    _fields_ = [("data", ctypes.c_char_p), ("size", ctypes.c_size_t), ("capacity", ctypes.c_char * 16)]

    def __init__(self, text: bytes):
        super().__init__(text, len(text), b"")


class _SharedCache(ctypes.Structure):
    """The layout of ``Result<std::shared_ptr<XNNWeightsCache>>``."""

    _fields_ = [("cache", ctypes.c_void_p), ("control", ctypes.c_void_p), ("has_value", ctypes.c_bool)]


class PackedFile:
    """The packed weights of one program for this processor and this ExecuTorch, in ``folder``.

    Raises ValueError if this ExecuTorch cannot keep packed weights in a file, or if the disk has no room for the file.
    """

    def __init__(self, model: Path, folder: Path):
        _libraries()
        folder.mkdir(parents=True, exist_ok=True)
        told = "\n".join((version_of("executorch"), processor())).encode() + program_bytes(model)
        self.path = folder.resolve() / f"{hashlib.sha256(told).hexdigest()[:32]}.xnnpack"
        self.was_whole = is_whole(self.path)
        self._begun = False
        free, needed = shutil.disk_usage(folder).free, model.stat().st_size
        if not self.was_whole:
            if free < needed:
                raise ValueError(
                    f"{folder} has {size_text(free)} free, packed weights take up to {size_text(needed)}: free "
                    "some, or leave --packed-weights out"
                )
            tell(f"Packing the weights for this processor into {self.path}, which later starts map.")

    @contextmanager
    def in_use(self) -> Iterator[bool]:
        """Make the methods loaded within this context share packed weights (``packed_weights_shared``) that lie in the
        file.

        A complete file is mapped and never written. Otherwise this process writes it and keeps it locked until its
        methods are gone; a process that starts meanwhile packs weights in its own memory.
        """
        with packed_weights_shared() as shared:
            if self._begun or not shared:
                yield shared
                return
            self._begun = True
            with _path_set(self.path) as is_set:
                yield shared
            if is_set and self.was_whole:
                _unlock(self.path)


def is_whole(path: Path) -> bool:
    """Return True if ``path`` is a file that a process has written to its end."""
    try:
        with path.open("rb") as file:
            file.seek(-_FOOTER.size, os.SEEK_END)
            return _FOOTER.unpack(file.read())[2:] == _WHOLE
    except OSError:  # also raised for a file shorter than ``_FOOTER``
        return False


@contextmanager
def _path_set(path: Path) -> Iterator[bool]:
    """Give ``path`` to the cache of weights that the backend uses for methods without a path of their own.

    Yields False, and changes nothing, if methods that were loaded before use that cache.
    """
    core, xnnpack = _libraries()
    get_backend, get_cache = core[_BACKEND_OF_NAME], xnnpack[_CACHE_OF_PATH]
    set_path, release = xnnpack[_SET_PATH], xnnpack[_RELEASE]
    get_backend.argtypes, get_backend.restype = (ctypes.c_char_p,), ctypes.c_void_p
    get_cache.argtypes, get_cache.restype = (ctypes.c_void_p, ctypes.POINTER(_String)), _SharedCache
    set_path.argtypes, set_path.restype = (ctypes.c_void_p, ctypes.POINTER(_String)), None
    release.argtypes, release.restype = (ctypes.c_void_p,), None
    options = get_backend(BACKEND) + _POINTER  # they follow the pointer to the table of virtual functions
    shared = get_cache(options, ctypes.byref(_String(b"")))
    assert shared.has_value, "ExecuTorch has no cache of weights"
    is_new = ctypes.c_int.from_address(shared.control + _POINTER).value == 1  # this pointer is the only owner
    if is_new:
        set_path(shared.cache, ctypes.byref(_String(bytes(path))))
    else:
        verbose_note(f"{path} is not opened: these methods share the weights cache of methods that were loaded before")
    try:
        yield is_new
    finally:
        release(shared.control)


def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Return the libraries of ExecuTorch's core and of its XNNPACK backend. Raises ValueError for an unknown
    version."""
    import executorch

    folder, found = Path(executorch.__path__[0]) / "lib", version_of("executorch")
    try:
        core, xnnpack = (ctypes.CDLL(str(folder / name)) for name in LIBRARIES)
        known = [core[_BACKEND_OF_NAME], *(xnnpack[name] for name in (_CACHE_OF_PATH, _SET_PATH, _RELEASE))]
    except (OSError, AttributeError):
        known = []
    if not known or not found.startswith(VERSION) or sys.platform != "linux":
        raise ValueError(
            f"ExecuTorch {found} cannot keep packed weights in a file on {sys.platform}: leave --packed-weights out"
        )
    return core, xnnpack


def _unlock(path: Path) -> None:
    """Unlock the file, so that other processes can map it as well. The backend locks even a file that it only reads."""
    for link in Path("/proc/self/fd").iterdir():
        try:
            if link.readlink() == path:
                fcntl.flock(int(link.name), fcntl.LOCK_UN)
        except OSError:  # the descriptor was closed meanwhile
            continue


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
