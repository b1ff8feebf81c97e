"""Reads the contents of a method's CUDA delegates as plain values: libraries, architectures, kernels, symbols, weights.

1. Delegates: their contents, from the weight tables (``cuda_weights.py``) and the libraries' bytes.
2. Libraries: ELF ``.so`` files built by AOTInductor. Kernel ``X`` lies between the symbols ``__X_start`` and
   ``__X_end``.
3. Fatbins: a kernel's code, once per architecture, as SASS (machine code) or PTX (compiled when it is loaded).
"""

import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from eagle3.runner.artifact.cuda_weights import CudaWeight, WeightTable
from eagle3.runner.artifact.elf import DAMAGED, Elf
from eagle3.runner.system.gpus import BY_ARCH

CUDA_BACKEND = "CudaBackend"
"""ExecuTorch's name of the backend."""

# --- 1. Delegates

# A kernel has the first kind whose pattern matches the start of its name. Inductor names its own kernels
# triton_<kind>_<operators>.
KERNEL_KINDS = {
    "small_m_sum": re.compile(r"(?!triton_).*small_m_sum"),
    "small_m": re.compile(r"(?!triton_).*small_m"),
    "large_m": re.compile(r"(?!triton_).*_matmul"),
    "template_matmul": re.compile(r"triton_(tem|b?mm|addmm)_"),
    "attention": re.compile(r"(?!triton_).*(attention|sdpa)"),
    "fused": re.compile(r"triton_"),
    "other": re.compile(r""),
}
SYMBOL_FAMILIES = {
    "aoti": re.compile(r"aoti_"),
    "cuda": re.compile(r"cu[A-Z]|cuda[A-Z]"),
    "other": re.compile(r""),
}


def cuda_details(name: str, tables: dict[str, list[WeightTable]], read: Callable[[str], bytes]) -> dict[str, Any]:
    """Return the contents of the CUDA delegates of method ``name``, for ``eagle3-inspect``.

    ``tables`` has the weight tables of every method; ``read`` returns the named data of a key. Each kernel is counted
    once, however often it is launched. Raises ValueError for a damaged library.
    """
    blobs = [read(table.library_key) for table in tables[name]]
    libraries = [read_library(blob) for blob in blobs]
    kernels = [(kernel, fatbin) for library in libraries for kernel, fatbin in library.kernels.items()]
    symbols = sorted({symbol for library in libraries for symbol in library.needs})
    return {
        "library": extent([len(blob) for blob in blobs]),
        "architectures": architectures(kernels),
        "serves": served(fatbin_entries(fatbin) for _, fatbin in kernels),
        "kernels": {kind: _kernels(members) for kind, members in _sorted_into(KERNEL_KINDS, kernels).items()},
        "symbols": {
            family: [symbol for (symbol,) in members]
            for family, members in _sorted_into(SYMBOL_FAMILIES, zip(symbols, strict=True)).items()
        },
        "weights": weights(_storages(tables[name])),
        "shared_weights": {
            other: _weights_extent(_shared(tables[name], theirs)) for other, theirs in tables.items() if other != name
        },
    }


def kind_of(name: str, kinds: dict[str, re.Pattern] = KERNEL_KINDS) -> str:
    """Return the first of ``kinds`` whose pattern matches ``name``."""
    return next(kind for kind, pattern in kinds.items() if pattern.match(name))


def _sorted_into(kinds: dict[str, re.Pattern], named: Iterable[tuple]) -> dict[str, list[tuple]]:
    """Group tuples by the kind of their first element, a name. Every kind has a list, which may be empty."""
    found: dict[str, list[tuple]] = {kind: [] for kind in kinds}
    for entry in named:
        found[kind_of(entry[0], kinds)].append(entry)
    return found


def _kernels(members: list[tuple[str, bytes]]) -> dict[str, Any]:
    return extent([len(fatbin) for _, fatbin in members]) | {"names": sorted(kernel for kernel, _ in members)}


def architectures(kernels: Iterable[tuple[str, bytes]]) -> dict[str, dict[str, int]]:
    """Return, for "sass" and for "ptx", how many kernels have code for each architecture."""
    found: dict[str, Counter] = {"sass": Counter(), "ptx": Counter()}
    for kernel, fatbin in kernels:
        try:
            for form, architecture in set(fatbin_entries(fatbin)):
                found[form][architecture] += 1
        except (ValueError, struct.error) as error:
            raise ValueError(f"kernel {kernel} is no fatbin ({error}): export it again") from error
    return {form: dict(sorted(counts.items())) for form, counts in found.items()}


def _storages(tables: list[WeightTable]) -> dict[str, CudaWeight]:
    return {key: weight for table in tables for key, weight in table.storages().items()}


def _shared(mine: list[WeightTable], theirs: list[WeightTable]) -> dict[str, CudaWeight]:
    """Return the storages that both lists of tables contain."""
    keys = _storages(theirs).keys()
    return {key: weight for key, weight in _storages(mine).items() if key in keys}


def weights(storages: dict[str, CudaWeight]) -> dict[str, Any]:
    """Count storages and their bytes, in all and by dtype. Caches are included. A storage has the dtype of a weight
    that lies in it."""
    by_dtype: dict[str, dict[str, CudaWeight]] = {}
    for key, weight in storages.items():
        by_dtype.setdefault(str(weight.dtype).removeprefix("torch."), {})[key] = weight
    extents = {dtype: _weights_extent(members) for dtype, members in sorted(by_dtype.items())}
    return _weights_extent(storages) | {"by_dtype": extents}


def _weights_extent(storages: dict[str, CudaWeight]) -> dict[str, int]:
    return extent([weight.storage_bytes for weight in storages.values()])


def extent(sizes: list[int]) -> dict[str, int]:
    """Return the number of parts and the sum of their bytes."""
    return {"count": len(sizes), "bytes": sum(sizes)}


# --- 2. Libraries


@dataclass(frozen=True)
class Library:
    """A method's library. ``kernels``: fatbins by name. ``needs``: symbols that the host must define, without those of
    system libraries. ``asks_for``: the libraries that it lists as needed (``DT_NEEDED``). ``machine``: the processor of
    its host, such as "x86_64".
    """

    kernels: dict[str, bytes]
    needs: list[str]
    asks_for: tuple[str, ...] = ()
    machine: str = ""


def read_library(data: bytes) -> Library:
    """Read a 64-bit ELF shared library. Raises ValueError for a damaged file or any other kind."""
    elf = Elf(data)
    try:
        symbols, asks_for = elf.symbols, tuple(elf.asks_for)
    except DAMAGED as error:
        raise ValueError(f"library is damaged (its symbols do not parse: {error}): export it again") from error
    places = {symbol.name: symbol.place for symbol in symbols if symbol.place is not None}
    ends = {name: f"{name.removesuffix('_start')}_end" for name in places if re.fullmatch("__.+_start", name)}
    kernels = {name[2:-6]: data[places[name] : places[end]] for name, end in ends.items() if end in places}
    return Library(kernels, [symbol.name for symbol in symbols if symbol.is_needed()], asks_for, elf.machine)


# --- 3. Fatbins

FATBIN_MAGIC = 0xBA55ED50
FATBIN_FORMS = {1: "ptx", 2: "sass"}
# These bits are not publicly documented. nvcc 13.0 sets them, and cuobjdump shows them as sm_90a and sm_100f.
FATBIN_VARIANTS = {0x100000: "a", 0x200000: "f"}


def fatbin_entries(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield (form, architecture) of each image, such as ("sass", "sm_90a"). Raises ValueError or struct.error if the
    fatbin is damaged."""
    magic, _, header, size = struct.unpack_from("<IHHQ", data)
    if magic != FATBIN_MAGIC:
        raise ValueError(f"begins with {magic:#x}, not {FATBIN_MAGIC:#x}")
    at, end = header, header + size
    if end > len(data):
        raise ValueError(f"takes {end} bytes, has {len(data)}")
    while at < end:
        kind, _, entry_header, payload = struct.unpack_from("<HHIQ", data, at)
        (architecture,), (flags,) = struct.unpack_from("<I", data, at + 28), struct.unpack_from("<Q", data, at + 40)
        if kind in FATBIN_FORMS:
            variant = "".join(letter for bit, letter in FATBIN_VARIANTS.items() if flags & bit)
            yield FATBIN_FORMS[kind], f"sm_{architecture}{variant}"
        at += entry_header + payload
        if not entry_header or at > end:
            raise ValueError(f"an image ends at byte {at} of {end}")


def images_of(what: str, code: bytes, arch: str | None) -> list[tuple[str, str]]:
    """Return (form, architecture) of each image of a kernel.

    ``what`` names the kernel in errors. ``arch`` is the architecture of a kernel that is bare machine code. Raises
    ValueError if ``code`` is neither a fatbin nor such code.
    """
    if code.startswith(b"\x7fELF") and arch:
        return [("sass", arch)]
    try:
        return list(fatbin_entries(code))
    except (ValueError, struct.error) as error:
        raise ValueError(f"{what} is no fatbin ({error}): export it again") from error


TEGRA = 8, 7
"""The compute capability of Jetson Orin, whose major version desktop GPUs have too."""


def runs_on(form: str, arch: str, capability: tuple[int, int]) -> bool:
    """Return True if a GPU of this compute capability runs code of this form and architecture.

    SASS runs on GPUs of the same major version and the same or a later minor version, but SASS for ``TEGRA``, and any
    on it, on its own version alone (NVIDIA's CUDA C++ Programming Guide, "Binary Compatibility"). PTX runs on every
    later GPU. ``sm_90a`` runs on that architecture alone, ``sm_100f`` on its family.
    """
    found = re.fullmatch(r"sm_(\d+)([af]?)", arch)
    if found is None:
        raise ValueError(f"{arch!r} is no architecture such as sm_90")
    number, variant = found.groups()
    made_for = int(number[:-1]), int(number[-1])
    if variant == "a" or form == "sass" and TEGRA in (made_for, capability):
        return made_for == capability
    return made_for <= capability and (form == "ptx" and not variant or made_for[0] == capability[0])


def served(kernels: Iterable[Iterable[tuple[str, str]]]) -> list[str]:
    """Return the known architectures whose GPUs run every kernel. ``kernels``: (form, architecture) of the images of
    each."""
    distinct = {frozenset(images) for images in kernels}
    return [
        arch
        for arch, gpu in BY_ARCH.items()
        if all(any(runs_on(*image, gpu.capability) for image in images) for images in distinct)
    ]
