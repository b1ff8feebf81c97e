"""Traces methods of a plan as for CUDA."""

from collections.abc import Iterator

import torch
from random_checkpoints import random_model
from torch.export import ExportedProgram

from eagle3.export.lowering.cuda.backend import BACKEND as cuda
from eagle3.export.lowering.cuda.graph.check import check_linears
from eagle3.export.pipeline import load_speculator, trace
from eagle3.export.planning.plan import Plan

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_attention_heads": 8}
"""The sizes of a target whose linears are wide enough for the kernels."""


def wide_model(name: str, **changes):
    return random_model(name, **WIDE | changes).to(torch.bfloat16)


def traced(plan: Plan, *methods: str) -> Iterator[tuple[str, ExportedProgram, dict[str, int]]]:
    """Yield the name and the program of each method, and how many of the operators that compute its quantized linears
    are of each kind."""
    speculator = load_speculator(plan, cuda.attention, cuda.dtype, cuda.conversion(plan))
    cuda.prepare(speculator, plan)
    for name in methods:
        with cuda.tracing(speculator, plan):
            program = trace(speculator, plan.method(name), plan.draft.hidden_size, cuda.dtype)
        yield name, program, check_linears(name, program)
