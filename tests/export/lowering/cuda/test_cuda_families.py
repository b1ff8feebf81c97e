"""Every target family quantizes, and uses the small-M kernels when lowered to CUDA."""

import pytest
import torch
from dialect_files import IDS, PEAGLE, random_eagle, random_peagle, write
from random_checkpoints import FAMILIES, random_model, save_random_draft
from torch import nn
from torch.nn import functional as F
from torchao.utils import TorchAOBaseTensor

from eagle3.export.configuration.backends import SMALL_M_ROWS
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.lowering.cuda.backend import BACKEND as cuda
from eagle3.export.lowering.cuda.graph.check import check_linears
from eagle3.export.lowering.cuda.graph.rotations import ATTENTION, rotate_in_attention
from eagle3.export.lowering.cuda.kernels.int4.tiles.tensor import TiledInt4Tensor
from eagle3.export.pipeline import load_speculator, trace
from eagle3.export.planning.methods import MethodPlan
from eagle3.export.planning.plan import make_plan
from eagle3.export.speculator.merged_linears import merge_linears
from eagle3.runner.contract import DECODE, DRAFT_DECODE, FORWARD, PREFILL, TARGET_VERIFY
from eagle3.targets.attention import EagerAttention

FUSED = {"qwen3-30B-A3B": 4, "llama4-maverick": 2, "gemma4-26B-A4B": 4}  # of 4 layers
EVERY_METHOD = ("gemma4-31B", "qwen3-30B-A3B")
"""Families whose decode and forward are traced too: the layers of a method are those of the verify."""
OTHERWISE = ("llama4-maverick",)  # norms behind the rotation, queries scaled by their positions
QUERIES_ALONE = {"gemma4-E2B": 2}  # of 4 layers, those that attend to the keys of another
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_hidden_layers": 4, "num_attention_heads": 8}
DRAFTS = {
    "llama3.1-8B": lambda folder, config: write(folder, "safeailab", random_eagle(256), draft_vocab_size=None),
    "qwen3-4B": lambda folder, config: write(folder, "speculators", random_peagle(256), **PEAGLE, **{IDS: [1, 2, 3]}),
}
"""The heads that are no EAGLE-3 of one layer: an EAGLE that shares embedding and lm_head, a P-EAGLE of two layers."""
HEADS = ("gemma4-31B", *DRAFTS)
"""Families whose draft step is traced: one for each kind of these heads."""
LEFT_OUT = ("llama4-scout", "gemma4-E4B")  # Maverick and E2B have their kinds of layers


@pytest.fixture(scope="module", params=[name for name in FAMILIES if name not in LEFT_OUT])
def plan(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = random_model(request.param, **WIDE)
    model.to(torch.bfloat16).save_pretrained(folder / "target")
    save = DRAFTS.get(request.param, lambda folder, config: save_random_draft(folder, config, aux_layers=(1, 2, 3)))
    draft = save(folder / "draft", model.config)
    given = ExportConfig(
        request.param,
        output_dir=None,
        checkpoint=folder / "target",
        draft=draft,
        cuda_arch=None if torch.cuda.is_available() else "sm_90",
        draft_qlinear="default",
        max_seq_len=64,
        with_forward=request.param in EVERY_METHOD,
        speculate=request.param in DRAFTS,  # a trace of twice the length: for each kind of head but EAGLE-3's
    )
    return make_plan(given)


def prepared(plan, attention):
    speculator = load_speculator(plan, attention, cuda.dtype, cuda.conversion(plan))
    cuda.prepare(speculator, plan)
    return speculator


@pytest.mark.first(1)
def test_every_linear_uses_the_small_m_kernels_in_all_methods_but_prefill(plan, tmp_path):
    """Attention also takes the product of the merged linears of queries, keys and values, and rotates them itself."""
    speculator, counts = prepared(plan, cuda.attention), {}
    merge_linears(speculator, tmp_path)
    family = plan.config.target_model
    every, drafts = family in EVERY_METHOD, family in HEADS
    left_out = (
        (PREFILL,) if drafts else (PREFILL, DRAFT_DECODE)
    )  # prefill: tests/export/lowering/cuda/test_cuda_artifact.py
    methods = (method for method in plan.methods if method.name not in left_out)
    for method in (*methods, *([MethodPlan(DECODE, 1, 1)] if every else [])):
        name = method.name
        with cuda.tracing(speculator, plan):
            program = trace(speculator, method, plan.draft.feature_size, cuda.dtype)
        counts[name] = check_linears(name, program)
        few = method.max_len <= SMALL_M_ROWS[-1]
        op = torch.ops.eagle3.int4_experts_small_m if few else torch.ops.eagle3.sorted_experts_matmul
        fused = [node for node in program.graph.nodes if node.target is op.default]
        layers = FUSED.get(family, 0) if name != DRAFT_DECODE else 0
        assert len(fused) == layers * (1 if few else 2)
        if name in (TARGET_VERIFY, DRAFT_DECODE):
            rotate_in_attention(program)
            rotated = plan.target_config.num_hidden_layers if family in OTHERWISE else 0
            apart = [node for node in program.graph.nodes if str(node.target) == ATTENTION]
            assert len(apart) == (QUERIES_ALONE.get(family, rotated) if name == TARGET_VERIFY else 0)
    fuses = not plan.draft.takes_final_state  # by the draft's fc
    quantized = sum(type(module) is nn.Linear for module in speculator.target.modules()) + fuses
    for name in (TARGET_VERIFY, DECODE) if every else (TARGET_VERIFY,):
        assert counts[name] == {"small_m": quantized, "large_m": 0, "dequantize": 0}
    if every:  # forward makes no features
        assert counts[FORWARD] == {"small_m": quantized - fuses, "large_m": 0, "dequantize": 0}
    drafting = 4 * plan.draft.layers + 1 + (not fuses)  # four in a layer, the lm_head, and an EAGLE's fc
    assert counts.get(DRAFT_DECODE) == ({"small_m": drafting, "large_m": 0, "dequantize": 0} if drafts else None)


@pytest.mark.first(5)
def test_every_packed_linear_gives_the_numbers_of_its_dequantized_weights(plan):
    speculator, compared = prepared(plan, EagerAttention), 0
    torch.manual_seed(5)
    for name, module in speculator.named_modules():
        if not isinstance(module, nn.Linear) or not isinstance(module.weight, TorchAOBaseTensor):
            continue
        x = torch.randn(1, 4, module.in_features, dtype=cuda.dtype)
        weight, bias = dequantized(module.weight), None if module.bias is None else module.bias.float()
        with cuda.tracing(speculator, plan):
            found = module(x).float()
        roundings = 1 if bias is None else 2  # bf16 of the product, and with its bias; no weight is rounded
        bound = F.linear(x.float().abs(), weight.abs(), None if bias is None else bias.abs()) * 2**-8 + 2**-9
        assert ((found - F.linear(x.float(), weight, bias)).abs() <= roundings * bound).all(), name
        compared += 1
    assert compared > 4 * 4 + 8  # four a layer where query, key and value are one, gate and up another


def dequantized(weight) -> torch.Tensor:
    if isinstance(weight, TiledInt4Tensor):
        return weight.dequantize(torch.float32)
    groups = weight.scale.shape[1]
    codes, zeros, scales = (
        weight.qdata.unflatten(-1, (groups, -1)),
        weight.zero_point[..., None],
        weight.scale[..., None],
    )
    return ((codes.float() - zeros.float()) * scales.float()).flatten(-2)
