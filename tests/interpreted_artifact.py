"""Runs a CUDA artifact where there is no GPU: its own compiled libraries, in PyTorch's container, over a stand-in for
CUDA's driver, with memory on the host; each launch by Triton's interpreter, from the source of its kernel.

What this sees of an artifact is all but the machine code: which kernels a method launches over which grids, what each
is given, which memory is used again, what methods share, and whether the kernels, as Inductor wrote them and as ours
are specialized, compute what they should.

    echo '[{"prompt": [2, 318, 825], "max_new_tokens": 8}]' | python tests/interpreted_artifact.py ARTIFACT
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, and what has kernels

import ctypes
import hashlib
import json
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import numpy as np
import torch
import triton
import triton.language as tl
from cuda_artifact import sources_of
from order_of_calls import OrderOfCalls
from torch._inductor.runtime import hints, triton_helpers
from triton.runtime.interpreter import InterpretedFunction, TensorHandle
from triton_interpreter import LIBDEVICE, bfloat16_done_right

from eagle3.runner.artifact import load_artifact
from eagle3.runner.contract import MODEL_FILE
from eagle3.runner.hosts import torch_host
from eagle3.runner.inspect.cuda_weights import WEIGHTS_FILE
from eagle3.runner.loop import complete
from eagle3.runner.session import Session

DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "i1": torch.bool, "i8": torch.int8,
    "u8": torch.uint8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
}  # fmt: skip
NUMBERS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
CPU = torch.device("cpu")


class Kernel:
    """A kernel by its source, as ``cuda_artifact.py`` kept it."""

    def __init__(self, file: Path):
        kept = pickle.loads(file.read_bytes())
        self.sha256, self.file = file.stem, file.with_suffix(".py")
        self.name, self.size, self.source = kept["name"], kept["size"], kept["source"]
        self.signature: dict[str, str] = kept["signature"]
        self.constants: dict[str, Any] = kept["constants"]

    def is_in(self, image: int) -> bool:
        return hashlib.sha256(ctypes.string_at(image, self.size)).hexdigest() == self.sha256

    @cached_property
    def function(self) -> InterpretedFunction:
        """Inductor's decorators and imports are for its own launches."""
        needed = {"triton_helpers": triton_helpers, "libdevice": LIBDEVICE, "tl_math": tl.math, **vars(hints)}
        given = {"triton": triton, "tl": tl, "triton_heuristics": Undecorated(), "__name__": self.name, **needed}
        drop = ("from torch", "import torch", "triton_helpers.set_driver_to_gpu")
        lines = ("" if line.startswith(drop) else line for line in self.source.splitlines())
        self.file.write_text("\n".join(lines))  # the interpreter asks Python for a function's lines
        exec(compile(self.file.read_text(), str(self.file), "exec"), given)
        return given[self.name]

    def launch(self, grid: tuple[int, int, int], arguments: Any) -> None:
        """``arguments``: addresses of the values of all but the constants, in the order of the signature."""
        given, places = {}, iter(range(len(self.signature)))
        for name, kind in self.signature.items():
            if kind == "constexpr":
                if name in self.constants:
                    given[name] = self.constants[name]
            elif kind.startswith("*"):
                address = ctypes.c_uint64.from_address(arguments[next(places)]).value
                given[name] = at_address(address, DTYPES[kind[1:]])
            else:
                given[name] = NUMBERS[kind].from_address(arguments[next(places)]).value
        self.function[grid](**given)


class Undecorated:
    def __getattr__(self, name: str):
        return lambda *args, **kwargs: lambda kernel: kernel


def at_address(address: int, dtype: torch.dtype) -> torch.Tensor:
    """One element, which is all that the interpreter needs to know where a tensor begins."""
    return torch.frombuffer((ctypes.c_char * dtype.itemsize).from_address(address), dtype=dtype)


class Driver:
    """What the stand-in hands to Python. ``launches``: over each grid so far."""

    def __init__(self, sources: Path):
        self.kernels = [Kernel(file) for file in sorted(sources.glob("*.pickle"))]
        self.launches: Counter[str] = Counter()
        asked, launched = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
        self._callbacks = (
            ctypes.CFUNCTYPE(ctypes.c_int64, asked, ctypes.c_char_p)(self._asked),
            ctypes.CFUNCTYPE(None, ctypes.c_int64, *[ctypes.c_uint] * 3, launched)(self._launched),
        )
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "stand_in_driver.so"
            source = Path(__file__).with_name("stand_in_driver.cpp")
            subprocess.run(["g++", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
            self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # before PyTorch's are
        self._library.stand_in(*self._callbacks)

    def _asked(self, image: int, name: bytes) -> int:
        with stopping():
            named = (number for number, kernel in enumerate(self.kernels) if kernel.name == name.decode())
            return next(number for number in named if self.kernels[number].is_in(image))

    def _launched(self, number: int, x: int, y: int, z: int, arguments: Any) -> None:
        with stopping():
            self.kernels[number].launch((x, y, z), arguments)
            self.launches[str([x, y, z])] += 1


@contextmanager
def stopping() -> Iterator[None]:
    """A callback cannot raise: the code that called it would go on."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _max_with_index(value, index, dim):
    """Inductor's own is a loop over the elements."""
    data = value.handle.data
    first = np.argmax(data, axis=dim, keepdims=True)  # a NaN is the most, as there
    return tuple(
        _tensor(np.take_along_axis(each.handle.data, first, dim).squeeze(dim), each) for each in (value, index)
    )


def _tensor(data: np.ndarray, like: tl.tensor) -> tl.tensor:
    dtype = like.dtype.scalar
    return tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)) if data.ndim else dtype)


@contextmanager
def interpreted() -> Iterator[None]:
    fast = patch.object(triton_helpers, "max_with_index", _max_with_index)
    with bfloat16_done_right(), fast, np.errstate(invalid="ignore"):  # in rows behind the last, that are not stored
        yield


def open_interpreted(artifact: Path) -> torch_host.TorchSession:
    """As any artifact for the CPU, which nothing is asked of."""
    metadata = load_artifact(artifact / MODEL_FILE, checked=False).metadata
    with patch.object(torch_host, "made_for_cpu", lambda methods: True):
        return torch_host.open_torch_session(artifact / MODEL_FILE, artifact / WEIGHTS_FILE, metadata)


def counted(session: torch_host.TorchSession, driver: Driver) -> dict[str, dict[int, Counter[str]]]:
    """Filled while ``session`` is used: of each method, by its number of rows, over which grids its first call launched
    kernels."""
    launched, call = {}, session._call

    def count(name: str, *inputs: torch.Tensor) -> list[torch.Tensor]:
        before = driver.launches.copy()
        results = list(call(name, *inputs))
        launched.setdefault(name, {}).setdefault(inputs[0].shape[1], driver.launches - before)
        return results

    session._call = count
    return launched


def generations(session: Session, prompt: list[int], max_new_tokens: int) -> dict[str, Any]:
    """By whole rounds, replayed as graphs would be; and by the three methods."""
    found = {}
    for way, whole in (("whole_rounds", True), ("three_methods", False)):
        session.has_speculate = whole
        result = complete(session, prompt, max_new_tokens=max_new_tokens, stop_ids=[])
        found[way] = {"token_ids": result.token_ids, "stats": result.stats.counts()}
    return found


def main(artifact: Path) -> None:
    torch.set_num_threads(1)
    asked, driver = json.load(sys.stdin), Driver(sources_of(artifact))
    session = open_interpreted(artifact)
    launched = counted(session, driver)
    session.replay_graphs(lambda *given: OrderOfCalls().capture(*given))
    with interpreted():
        found = [generations(session, **each) for each in asked]
    click.echo(json.dumps({"generations": found, "launched": launched}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
