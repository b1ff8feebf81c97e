"""Estimates the GPU memory of a run from configurations and headers alone, before any weight is read.

Weights are counted in the layout of their kernels. The exact size of intermediate tensors is known once a method is
compiled (``launches.py``). Before that, the largest tensors of a long chunk are counted: gate, up and their product,
and the partial sums of the draft's matmuls.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from executorch.extension.llm.export.quant import QuantConfig, QuantRecipe
from torch import nn

from eagle3.export.checkpoints.source import TensorHeader
from eagle3.export.configuration.config import CUDA_RECIPES
from eagle3.export.draft.loading import unfilled
from eagle3.export.lowering.cuda.kernels import bf16, recurrent, sums
from eagle3.export.lowering.cuda.kernels.int4.layouts import layout_of
from eagle3.export.lowering.cuda.kernels.int4.tiles import kernel as int4
from eagle3.export.lowering.cuda.kernels.local_gpu import local_arch
from eagle3.export.lowering.cuda.kernels.small_m import Blocks
from eagle3.export.lowering.cuda.weights.experts import fused_linears
from eagle3.export.lowering.cuda.weights.quantization import fitted_recipe
from eagle3.export.planning.memory import GpuMemory
from eagle3.export.planning.methods import plan_methods
from eagle3.export.planning.plan import Plan
from eagle3.export.speculator.merged_linears import SAME_INPUT
from eagle3.runner.contract import DRAFT_DECODE, PREFILL
from eagle3.targets.recurrent import RecurrentState
from eagle3.targets.spec import Skeleton
from eagle3.targets.state_mixers import form_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

BFLOAT16, FLOAT32 = torch.bfloat16.itemsize, torch.float32.itemsize
INT4_GROUP = 32  # the number of columns that share a scale in torchao's checkpoints


def gpu_memory(plan: Plan) -> GpuMemory:
    skeleton = plan.skeleton
    draft = unfilled(plan.draft, plan.max_seq_len, plan.proposals)
    recipe = _recipe(plan.draft_qlinear, plan.draft.layer, draft)
    target, workspace = _target_bytes(plan, skeleton), _workspace(plan, skeleton, draft)
    caches = plan.cache_bytes + _more_slots(skeleton.model)
    return GpuMemory(target, module_bytes(draft, recipe), caches, workspace)


def _more_slots(model: nn.Module) -> int:
    """Return the bytes by which the rings of recurrent layers are longer than in the plan."""
    with torch.device("meta"):  # window and context decide the ring of a short convolution alone, which has no more
        states = [form.make(form.mixer(each), 0, 1) for each in model.modules() if (form := form_of(each)) is not None]
    kept = [state for state in states if isinstance(state, RecurrentState)]
    return sum(FLOAT32 * (recurrent.SLOTS - state.changes.slots) * sum(state.parts) for state in kept)


def _recipe(name: str, config: "PreTrainedConfig", model: nn.Module) -> QuantRecipe | None:
    return fitted_recipe(name, config, model) if name in CUDA_RECIPES[1:] else None


def _target_bytes(plan: Plan, skeleton: Skeleton) -> int:
    if plan.qlinear == "checkpoint":
        return sum(map(header_bytes, plan.target_headers.values()))
    return module_bytes(skeleton.model, _recipe(plan.qlinear, plan.target_config, skeleton.model))


def header_bytes(header: TensorHeader) -> int:
    """Return the bytes that a checkpoint's tensor takes on the GPU."""
    if not header.quantized:
        return header.elements * BFLOAT16
    if "Int4" in header.dtype:
        return round(header.elements * int4_bytes(header.group or INT4_GROUP))
    return header.bytes


def int4_bytes(group: int) -> float:
    """Return the bytes per INT4 weight: its code, and its share of the scales' and zero points' codes and float16
    steps."""
    return 1 / 2 + 2 / group + 4 / int4.BLOCK


def module_bytes(model: nn.Module, recipe: QuantRecipe | None) -> int:
    """Return the bytes of the parameters of a model on the meta device. A parameter with two names is counted once,
    unless the recipe stores the two in different types."""
    matrices = {f"{name}.weight" for name, m in _modules(model).items() if isinstance(m, nn.Linear | nn.Embedding)}
    total, counted = 0.0, set()
    for name, value in model.named_parameters(remove_duplicate=False):
        config = recipe.get_config(name) if recipe and name in matrices else None
        if (id(value), config and config.bits) in counted:
            continue
        counted.add((id(value), config and config.bits))
        total += value.numel() * _bytes_each(config)
    return round(total)


def _modules(model: nn.Module) -> Mapping[str, nn.Module]:
    return dict(model.named_modules(remove_duplicate=False))


def _bytes_each(config: QuantConfig | None) -> float:
    if config is None:
        return BFLOAT16
    return int4_bytes(config.group_size) if config.bits == 4 else 1 + (BFLOAT16 + 1) / config.group_size


def _workspace(plan: Plan, skeleton: Skeleton, draft: nn.Module) -> int:
    layers = _layer_linears(skeleton.model)
    prefill = plan.method(PREFILL).max_len * _row_bytes(layers)
    if not plan.has_draft:
        return prefill
    own = _layer_linears(draft)
    with _made_for(plan):
        parts = max(_most_part_bytes(plan, linears) for linears in _merged(draft, own))
    return max(prefill, plan.method(DRAFT_DECODE).max_len * (_row_bytes(own) + parts))


def _made_for(plan: Plan) -> AbstractContextManager[None]:
    """Return a context in which matmuls are divided along K for this machine's GPU; without one, for the GPU that
    ``plan`` names, or for an H100 if it names none."""
    if local_arch() is not None:
        return sums.made_for_here()
    return sums.made_for_named(plan.config.cuda_arch) if plan.config.cuda_arch else nullcontext()


def _merged(model: nn.Module, linears: list[nn.Linear]) -> Iterator[list[nn.Linear]]:
    """Yield the groups of linears that run as one matmul."""
    left = dict.fromkeys(linears)
    for parent in model.modules():
        for names in SAME_INPUT:
            group = [each for name in names if (each := getattr(parent, name, None)) in left]
            if group:
                yield group
            for each in group:
                del left[each]
    yield from ([each] for each in left)


def _layer_linears(model: nn.Module) -> list[nn.Linear]:
    """Return the linears that every row goes through. The LM head and experts with fused kernels are left out."""
    fused = fused_linears(model)
    linears = ((name, m) for name, m in _modules(model).items() if isinstance(m, nn.Linear) and name not in fused)
    return [linear for name, linear in linears if not name.endswith("lm_head")]


def _row_bytes(linears: list[nn.Linear]) -> int:
    """Return the bytes per row of gate, up and their product, or of tensors as wide."""
    return BFLOAT16 * 3 * max(max(m.in_features, m.out_features) for m in linears)


def _most_part_bytes(plan: Plan, linears: list[nn.Linear]) -> int:
    """Return the bytes per row of the partial sums of a draft's matmul, by the kernel that writes the most."""
    most = _part_bytes(linears, bf16.BF16, bf16.BLOCK_K)
    if plan.draft_qlinear == "none":
        return most
    outputs, k = sum(each.out_features for each in linears), linears[0].in_features
    parts = layout_of(plan.config.int4_layout).parts(outputs, k, INT4_GROUP, plan.few_rows)
    if parts is not None:
        return max(most, FLOAT32 * parts * outputs if parts > 1 else 0)
    return max(most, _part_bytes(linears, int4.INT4, int4.BLOCK))


def _part_bytes(linears: list[nn.Linear], kernel: Blocks, block: int) -> int:
    """Return the bytes per row of the partial sums of a draft's matmul; ``block`` is how much of K its kernel takes at
    once. Two linears may be gate and up, whose sums are written even if K is not divided."""
    outputs = sum(each.out_features for each in linears)
    parts = kernel.division(outputs, -(-linears[0].in_features // block), whole=len(linears) < int4.MOST).parts
    return FLOAT32 * parts * outputs if parts > 1 or len(linears) == 2 else 0


def suggest_flags(plan: Plan, has: int) -> str | None:
    """Return the fewest flags with which a run fits in ``has`` bytes, None if no flags suffice."""
    flags: list[str] = []
    for flag, smaller in _smaller(plan):
        plan = smaller
        flags = [each for each in flags if each.split()[0] != flag.split()[0]] + [flag]
        if gpu_memory(plan).total <= has:
            return " ".join(flags)
    return None


def _smaller(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield (flag, plan) for plans that take less and less memory, each with one more flag."""
    if plan.draft_qlinear == "none":
        plan = replace(plan, draft_qlinear="default")
        yield "--draft-qlinear default", plan
    least = plan.few_rows + 1
    for rows in (512, 256, 128):
        if least <= rows < plan.method(PREFILL).max_len:
            plan = _with_lengths(plan, plan.max_seq_len, rows)
            yield f"--max-prefill {rows}", plan
    if not plan.config.int8_caches:
        plan = replace(plan, config=replace(plan.config, kv_cache="int8"))
        yield "--kv-cache int8", plan
    tokens = plan.max_seq_len // 2
    while tokens > plan.method(PREFILL).max_len:
        plan = _with_lengths(plan, tokens, plan.method(PREFILL).max_len)
        yield f"--max-seq-len {tokens}", plan
        tokens //= 2


def _with_lengths(plan: Plan, max_seq_len: int, max_prefill: int) -> Plan:
    config = replace(plan.config, max_prefill=max_prefill)
    lengths = plan.chain_len, max_seq_len, plan.draft, plan.speculates, plan.verify_rows
    methods = plan_methods(config, plan.spec, plan.target_config, *lengths)
    return replace(plan, config=config, max_seq_len=max_seq_len, methods=methods)
