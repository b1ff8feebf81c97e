"""Puts faults into gemma4-tiny's CUDA artifact, its kernels and the runner, one at a time, and prints what is said.

python tests/gpu_stand_in/stand_in_artifact_faults.py ARTIFACT        JSON: maps each fault to the error expected and
                                                                      the one raised
python tests/gpu_stand_in/stand_in_artifact_faults.py ARTIFACT early  the same for faults of launches that begin early
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import json
import platform
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import torch
from interpreted_artifact import looked_at
from machine_code.libraries import without_images
from stand_in_driver import A100, H100, Device
from stand_in_kernels import FEW_ROWS, Kernel
from stand_in_sessions import Sessions, stderr

from eagle3.runner.artifact.cuda_library import read_library
from eagle3.runner.artifact.gpu_needs import recorded_launches
from eagle3.runner.artifact.pte import Pte
from eagle3.runner.contract import DRAFT_DECODE, MODEL_FILE, PREFILL, TARGET_VERIFY
from eagle3.runner.hosts import torch_host, torch_host_checks
from eagle3.runner.hosts.torch_host import TorchSession

Fault = Callable[[Sessions], object]
Cards = list[list[dict[str, Any]]]
"""The launches by GPU of each kernel that has some, as ``export.json`` has them."""


def opened(sessions: Sessions, **options) -> TorchSession:
    return looked_at(sessions.machine.open(sessions.artifact, **options))


def draft(sessions: Sessions, session: TorchSession | None = None) -> None:
    """Run a draft step of one row at position 0."""
    session = session or opened(sessions, graphs=False)
    feature = torch.ones(1, 1, sessions.feature_width(), dtype=torch.bfloat16)
    session._call(DRAFT_DECODE, torch.ones(1, 1, dtype=torch.long), feature, session.positions[:1])


def verify(sessions: Sessions) -> None:
    """Verify a window of two rows from position 0 on."""
    session = opened(sessions, graphs=False)
    session._call(TARGET_VERIFY, torch.ones(1, 2, dtype=torch.long), session.positions[:2])


def written(kernel: str, before: str, after: str, call: Fault = draft) -> Fault:
    """Return a call that computes, with another text in the kernels whose name contains ``kernel``."""

    def run(sessions: Sessions) -> None:
        known = sessions.machine.kernels.kernels
        found = [each for each in known if kernel in each.name and before in each.source]
        assert found, f"no kernel {kernel} has {before}"
        with ExitStack() as stack:
            for each in found:
                each.__dict__.pop("function", None)
                stack.callback(each.__dict__.pop, "function", None)
                stack.enter_context(patch.object(each, "source", each.source.replace(before, after)))
            stack.enter_context(patch.object(sessions.machine.kernels, "computes", True))
            call(sessions)

    return run


def constant_on_the_host(sessions: Sessions) -> None:
    place = torch_host._place

    def on_host(mapped, extent, weight, device):
        placed = place(mapped, extent, weight, device)
        return placed.cpu() if "lm_head" in weight.name or "norm" in weight.name else placed

    with patch.object(torch_host, "_place", on_host):
        opened(sessions)


def inputs_of_a_graph_freed(sessions: Sessions) -> None:
    session = sessions.machine.open(sessions.artifact)
    for _ in range(4):
        sessions.round(session)
    (graphed,) = session._graphs.values()
    graphed._inputs[0].untyped_storage().resize_(0)
    graphed._graph.replay()
    torch.cuda.synchronize()


def ids_read_before_they_are_there(sessions: Sessions) -> None:
    written_late = []  # the copies must not write into memory that Python has freed

    def early(self: torch.Tensor) -> torch.Tensor:
        if not self.is_cuda:
            return self
        written_late.append(torch.empty(self.shape, dtype=self.dtype))
        return written_late[-1].copy_(self, non_blocking=True).clone()

    with patch.object(torch.Tensor, "cpu", early):
        try:
            draft(sessions)
        finally:
            torch.cuda.synchronize()


def storages_freed_before_the_methods(sessions: Sessions) -> None:
    session = opened(sessions, graphs=False)
    draft_only = session._methods[DRAFT_DECODE]
    session.close()
    session._methods[DRAFT_DECODE] = draft_only
    draft(sessions, session)


def on(device: Device, call: Fault = draft, checked: bool = False) -> Fault:
    """Return a call on another device, whose architecture the runner does not check."""

    def run(sessions: Sessions) -> None:
        sessions.machine.device.become(device)
        unchecked = patch.object(torch_host_checks, "check_architectures", lambda *given: None)
        with ExitStack() as stack:
            if not checked:
                stack.enter_context(unchecked)
            call(sessions)

    return run


# --- Launches by GPU


def prefill(sessions: Sessions) -> None:
    """Prefill 16 rows from position 0 on, by kernels of many rows, whose shared memory differs by GPU."""
    session = sessions.machine.open(sessions.artifact, graphs=False)
    session._call(PREFILL, torch.ones(1, 16, dtype=torch.long), session.positions[:16])


def with_libraries(change: Callable[[bytes, Cards], bytes], call: Fault) -> Fault:
    """Return a call with changed libraries. ``change`` gets a library and the launches by GPU of its kernels."""
    read = torch_host.read_methods

    def run(sessions: Sessions) -> None:
        recorded = recorded_launches(sessions.artifact / MODEL_FILE)

        def changed(pte: Pte) -> Iterator[torch_host.HostMethod]:
            for method in read(pte):
                cards = [entry["cards"] for entry in recorded[method.name] if "cards" in entry]
                library = change(method.library, cards)
                yield replace(method, library=library, parsed=read_library(library))

        with patch.object(torch_host, "read_methods", lambda pte: list(changed(pte))):
            call(sessions)

    return run


def table(cards: list[dict[str, Any]]) -> bytes:
    """Return a kernel's launches by GPU as they are in a library (``card_launches``)."""
    taken = ("shared_bytes", "parts", "whole")
    fields = ((card["first"], card["threads"] // 32, *(card[name] for name in taken)) for card in cards)
    return b"".join(struct.pack("<iIIII", *each) for each in fields)


def of_another_card(field: str, pick: Callable[..., int]) -> Callable[[bytes, Cards], bytes]:
    """Return a change that gives every GPU the ``field`` of the one that ``pick`` chooses."""

    def change(library: bytes, kernels: Cards) -> bytes:
        for cards in kernels:
            served = [card for card in cards if card["threads"]]
            one = {field: pick(card[field] for card in served)}  # kernels with equal launches are changed at once
            library = library.replace(table(cards), table([card | one if card in served else card for card in cards]))
        return library

    return change


def without_first_images(library: bytes, _cards: Cards) -> bytes:
    fatbin = next(iter(read_library(library).kernels.values()))
    return library.replace(fatbin, without_images(fatbin, A100.arch))


OLDER = A100._replace(arch=75)
"""A GPU that no image is for, with room for the blocks of all."""
NARROW = Device.of("sm_120")._replace(most_shared=90 << 10)
"""A GPU with room for its own blocks, but not for those of another card."""
PARAMETER = b"\x04\x17\x0c\x00"
"""The attribute of machine code that gives a parameter: its index, place, and size."""


def one_image_with_other_parameters(library: bytes, _cards: Cards) -> bytes:
    """Return a library in which the last image of each kernel has a parameter of one byte."""
    for fatbin in read_library(library).kernels.values():
        at = fatbin.index(PARAMETER, fatbin.rindex(b"\x7fELF")) + len(PARAMETER) + 8
        library = library.replace(fatbin, fatbin[:at] + struct.pack("<I", 1 << 18) + fatbin[at + 4 :])
    return library


def grid_of_fewer_multiprocessors(sessions: Sessions) -> None:
    """Run a draft step in which every matmul has half of its programs."""
    run = Kernel.__call__

    def smaller(self: Kernel, grid: tuple[int, int, int], values: dict[str, int | float], arch: int) -> None:
        most = grid.index(max(grid))
        fewer = tuple(size // 2 if axis == most else size for axis, size in enumerate(grid))
        run(self, fewer if FEW_ROWS in self.name else grid, values, arch)

    with patch.object(Kernel, "__call__", smaller), patch.object(sessions.machine.kernels, "computes", True):
        draft(sessions)


def for_another_host(library: bytes, _cards: Cards) -> bytes:
    machine = 183 if platform.machine() == "x86_64" else 62
    return library[:18] + struct.pack("<H", machine) + library[20:]


FAULTS: dict[str, tuple[str, Fault]] = {
    "right": ("", written("attention", "<= last", "<= last")),
    "stale slot attended to": (
        "output 1 of draft_decode is not finite: it read memory that nothing wrote",
        written("attention", "<= last[:, None])", "<= last[:, None] + 1)"),
    ),
    "counter not set back": (
        "small_m_kernel: the counters in argument ARRIVED are not zero after the launch",
        written("small_m", "tl.store(counter, 0", "tl.store(counter, 1"),
    ),
    "row beyond the last is read": (
        "_attention_kernel: reads 8 bytes .*byte 8 of argument FIRST, byte 8 of 8",
        written("attention", "row = tl.minimum(packed // GROUPS, rows - 1)", "row = packed"),
    ),
    "constant on the host": (
        "constant '.*norm.*' is on device type 0 but expected device type 1", constant_on_the_host,
    ),
    "inputs of a graph freed": ("argument in_ptr0 is 0x.*: byte 0 of 32, which is free", inputs_of_a_graph_freed),
    "ids read before they are there": (
        r"ids \[-1\] of 2048: the host read them before they were there", ids_read_before_they_are_there,
    ),
    "storages freed before the methods": (
        "illegal memory access .*argument .* is 0x0", storages_freed_before_the_methods,
    ),
    "artifact of another architecture": (
        "the GPU is sm_75, kernel .* is made for .*SASS sm_80.* serves sm_80", on(OLDER, opened, checked=True),
    ),
    "module of another architecture": ("no kernel image is available .*the device is sm_75", on(OLDER)),
    "right on an A100": ("", on(A100, prefill, checked=True)),
    "right on a GPU with less shared memory": ("", on(NARROW, prefill, checked=True)),
    "an image missing": (
        "the GPU is sm_80, kernel .* is made for .*SASS sm_90",
        on(A100, with_libraries(without_first_images, opened), checked=True),
    ),
    "two images with other parameters": (
        r"has other parameters in its code for sm_\d+ than", with_libraries(one_image_with_other_parameters, draft),
    ),
    "shared memory of another card": (
        "wants .* bytes of shared memory, the device has",
        on(NARROW, with_libraries(of_another_card("shared_bytes", max), prefill), checked=True),
    ),
    "grid for fewer multiprocessors": ("_bf16_small_m_kernel: reads .* of argument X", grid_of_fewer_multiprocessors),
    "library of another processor": (
        "the library of prefill is for .* hosts, this one is", with_libraries(for_another_host, opened),
    ),
    "too little memory": (
        "out of memory|too little GPU memory", on(H100._replace(total=8 << 20), opened, checked=True),
    ),
}  # fmt: skip
"""The expected message, a regular expression, and what has the fault, by name; no message is expected of right code."""

WAIT, RECORDS, BF16 = "tl.extra.cuda.gdc_wait()", "int4_records_small_m", "_bf16_small_m"
BEFORE = "before it waits for the launches before it"
PAST = r"asks L2 for .* bytes at .*, byte (\d+) of \1 of"  # at the end of a tensor
OF_RECORDS, OF_BF16 = "int4_records_small_m_kernel: ", "_bf16_small_m_kernel: "


def early(kernel: str, more: str, call: Fault = draft) -> Fault:
    """Return a call with ``more`` in place of a kernel's wait, or before it."""
    return written(kernel, WAIT, more if more == "pass" else f"{more}; {WAIT}", call)


EARLY_FAULTS: dict[str, tuple[str, Fault]] = {
    "right, with a weight loaded before the wait": ("", early(BF16, "tl.load(W + w_at)")),
    "records without a wait": (f"{OF_RECORDS}reads byte .* of argument X, .* {BEFORE}", early(RECORDS, "pass", verify)),
    "bfloat16 without a wait": (f"{OF_BF16}reads byte .* of argument X, .* {BEFORE}", early(BF16, "pass")),
    "Inductor's kernel without a wait": (f"triton_.*: (reads|writes) byte .* {BEFORE}", early("triton_", "pass")),
    "records load their input before the wait": (
        f"{OF_RECORDS}reads byte .* argument X, .* {BEFORE}", early(RECORDS, "tl.load(X + x_at)", verify),
    ),
    "bfloat16 loads its input before the wait": (
        f"{OF_BF16}reads byte .* argument X, .* {BEFORE}",
        early(BF16, "tl.load(X + x_at, mask=m[None, None, :] < M, other=0)"),
    ),
    "bfloat16 counts before the wait": (
        f"{OF_BF16}changes byte 0 of argument ARRIVED, .* {BEFORE}", early(BF16, "tl.atomic_add(ARRIVED, 0)"),
    ),
    "bfloat16 asks for its input before the wait": (
        f"{OF_BF16}asks L2 for .* argument X, .* {BEFORE}", early(BF16, "ask_l2(X, 16)"),
    ),
    "bfloat16 asks past the end of its weight": (
        f"{OF_BF16}{PAST} speculator.draft", written(BF16, "tl.minimum(each // 2, N - 1 - n0)", "(each // 2 + 1)"),
    ),
    "records ask for the next weight past its end": (
        f"{OF_RECORDS}{PAST} speculator.target",
        written(RECORDS, "pid.to(tl.uint64) * OF_NEXT", "(pid.to(tl.uint64) + 1) * OF_NEXT", verify),
    ),
}  # fmt: skip


def said(sessions: Sessions, function: Fault) -> str:
    text = ""
    with stderr() as read:
        try:
            function(sessions)
        except (RuntimeError, ValueError) as error:
            text = f"{error} {read()}"
    sessions.machine.device.recover()
    sessions.machine.device.become(H100)
    sessions.machine.placed = {}
    return " ".join(text.split())


def main(artifact: Path, faults: dict[str, tuple[str, Fault]]) -> None:
    torch.set_num_threads(1)
    sessions = Sessions(artifact)
    sessions.machine.kernels.computes = False
    with sessions.machine.running():
        found = {name: (says, said(sessions, function)) for name, (says, function) in faults.items()}
    click.echo(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), EARLY_FAULTS if sys.argv[2:] == ["early"] else FAULTS)
