"""Reads a kernel's registers, spills, loops and loads from its machine code. Needs no GPU.

NVIDIA's ``cuobjdump`` disassembles; it is in Triton's wheel and in every CUDA toolkit. The mnemonics are those of sm_80
to sm_120. LDG loads to registers. LDGSTS copies to shared memory asynchronously, LDGDEPBAR ends a group of such copies,
and DEPBAR waits until at most a given number of groups is pending. HMMA multiplies 16 x 8 x k on the tensor cores; four
warps together issue HGMMA, which multiplies 64 x n x 16. A fatbin may have several images; the one is read that a GPU
would run.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine_code.libraries import preferred

Capability = tuple[int, int] | None
TOOL = "cuobjdump"
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", re.MULTILINE)
REGISTERS, STACK = re.compile(r"REG:(\d+)"), re.compile(r"STACK:(\d+)")
SOURCE = "Fatbin ptx code:"
IMAGE = re.compile(r"^Fatbin (elf|ptx) code:\n=+\narch = (\w+)$", re.MULTILINE)
THREADS = re.compile(r"\.reqntid (\d+)")
TABLES = re.compile(r"\.local .*__local_depot\d+\[(\d+)\]")
SHARED = re.compile(r"^\s*\.shared .*\[(\d+)\]", re.MULTILINE)
RELOAD = re.compile(r"LDL(?:\.[A-Z]+)*(?:\.(\d+))?\S* R\w+, \[R1(?:\+0x([0-9a-f]+))?\]")
BRANCH = re.compile(r"BRA\b.*\b0x([0-9a-f]+)$")
WAIT = re.compile(r"DEPBAR\.LE SB0, 0x([0-9a-f]+)")
WIDTH = re.compile(r"\.[US]?(8|16|32|64|128|256)\b")
MATRIX = re.compile(r"[HI]MMA\.(16)(8)(8|16|32)\b|HGMMA\.(64)x(\d+)x(16)")
ALU = {
    *("BMSK", "F2FP", "FMNMX", "FSEL", "FSETP", "I2FP", "IABS", "IADD3", "IMNMX", "ISETP", "LEA", "LOP3", "P2R"),
    *("PLOP3", "PRMT", "R2P", "SEL", "SGXT", "SHF", "VIADD", "VIADDMNMX", "VIMNMX", "VOTE"),
}
"""The instructions of the pipe for integers, comparisons and bits, which is 16 lanes wide up to sm_90 ("Arithmetic
Instructions" of the CUDA C++ Programming Guide: 64 results a cycle and multiprocessor). They may be followed by a dot
and modifiers."""


@dataclass(frozen=True)
class Loop:
    """One iteration of a loop: ``multiply_adds`` per warp, bytes per thread. ``ahead`` is how many iterations before
    their use the copies to shared memory are issued. ``alu``: how many of the instructions are in ``ALU``.
    ``warp_group``: its products are HGMMA."""

    instructions: int
    multiply_adds: int
    load_bytes: int
    copy_bytes: int
    ahead: int
    alu: int
    warp_group: bool = False


@dataclass(frozen=True)
class Code:
    """A kernel; bytes are per thread.

    ``spill_bytes``: bytes reloaded from fixed places of the stack, which also holds small tables (of sine and cosine).
    ``load_bytes``: the bytes of every load instruction, each counted once. ``ptx``: the kernel's PTX, "" if there is
    none. ``alu``: how many of the instructions are in ``ALU``. ``warp_group``: its products are HGMMA.
    """

    registers: int
    spill_bytes: int
    instructions: int
    load_bytes: int
    loops: tuple[Loop, ...]
    ptx: str
    alu: int
    warp_group: bool = False


@dataclass(frozen=True)
class Usage:
    """The resources of a kernel's block: registers and spilled bytes per thread, the number of threads (0 if unknown),
    and the bytes of static shared memory. ``ptx`` has the kernel's PTX for each architecture."""

    registers: int
    spill_bytes: int
    threads: int
    shared_bytes: int
    ptx: tuple[str, ...]


def disassembler() -> Path:
    """Find ``cuobjdump``. Raises FileNotFoundError, which says what to install."""
    spec = importlib.util.find_spec("triton")
    folders = [Path(spec.origin).parent / "backends" / "nvidia"] if spec and spec.origin else []
    folders += [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders.append(Path("/usr/local/cuda"))
    found = next((folder / "bin" / TOOL for folder in folders if (folder / "bin" / TOOL).is_file()), shutil.which(TOOL))
    if found is None:
        raise FileNotFoundError(
            f"{TOOL}, which reads machine code, is neither in Triton's package nor in CUDA_HOME, PATH or "
            "/usr/local/cuda: type pip install 'eagle3-export[cuda]'"
        )
    return Path(found)


def read_codes(fatbins: Iterable[bytes], capability: Capability = None) -> dict[bytes, Code]:
    """Disassemble each fatbin's image for a GPU of this compute capability, or its first image. Raises the errors of
    ``read_codes_for``."""
    return {fatbin: codes[capability] for fatbin, codes in read_codes_for(fatbins, {capability}).items()}


def read_codes_for(fatbins: Iterable[bytes], capabilities: Iterable[Capability]) -> dict[bytes, dict[Capability, Code]]:
    """Disassemble each fatbin once, and return its image for GPUs of each compute capability; None stands for its first
    image. Raises FileNotFoundError without ``cuobjdump``, ValueError for a fatbin it refuses."""
    wanted = list(capabilities)

    def of_each(usage: str, sass: str, ptx: str) -> dict[Capability, Code]:
        return {capability: parse(usage, sass, ptx, capability) for capability in wanted}

    return _read_all(fatbins, ("-res-usage", "-sass", "-ptx"), of_each)


def read_usages(fatbins: Iterable[bytes]) -> dict[bytes, Usage]:
    """Read the resources of each fatbin's kernel without disassembling it. Raises the errors of ``read_codes``."""
    return _read_all(fatbins, ("-res-usage", "-ptx"), parse_usage)


def _read_all(fatbins: Iterable[bytes], forms: tuple[str, ...], parse: Callable[..., Any]) -> dict[bytes, Any]:
    tool, different = disassembler(), list(dict.fromkeys(fatbins))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda data: parse(*_printed(tool, Path(folder), data, forms)), different)
        return dict(zip(different, found, strict=True))


def _printed(tool: Path, folder: Path, fatbin: bytes, forms: tuple[str, ...]) -> list[str]:
    file = folder / f"{hashlib.sha256(fatbin).hexdigest()}.fatbin"
    file.write_bytes(fatbin)
    printed = [subprocess.run([tool, form, file], capture_output=True, text=True) for form in forms]
    if any(run.returncode for run in printed):
        reason = " ".join(" ".join(run.stderr for run in printed).split())
        raise ValueError(f"{tool} does not read a kernel ({reason[:200]})")
    return [run.stdout for run in printed]


def parse_usage(usage: str, ptx: str) -> Usage:
    """Parse what ``cuobjdump -res-usage`` and ``-ptx`` print for a fatbin. Local tables in the PTX are no spills."""
    sources = tuple(ptx.split(SOURCE)[1:])
    tables = max((int(found) for found in TABLES.findall(ptx)), default=0)
    return Usage(
        max((int(found) for found in REGISTERS.findall(usage)), default=0),
        max(0, *(int(found) - -(-tables // 8) * 8 for found in STACK.findall(usage)), 0),
        max((int(found) for found in THREADS.findall(ptx)), default=0),
        sum(int(found) for found in SHARED.findall(sources[0] if sources else "")),
        sources,
    )


def images(printed: str, form: str) -> dict[str, str]:
    """Split what ``cuobjdump`` prints for a fatbin into its images of a form, "elf" or "ptx", by architecture. What it
    prints for bare machine code is {"": printed}."""
    found = list(IMAGE.finditer(printed))
    if not found:
        return {"": printed}
    ends = [*(each.start() for each in found[1:]), len(printed)]
    return {each[2]: printed[each.end() : end] for each, end in zip(found, ends, strict=True) if each[1] == form}


def parse(usage: str, sass: str, ptx: str, capability: tuple[int, int] | None = None) -> Code:
    """Parse what ``cuobjdump -res-usage``, ``-sass`` and ``-ptx`` print for a fatbin: its image for a GPU of this
    compute capability, or its first one.

    Raises ValueError if there is no machine code.
    """
    codes = images(sass, "elf")
    if "" not in codes and codes:
        arch = preferred(list(codes), capability)
        usage, sass, ptx = images(usage, "elf")[arch], codes[arch], images(ptx, "ptx").get(arch, "")
    used, code = REGISTERS.search(usage), [(int(at, 16), text) for at, text in INSTRUCTION.findall(sass)]
    if used is None or not code:
        raise ValueError("a kernel has no machine code (PTX alone?): export it again for the GPU that it is to run on")
    ends: dict[int, int] = {}
    for at, text in code:
        branch = BRANCH.match(text)
        if branch and int(branch[1], 16) < at:
            ends[int(branch[1], 16)] = at
    loops = (_loop([text for at, text in code if start <= at <= end]) for start, end in sorted(ends.items()))
    texts = [text for _, text in code if text != "NOP"]  # NOPs only fill the last lines
    load_bytes = _bytes(texts, "LDG.", "LDGSTS.")
    spilled, warp_group = _spilled(texts), _has_warp_group(texts)
    return Code(int(used[1]), spilled, len(texts), load_bytes, tuple(loops), ptx, _alu(texts), warp_group)


def _spilled(texts: list[str]) -> int:
    places: set[int] = set()
    for found in filter(None, map(RELOAD.match, texts)):
        start = int(found[2] or "0", 16)
        places |= set(range(start, start + int(found[1] or 32) // 8))
    return len(places)


def _loop(body: list[str]) -> Loop:
    groups = sum(text.startswith("LDGDEPBAR") for text in body)
    waits = [int(match[1], 16) for text in body if (match := WAIT.match(text))]
    ahead = max(waits, default=0) // groups + 1 if groups else 0
    loaded, copied = _bytes(body, "LDG."), _bytes(body, "LDGSTS.")
    return Loop(len(body), sum(map(_multiply_adds, body)), loaded, copied, ahead, _alu(body), _has_warp_group(body))


def _has_warp_group(body: list[str]) -> bool:
    return any(text.startswith("HGMMA") for text in body)


def _alu(body: list[str]) -> int:
    return sum(re.split(r"[. ]", text, maxsplit=1)[0] in ALU for text in body)


def _bytes(body: list[str], *opcodes: str) -> int:
    """Return the bytes that a thread loads. A load without a width in its name has 32 bits."""
    loads = (text.split()[0] for text in body if text.startswith(opcodes))
    return sum(int(found[1]) // 8 if (found := WIDTH.search(load)) else 4 for load in loads)


def _multiply_adds(text: str) -> int:
    """Return the multiply-adds per warp of an instruction. Four warps share an HGMMA."""
    found = MATRIX.match(text)
    if not found:
        return 0
    m, n, k = (int(size) for size in found.groups() if size)
    return m * n * k // (4 if text.startswith("HG") else 1)
