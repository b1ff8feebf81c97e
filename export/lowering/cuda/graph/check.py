"""Finds the kernel of each quantized linear of a traced method, and refuses kernels that the method must not use.

Verifying several rows is cheap only if each weight is read once for all of them. A linear that reads its weights once
per row, or writes a dequantized matrix to memory first, is therefore refused by name.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.export import ExportedProgram
from torchao.utils import TorchAOBaseTensor

from eagle3.export.lowering.cuda.graph.nodes import OF_EXPERTS, QUANTIZED
from eagle3.runner.contract import PREFILL

SMALL_M, LARGE_M, DEQUANTIZE, PER_ROW = "small_m", "large_m", "dequantize", "once a row"
GATHER, EXPERTS = "gather", "experts"
_PER_ROW_OPS = "executorch_cuda::"
_OPS = {name: kind for each in QUANTIZED for name, kind in zip(each.names, (SMALL_M, LARGE_M), strict=True)}
_OPS |= {operator._qualname: EXPERTS for operator in OF_EXPERTS}


@dataclass(frozen=True)
class Use:
    """One use of a quantized weight in a graph. ``rows`` is None if the length of the method is dynamic."""

    layer: str
    kind: str
    rows: int | None


def quantized_uses(program: ExportedProgram) -> Iterator[Use]:
    """Yield every use of a quantized weight, in the order of the graph's inputs."""
    for node in program.graph.find_nodes(op="placeholder"):
        name = program.graph_signature.inputs_to_parameters.get(node.name)
        if name is None or not isinstance(program.state_dict[name], TorchAOBaseTensor):
            continue
        layer = name.removeprefix("speculator.").removesuffix(".weight")
        payloads = [user for user in node.users if user.args[1:2] == ("qdata",)]
        for user in (user for payload in payloads for user in payload.users):
            yield _use(layer, user)


def _use(layer: str, node: torch.fx.Node) -> Use:
    operator = getattr(node.target, "_schema", None)
    name = operator.name if operator is not None else str(node.target)
    if name in ("aten::index", "aten::embedding"):
        return Use(layer, GATHER, None)
    kind = PER_ROW if name.startswith(_PER_ROW_OPS) else _OPS.get(name)
    if kind is None:
        return Use(layer, DEQUANTIZE, None)
    rows = node.args[0].meta["val"].shape[0]
    return Use(layer, kind, rows if isinstance(rows, int) else None)


def check_linears(method: str, program: ExportedProgram) -> dict[str, int]:
    """Count the quantized linears by kernel: ``{"small_m", "large_m", "dequantize"}``. A large-M kernel decodes weights
    while it multiplies; the last kind dequantizes the matrix first.

    Raises ValueError, which names the layer, for a linear that reads its weights once per row, for one in ``prefill``
    that uses the small-M op over more than one row, and for one in another method that does not use the small-M op.
    """
    linears: dict[str, set[str]] = {SMALL_M: set(), LARGE_M: set(), DEQUANTIZE: set()}
    for use in quantized_uses(program):
        if use.kind == GATHER:
            continue
        if use.kind == EXPERTS:  # the kernel itself refuses many rows
            linears[SMALL_M].add(use.layer)
            continue
        if use.kind == PER_ROW:
            raise ValueError(f"{method}: {use.layer} would read its weights once a row")
        if method == PREFILL and use.kind == SMALL_M and use.rows != 1:
            raise ValueError(f"{method}: {use.layer} would take the small-M kernel for every row of a chunk")
        if method != PREFILL and use.kind == DEQUANTIZE:
            raise ValueError(f"{method}: {use.layer} would dequantize its whole matrix")
        if method != PREFILL and use.kind == LARGE_M:
            raise ValueError(f"{method}: {use.layer} would take the kernel for many rows, which rounds its weights")
        linears[use.kind].add(use.layer)
    return {kind: len(layers) for kind, layers in linears.items()}
