"""Runs an artifact for MLX over ``mlx.core``, on the CPU of any machine. ExecuTorch's runtime for MLX exists for Apple
silicon alone.

A delegate's program is a list of nodes over numbered slots, each one call of MLX (``nodes.py``). As in that runtime, a
loaded method has caches of its own, values are computed when a method ends, and inputs of another dtype are refused.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from torch import Tensor

from eagle3.export.lowering.mlx.generated import schema_and_flatc
from eagle3.export.lowering.mlx.nodes import DTYPES, Node, Slots
from eagle3.runner.artifact.pte import Pte, read_pte

BACKEND, MAGIC, HEADER_BYTES = "MLXBackend", b"MLX0", 24


class MlxMethod:
    """A loaded method. ``graph`` is its program; ``constants`` and ``caches`` are tensors by the numbers of their
    slots. With ``exact``, bfloat16 is computed as float32."""

    def __init__(self, pte: Pte, name: str):
        plan = pte.plan(name)
        delegates = [delegate.id for delegate in plan.delegates]
        if delegates != [BACKEND] or len(plan.chains[0].instructions) != 1:
            raise ValueError(f"{name} is not one delegate of {BACKEND}, but {delegates}")
        self.name, self.exact = name, False
        self.graph = parsed(pte.delegate_blob(plan.delegates[0]))
        passed = plan.chains[0].instructions[0].instr_args.args
        slots = [slot["idx"] for slot in (*self.graph["input_map"], *self.graph["output_map"])]
        slot_of = dict(zip(passed, slots, strict=True))
        self._inputs = [slot_of.get(value) for value in plan.inputs]  # None: no node reads it
        self._outputs = [(slot_of[value], DTYPES[int(plan.values[value].val.scalar_type)]) for value in plan.outputs]
        self.constants: dict[int, mx.array] = {}
        self.caches: dict[int, mx.array] = {}
        first_cache = sum(self.graph[f"num_{kind}_tensors"] for kind in ("constant", "input", "output"))
        for named in self.graph["named_slots"]:
            slot = named["slot"]["idx"]
            shape, dtype = self.declared(slot)
            if slot < self.graph["num_constant_tensors"]:
                self.constants[slot] = array_of(pte.named(named["name"]), shape, dtype)
            elif slot >= first_cache:
                self.caches[slot] = mx.zeros(shape, dtype)
        if self.graph["init_chain_idx"] >= 0:  # computes constants once, such as the offsets of codes
            begun = Slots(dict(self.constants))
            begun.run(self._chain(self.graph["init_chain_idx"]))
            self.constants = {slot: v for slot, v in begun.tensors.items() if slot < self.graph["num_constant_tensors"]}

    def _chain(self, index: int) -> list[Node]:
        return self.graph["instruction_chains"][index]["instructions"]

    def declared(self, slot: int) -> tuple[list[int], mx.Dtype]:
        """Return the shape and the dtype that the program declares for a slot."""
        meta = self.graph["tensor_meta"][slot]
        return [dim["value"] for dim in meta["shape"]], DTYPES[meta["scalar_type"]]

    def slot(self, name: str) -> int:
        """Return the slot of the constant or cache whose name ends with ``name``."""
        (slot,) = (each["slot"]["idx"] for each in self.graph["named_slots"] if each["name"].endswith(name))
        return slot

    def clear(self, exact: bool = False) -> None:
        """Empty the caches, and compute bfloat16 as float32 from now on if ``exact``."""
        self.exact = exact
        declared = {slot: self.declared(slot) for slot in self.caches}
        self.caches = {
            slot: mx.zeros(shape, mx.float32 if exact and dtype == mx.bfloat16 else dtype)
            for slot, (shape, dtype) in declared.items()
        }

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Return the outputs in the dtypes that the method declares. Raises ValueError for an input of another."""
        tensors = self.constants | self.caches
        for slot, value in zip(self._inputs, inputs, strict=True):
            if slot is not None:
                array, dtype = as_array(value), self.declared(slot)[1]
                if array.dtype != dtype and not (self.exact and dtype == mx.bfloat16):
                    raise ValueError(f"{self.name} takes {dtype}, and is given {array.dtype}")
                tensors[slot] = array
        slots = Slots(tensors, self.exact)
        slots.run(self._chain(self.graph["main_chain_idx"]))
        self.caches = {slot: slots.tensors[slot] for slot in self.caches}
        results = [
            slots.tensors[slot].astype(mx.float32 if self.exact and dtype == mx.bfloat16 else dtype)
            for slot, dtype in self._outputs
        ]
        mx.eval(results, list(self.caches.values()))
        return [as_tensor(result) for result in results]


def parsed(blob: bytes) -> Node:
    """Return a delegate's program as the dictionary that flatc makes of it."""
    if blob[4:8] != MAGIC:
        raise ValueError(f"a delegate begins with {blob[:8]!r}, and not as a program for MLX")
    schema, flatc = schema_and_flatc()
    options = ("--json", "--raw-binary", "--strict-json", "--defaults-json", "--root-type", "mlx_delegate.MLXGraph")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "graph.bin"
        program.write_bytes(blob[HEADER_BYTES:])
        subprocess.run([flatc, *options, "-o", folder, schema, "--", program], check=True, capture_output=True)
        text = program.with_suffix(".json").read_text()
    text = re.sub(r"(?<=: )(-?)inf\b", r"\1Infinity", text)  # flatc writes what Python does not read
    return json.loads(re.sub(r"(?<=: )-?nan\b", "NaN", text))


def array_of(data: bytes, shape: list[int], dtype: mx.Dtype) -> mx.array:
    if dtype == mx.bfloat16:
        return mx.array(np.frombuffer(data, np.uint16).reshape(shape)).view(mx.bfloat16)
    name = str(dtype).removeprefix("mlx.core.").rstrip("_")
    return mx.array(np.frombuffer(data, np.dtype(name)).reshape(shape))


def as_array(value: Tensor) -> mx.array:
    value = value.contiguous()
    if value.dtype == torch.bfloat16:
        return mx.array(value.view(torch.int16).numpy().view(np.uint16)).view(mx.bfloat16)
    return mx.array(value.numpy())


def as_tensor(result: mx.array) -> Tensor:
    if result.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(result.view(mx.uint16)).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(result))


def exact_methods(model: Path) -> dict[str, MlxMethod]:
    """Load the methods of a program, to compute in float32."""
    found = methods(model)
    for method in found.values():
        method.clear(exact=True)
    return found


def methods(model: Path) -> dict[str, MlxMethod]:
    """Load the methods of a program."""
    pte = read_pte(model)
    return {plan.name: MlxMethod(pte, plan.name) for plan in pte.program.execution_plan if plan.delegates}
