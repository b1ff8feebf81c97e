"""Runs a CUDA artifact without a GPU.

The unchanged runner loads its libraries in PyTorch's container, with a strict stand-in for CUDA's driver
(``stand_in_driver.py``), and captures and replays graphs. Triton's interpreter runs each launch from the source of its
kernel (``stand_in_kernels.py``). This tests everything in an artifact except the machine code: the launched kernels
with their grids and arguments, the memory that they access, the memory that methods share, the waits of the host, and
the results of all kernels, Inductor's and this package's.

    echo '[{"prompt": [2, 318, 825], "max_new_tokens": 8}]' | python tests/gpu_stand_in/interpreted_artifact.py ARTIFACT
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # set before Triton and modules with kernels are imported

import ctypes
import gc
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).resolve().parents[1] / "helpers"))

import click
import torch
from cuda_artifact import sources_of
from proposed import proposed
from race_detector import Detector
from race_hooks import watching
from stand_in_driver import Device, StandIn
from stand_in_kernels import Kernels, interpreted
from stand_in_torch import cuda_build, load

from eagle3.runner.artifact.cuda_weights import WEIGHTS_FILE
from eagle3.runner.artifact.opening import load_artifact
from eagle3.runner.contract import MODEL_FILE, READ_STATE, WRITE_STATE
from eagle3.runner.hosts import torch_host
from eagle3.runner.hosts.session import TimedSession
from eagle3.runner.loop.cached_tokens import CachedTokens
from eagle3.runner.loop.generation import complete
from eagle3.runner.session_file import resume, save

STATE = READ_STATE, WRITE_STATE
ARTIFACT = "00" * 32
"""The sha256 that stands for the artifact in a dialogue's file."""
HUGE = 0x7E
"""A byte of a value that is finite and as large as it gets: 8e37 in bfloat16 and float32, 126 in int8."""
MODERATE = 0x3C
"""A byte of a value that a cache may hold: 0.011 in bfloat16 and float32, 60 in int8."""


class Machine:
    """The stand-in for a GPU in this process, with the kernels of an artifact."""

    def __init__(self, sources: Path):
        self.device = StandIn()
        self.cuda = load(self.device)
        self.kernels = Kernels(self.device, sorted(sources.glob("*.pickle")))
        self.placed: dict[str, torch.Tensor] = {}
        """Storage key to its bytes on the device, of the artifact that was opened last."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Return a context in which PyTorch has a device whose launches compute."""
        # The stand-in's symbols are already exported.
        host_symbols = patch.object(torch_host, "export_host_symbols", lambda device: None)
        with ExitStack() as stack:
            for each in (cuda_build(self.cuda), host_symbols, interpreted(self.kernels)):
                stack.enter_context(each)
            yield

    def open(self, artifact: Path, graphs: bool = True, unwritten: int = HUGE) -> torch_host.TorchSession:
        """Open an artifact as a command does on a machine with a GPU. Each byte of the caches has the value
        ``unwritten`` at first."""
        metadata = load_artifact(artifact / MODEL_FILE, checked=False).metadata
        place = torch_host.place_storages

        def placed(stored: Path, index: Any, needed: dict[str, Any], device: torch.device):
            self.placed = place(stored, index, needed, device)
            for key, weight in needed.items():
                address, size = self.placed[key].data_ptr(), self.placed[key].nbytes
                if size and self.placed[key].is_cuda:
                    self.device.label(address, weight.name)
                    if "cache" in weight.name:  # no method may read unwritten bytes, except with a weight of 0
                        ctypes.memset(self.device.shown(address, size), unwritten, size)
            return self.placed

        with patch.object(torch_host, "place_storages", placed):
            return torch_host.open_torch_session(artifact / MODEL_FILE, artifact / WEIGHTS_FILE, metadata, graphs)

    def left(self) -> dict[str, int]:
        """Count the unreleased resources: handles by kind. After a capture, "pool" is 1 if memory still comes from its
        pool, and "current stream" is 1 if its stream is still the current one."""
        self.placed = {}
        gc.collect()
        self.device.library.cudaDeviceSynchronize()
        stayed = torch.cuda.current_stream() != torch.cuda.default_stream()
        return self.device.counts() | {"pool": int(self.cuda.entered is not None), "current stream": int(stayed)}


def looked_at(session: torch_host.TorchSession) -> torch_host.TorchSession:
    """Return the session with a check of its outputs: unwritten memory would give NaN in floats and an invalid id."""
    call, vocabulary = session._call, session.metadata.vocab_size

    def look(name: str, *inputs: torch.Tensor) -> list[torch.Tensor]:
        ids, *others = call(name, *inputs)
        if name in STATE:
            return [ids, *others]
        rows = ids.tolist()[0]
        if not all(0 <= token < vocabulary for token in rows):
            raise RuntimeError(f"{name} gave the ids {rows} of {vocabulary}: the host read them before they were there")
        for place, output in enumerate(others, 1):
            if output.is_floating_point() and not torch.isfinite(output.cpu()).all():
                raise RuntimeError(f"output {place} of {name} is not finite: it read memory that nothing wrote")
        return [ids, *others]

    session._call = look
    return session


def counted(session: torch_host.TorchSession, kernels: Kernels) -> dict[str, dict[int, Counter[str]]]:
    """Return a dictionary that is filled while ``session`` is used: for each method and number of rows, the grids of
    the kernels that its first call launched."""
    launched, call = {}, session._call

    def count(name: str, *inputs: torch.Tensor) -> list[torch.Tensor]:
        before = kernels.launches.copy()
        results = list(call(name, *inputs))
        launched.setdefault(name, {}).setdefault(inputs[0].shape[-1], kernels.launches - before)
        return results

    session._call = count
    return launched


def generations(session: TimedSession, prompt: list[int], max_new_tokens: int) -> dict[str, Any]:
    """Generate by fused rounds, replayed like CUDA graphs, if the artifact has them, and by the three methods. Return
    the tokens and the proposals of both."""
    found = {}
    for name, fused in (("fused_rounds", True), ("three_methods", False))[not session.has_speculate :]:
        session.has_speculate = fused
        with proposed(session) as proposals:
            result = complete(session, prompt, max_new_tokens=max_new_tokens, stop_ids=[])
        found[name] = {"token_ids": result.token_ids, "stats": result.stats.counts()}
    return found | {"proposals": proposals}


def dialogue(machine: Machine, artifact: Path, turns: list[list[int]], max_new_tokens: int) -> dict[str, Any]:
    """Generate after each turn's tokens in one session, and from the second turn on also in a new session, which takes
    up the file that the first one wrote after the turn before."""
    kept, cached, text = looked_at(machine.open(artifact)), CachedTokens(), []
    found: dict[str, Any] = {"never stopped": [], "resumed": [], "reused": []}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "dialogue"
        for turn in turns:
            text = text + turn
            if file.exists():
                other, theirs = looked_at(machine.open(artifact)), CachedTokens()
                resume(file, other, theirs, ARTIFACT)
                taken = complete(other, text, max_new_tokens=max_new_tokens, stop_ids=[], cached=theirs)
                other.close()
                found["resumed"].append(taken.token_ids)
                found["reused"].append(taken.stats.reused_prompt_tokens)
            straight = complete(kept, text, max_new_tokens=max_new_tokens, stop_ids=[], cached=cached)
            save(file, kept, cached, ARTIFACT)
            found["never stopped"].append(straight.token_ids)
            text = text + straight.token_ids
    kept.close()
    return found


def main(artifact: Path) -> None:
    torch.set_num_threads(1)
    asked, machine = json.load(sys.stdin), Machine(sources_of(artifact))
    found, launched, session, counts = [], {}, None, {}
    with machine.running(), watching(Detector(("forward",))) as races:
        for each in asked:
            arch = each.pop("arch", "sm_90")
            machine.device.become(Device.of(arch))
            if "turns" in each:
                found.append(dialogue(machine, artifact, **each))
                continue
            session = looked_at(machine.open(artifact, each.pop("graphs", True)))
            counts = counted(session, machine.kernels)
            found.append(generations(session, **each))
            launched[arch] = counts | launched.get(arch, {})
            session.close()
        del session, counts
        left = machine.left()
    said = {"generations": found, "launched": launched, "races": races.report()}
    said |= {"journal": machine.device.journal(), "left": left}
    click.echo(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
