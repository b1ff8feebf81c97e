"""Lowers eager modules to a program with delegates for the CPU: rewrites them for tracing, lowers the traces, and plans
memory."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401  (registers torch.ops.llama)
import torch
from executorch.exir import (
    EdgeCompileConfig,
    ExecutorchProgramManager,
    to_edge_transform_and_lower,
)
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.passes.dialect.common.cse_pass import CSEPass
from torch.fx.passes.infra.pass_base import PassBase

from eagle3.export.lowering.edge.replays import repeated_alone
from eagle3.export.lowering.gc_tuning import collected_rarely
from eagle3.export.lowering.xnnpack.bookkeeping import code_on_call, without_stacks
from eagle3.export.lowering.xnnpack.forms import product_rotary, rows_before_heads, tanh_gelu, use_product_norms
from eagle3.export.lowering.xnnpack.full_attention import FullAttention
from eagle3.export.lowering.xnnpack.llm_ops_attention import LlmOpsAttention
from eagle3.export.lowering.xnnpack.partition import LevelPartitioner
from eagle3.export.lowering.xnnpack.shortcuts import applicable_passes
from eagle3.export.lowering.xnnpack.split_k import split_wide_linears, splits
from eagle3.export.lowering.xnnpack.used_slots import planned
from eagle3.export.lowering.xnnpack.weight_names import scales_in_names
from eagle3.export.speculator.state import write_rows
from eagle3.targets.gated_delta import GatedDeltaState, KimiDeltaState
from eagle3.targets.recurrent import Given, Masks, Ring


@contextmanager
def tracing(model: nn.Module, rows: int) -> Iterator[None]:
    """Prepare ``model`` for a trace: rewrite norms, rotary embeddings and GELUs for XNNPACK, and choose matrix products
    that suit a verify window of ``rows``."""
    use_product_norms(model)
    use_cpu_recurrence(model)
    if splits():
        split_wide_linears(model, rows)
    kinds = (FullAttention, LlmOpsAttention)
    head_dims = {module.shape.head_dim for module in model.modules() if isinstance(module, kinds)}
    with (
        product_rotary(model, head_dims),
        rows_before_heads(model),
        tanh_gelu(model),
        collected_rarely(),
        without_stacks(),
    ):
        yield


def lower(programs: Mapping[str, ExportedProgram], constant_methods: Mapping[str, Any]) -> ExecutorchProgramManager:
    """Lower all methods to one program, in which each mutable buffer (cache) has the same memory in all methods."""
    for program in programs.values():
        remove_no_ops(program)
    with (
        collected_rarely(),
        code_on_call(),
        without_stacks(),
        repeated_alone(decompose_by_node=True),
        applicable_passes(),
        scales_in_names(),
    ):
        lowered = to_edge_transform_and_lower(
            dict(programs),
            transform_passes=[computed_once()],
            partitioner=[LevelPartitioner()],
            compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
            constant_methods=dict(constant_methods),
        )
        return lowered.to_executorch(planned())


def computed_once() -> PassBase:
    """Return a pass that merges equal nodes of the edge dialect; a cache counts as a new value after each write. The
    weight of a linear that is called twice keeps two nodes. With one node the two calls would be put into one delegate,
    although the second depends on the first."""
    return CSEPass(banned_ops={torch.ops.torchao.dequantize_affine})


def remove_no_ops(program: ExportedProgram) -> None:
    """Remove transpositions that undo each other and products with 1 from a traced program, in place. Output nodes are
    kept, since the program's signature has their names."""
    outputs = program.graph.output_node().all_input_nodes
    for node in program.graph.nodes:
        same = None if node in outputs else _without_effect(node)
        if same is not None:
            node.replace_all_uses_with(same)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


def _without_effect(node: Node) -> Node | None:
    """Return the input that a node passes on unchanged; None if the node computes something."""
    if node.target is torch.ops.aten.transpose.int:
        before = node.args[0]
        if before.target is node.target and _axes(before) == _axes(node):
            return before.args[0]
    if node.target is torch.ops.aten.mul.Tensor:
        factor, other = node.args
        if isinstance(other, float | int) and other == 1 and factor.meta["val"].dtype == node.meta["val"].dtype:
            return factor
    return None


def _axes(transpose: Node) -> set[int]:
    source, *dims = transpose.args
    return {dim % source.meta["val"].dim() for dim in dims}


class InPlaceRing(Ring):
    """A ring that is written in place, by ``llama::update_cache_with_indices``."""

    def _write(self, rows: Tensor, slots: Tensor) -> None:
        torch.ops.llama.update_cache_with_indices(rows.contiguous(), self.rows, 0, slots[None])


def write_rows_in_place(buffer: Tensor, axis: int | None, rows: Tensor, value: Tensor) -> None:
    """Write ``value`` into ``rows`` [R] of a buffer along ``axis``: a cache in place, where ``index_copy_`` would copy
    all of it."""
    if buffer.dim() == 4 and axis == 1:
        torch.ops.llama.update_cache_with_indices(value, buffer, 0, rows[None].repeat(buffer.shape[0], 1))
    else:
        write_rows(buffer, axis, rows, value)


class SequentialState(GatedDeltaState):
    """A recurrent state that computes the committed rows one after the other, by ``llama::gated_delta_rule``, which
    takes a decay for each head or for each of its key channels."""

    def _bulk(self, given: Given, state: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value, decay, beta = given
        return _row_by_row(self._for_values(query), self._for_values(key), value, decay.exp(), beta, state)


class SequentialKimiState(SequentialState, KimiDeltaState):
    """Such a state with a decay for each key channel. Windows too are computed by the operator, since products that
    decay by channel have two dynamic dimensions, which XNNPACK does not reshape."""

    def _window(self, given: Given, state: Tensor, masks: Masks) -> tuple[Tensor, Tensor]:  # noqa: ARG002 - not needed
        """Return outputs and updates of rows that follow ``state``.

        The operator gets two rows for each. The first decays the state and reads what its key holds, which the update
        replaces. The second updates the state and reads what its query gets.
        """
        query, key, value, decay, beta = given
        none, every = torch.zeros_like(beta), torch.ones_like(decay)
        doubled = ((key, query), (key, key), (value, value), (decay.exp(), every), (none, beta))
        rows = (torch.stack(pair, dim=2).flatten(1, 2) for pair in doubled)
        out, _ = _row_by_row(*rows, state)
        held, out = out.unflatten(1, (-1, 2)).unbind(2)
        return out, (value - held) * beta.unsqueeze(-1)


def _row_by_row(*given: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs and the state of ``llama::gated_delta_rule``, which takes a batch: here of one."""
    out, state = torch.ops.llama.gated_delta_rule(*(each.unsqueeze(0).contiguous() for each in given))
    return out[0], state[0]


ON_THE_CPU = {Ring: InPlaceRing, GatedDeltaState: SequentialState, KimiDeltaState: SequentialKimiState}


def use_cpu_recurrence(model: nn.Module) -> None:
    """Make the recurrent layers of ``model`` use ExecuTorch's operators, in place."""
    for module in model.modules():
        module.__class__ = ON_THE_CPU.get(type(module), type(module))
