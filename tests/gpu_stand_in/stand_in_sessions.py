"""Runs sessions of a CUDA artifact on the stand-in, and reports handles that they do not release and the effects of
failing calls.

Launches are checked and compute nothing, so that a round takes milliseconds.

    python tests/gpu_stand_in/stand_in_sessions.py ARTIFACT [MOST]      JSON; MOST: failures of each call, default 12
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import ctypes
import gc
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import torch
from cuda_artifact import sources_of
from interpreted_artifact import Machine

from eagle3.runner.artifact.cuda_weights import WEIGHTS_FILE, read_ptd_index
from eagle3.runner.artifact.opening import load_artifact
from eagle3.runner.artifact.pte import read_pte
from eagle3.runner.contract import DRAFT_DECODE, MODEL_FILE, SPECULATE, row_bounds
from eagle3.runner.hosts import torch_host
from eagle3.runner.hosts.cuda_graph import Graphed, capture
from eagle3.runner.loop.state import read_pieces, write_pieces

CALLS = (
    "allocate", "cudaSetDevice", "cudaMemcpyAsync", "cudaDeviceSynchronize", "cudaStreamCreate",
    "cudaStreamSynchronize", "cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaEventCreate", "cudaEventDestroy",
    "cudaEventRecord", "cudaEventQuery", "cudaEventSynchronize", "cudaGraphInstantiate", "cudaGraphLaunch",
    "cudaGraphDestroy", "cudaGraphExecDestroy", "cuModuleLoadData", "cuModuleGetFunction", "cuModuleUnload",
    "cuFuncSetAttribute", "cuLaunchKernel",
)  # fmt: skip
GIVES_BACK = ("cudaFree", "Destroy", "Unload")
UNKNOWN = 999


class Sessions:
    def __init__(self, artifact: Path):
        self.artifact, self.machine = artifact, Machine(sources_of(artifact))
        self.machine.kernels.computes = False
        self.metadata = load_artifact(artifact / MODEL_FILE, checked=False).metadata
        self.methods = {method.name: method for method in torch_host.read_methods(read_pte(artifact / MODEL_FILE))}
        self.index = read_ptd_index(artifact / WEIGHTS_FILE)

    def round(self, session: torch_host.TorchSession) -> Any:
        window = self.metadata.chain_len + 1
        return session._call(SPECULATE, torch.ones(1, window, dtype=torch.long), session.positions[:window])

    def rounds(self, count: int, graphs: bool, kept: list | None = None) -> dict[str, Any]:
        """Return the resources that ``count`` rounds fail to release in addition to those of a few rounds. ``kept`` is
        a fault that keeps a round's outputs."""
        session = self.machine.open(self.artifact, graphs)
        for _ in range(4):
            self.round(session)
        launches = self.machine.device.calls("cudaGraphLaunch")
        before = self.machine.left() | {"bytes": self.bytes()}
        for _ in range(count):
            made = self.round(session)
            if kept is not None:
                kept.append(made)
        del made
        after = self.machine.left() | {"bytes": self.bytes()}
        replayed = self.machine.device.calls("cudaGraphLaunch") - launches
        session.close()
        return {"more": difference(before, after), "replayed": replayed}

    def carried(self, slots: int) -> list[str]:
        """Carry the state of a text of ``slots`` tokens from a session whose caches hold random bytes to another one.
        Return the caches whose bytes then differ, in the slots that the text fills."""
        with patch.object(self.machine.kernels, "computes", True):
            first = self.machine.open(self.artifact, graphs=False)
            caches = self.caches()
            for at, (address, size, _) in enumerate(caches.values()):
                ctypes.memmove(self.machine.device.shown(address, size), finite_bytes(size, at), size)
            given = {name: self.filled(cache, slots) for name, cache in caches.items()}
            left = iter([piece.clone() for piece in read_pieces(first, slots)])
            first.close()
            other = self.machine.open(self.artifact, graphs=False)
            before = {name: self.filled(cache, slots) for name, cache in self.caches().items()}
            write_pieces(other, slots, lambda piece: piece.copy_(next(left)))
            found = {name: self.filled(cache, slots) for name, cache in self.caches().items()}
            other.close()
        assert next(left, None) is None and not any(torch.equal(given[name], before[name]) for name in given)
        return [name for name, value in found.items() if not torch.equal(value, given[name])]

    def caches(self) -> dict[str, tuple[int, int, tuple[int, ...]]]:
        """Map each cache of the artifact opened last to its address, bytes and shape [1, heads, slots, head_dim]."""
        weights = torch_host.storages(self.methods.values()).values()
        placed = {weight.name: self.machine.placed[weight.storage_key] for weight in weights if "cache" in weight.name}
        shapes = {weight.name: tuple(weight.shape) for weight in weights}
        return {name: (tensor.data_ptr(), tensor.nbytes, shapes[name]) for name, tensor in placed.items()}

    def filled(self, cache: tuple[int, int, tuple[int, ...]], slots: int) -> torch.Tensor:
        """Return the bytes of the first ``slots`` slots of a cache, uint8 [heads, slots, bytes]."""
        address, size, (_, heads, rows, _) = cache
        whole = torch.frombuffer(self.machine.device.shown(address, size), dtype=torch.uint8)
        return whole.view(heads, rows, -1)[:, :slots].clone()

    def bytes(self) -> int:
        return self.machine.device.library.stand_in_count(b"bytes")

    # --- One small method, from its load to its end

    def draft(self) -> None:
        """Load the method ``draft_decode``, call it without a graph, warm up, capture, replay, and close."""
        method = self.methods[DRAFT_DECODE]
        device = torch.device("cuda", 0)
        placed = torch_host.place_storages(
            self.artifact / WEIGHTS_FILE, self.index, torch_host.storages([method]), device
        )
        free = lambda: torch_host.free(placed.values())  # noqa: E731
        try:
            loaded = torch_host.load_method(method, placed, device)
            rows = row_bounds(self.metadata)
            session = torch_host.TorchSession({DRAFT_DECODE: loaded}, rows, device, self.metadata, free)
        except BaseException:
            free()
            raise
        width = self.feature_width()
        session._graphs[DRAFT_DECODE, 1] = Graphed(DRAFT_DECODE, loaded, loaded.capturable, {}, capture)
        try:
            for rows in (2, 2, 1, 1, 1, 1, 1):
                feature = torch.zeros(1, rows, width, dtype=torch.bfloat16)
                session._call(DRAFT_DECODE, torch.ones(1, rows, dtype=torch.long), feature, session.positions[:rows])
        finally:
            session.close()

    def feature_width(self) -> int:
        """The draft's hidden size, from the weight of a norm."""
        weights = self.methods[DRAFT_DECODE].table.weights
        return next(weight.shape[0] for weight in weights if weight.name.endswith("input_layernorm.weight"))

    def failures(self, most: int) -> dict[str, Any]:
        """Make each call of the driver fail in turn. Returns the number of trials and the faults found, by call."""
        device, found = self.machine.device, {}
        before = {name: device.calls(name) for name in CALLS}
        self.draft()
        made = {name: device.calls(name) - before[name] for name in CALLS}
        for name, count in made.items():
            places = sorted({1 + at * count // min(count, most) for at in range(min(count, most))})
            found[name] = {"tried": len(places), "wrong": []}
            for place in places:
                if wrong := self.failure(name, place):
                    found[name]["wrong"].append(f"call {place} of {count}: {wrong}")
        return found

    def failure(self, name: str, place: int) -> str:
        """Make one call fail, and return the fault: no error was raised, or a handle was not released. Returns "" if
        there is none."""
        device, said, before = self.machine.device, "", self.machine.left()
        with stderr() as read:
            device.fail(name, place, UNKNOWN)
            try:
                self.draft()
            except (RuntimeError, ValueError) as error:
                said = str(error)
            device.fail()
            left = self.machine.left()
            said += read()
        device.recover()
        self.machine.cuda.library.stand_in_set_stream(None)
        self.machine.cuda.entered = None
        more = difference(before, left)
        if name.startswith("cudaEvent"):
            more.pop("block", None)  # PyTorch's container keeps the inputs, or outputs, of a run whose event is refused
        if any(part in name for part in GIVES_BACK):  # a handle that the driver refuses to free stays
            more = {} if sum(more.values()) <= 1 + more.get("function", 0) else more
        if "made to fail" not in said and "failed" not in said:
            return f"nothing was said of it ({said[:300]})"
        return f"it left {more} ({said[:300]})" if more else ""


@contextmanager
def stderr() -> Iterator[Callable[[], str]]:
    """Yield a function that returns the text written to stderr within this context, also by libraries."""
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)

        def read() -> str:
            file.seek(0)
            return file.read().decode(errors="replace")

        try:
            yield read
        finally:
            os.dup2(before, 2)
            os.close(before)


def finite_bytes(size: int, seed: int) -> bytes:
    """Return random bytes that are numbers from 0 to 1 in bfloat16."""
    return (
        torch.randint(64, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)).numpy().tobytes()
    )


def difference(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {kind: after[kind] - before[kind] for kind in before if after[kind] != before[kind]}


# --- Faults, put in by hand


def loads(sessions: Sessions, count: int) -> dict[str, int]:
    """Return the handles that remain after five sessions and ``count`` loads of one method."""
    for _ in range(5):
        session = sessions.machine.open(sessions.artifact)
        sessions.round(session)
        session.close()
        del session
    for _ in range(count):
        sessions.draft()
    return sessions.machine.left()


def main(artifact: Path, most: int) -> None:
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING)
    sessions = Sessions(artifact)
    gc.collect()
    gc.freeze()  # makes later collections quick
    with sessions.machine.running():
        found: dict[str, Any] = {"clean": sessions.machine.left()}
        found["carried"] = sessions.carried(300)
        found["checked"] = sessions.rounds(50, graphs=True)
        found["keeps"] = sessions.rounds(10, graphs=False, kept=[])
        gc.collect()
        sessions.machine.device.start()  # later launches end after the driver's checks
        found["graphs"] = sessions.rounds(300, graphs=True)
        found["without"] = sessions.rounds(100, graphs=False)
        found["loads"] = loads(sessions, 20)
        found["failures"] = sessions.failures(most)
    click.echo(json.dumps(found | {"journal": sessions.machine.device.journal()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 12)
