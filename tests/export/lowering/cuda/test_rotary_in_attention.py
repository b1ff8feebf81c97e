"""Norms, RoPE and cache writes are fused into the launch of their attention: the kernel is right in the interpreter
with each program alone, and the patterns are found in traced graphs."""

from copy import deepcopy
from unittest.mock import patch

import pytest
import torch
from attention_products import ROTARY, SLOTS, WINDOW, made
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor, nn
from torch.export import Dim
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.glm4 import modeling_glm4 as glm4
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.phi3 import modeling_phi3 as phi3
from triton.runtime import interpreter
from triton_interpreter import interpreted

from eagle3.export.lowering.cuda.graph.rotations import CudaAttention, rotate_in_attention
from eagle3.export.lowering.cuda.kernels import attention as kernels
from eagle3.export.lowering.cuda.kernels import attention_chunk, attention_sums
from eagle3.export.lowering.cuda.kernels import heads as helpers
from eagle3.export.lowering.cuda.kernels.attention_of_product import attention_of_product
from eagle3.export.lowering.cuda.kernels.bf16 import bf16_small_m
from eagle3.export.lowering.cuda.kernels.product import shared_counters
from eagle3.export.lowering.cuda.kernels.sums import counters
from eagle3.targets.attention import KVCacheShape, int8_codes

CLOSE = {"atol": 3e-2, "rtol": 2e-2}  # bfloat16, rounded in fewer places


class Alone:
    """Runs the programs of a launch, each without the writes of the others; ``keys`` and ``values`` are all their
    writes."""

    def __init__(self, product: Tensor, keys: Tensor, values: Tensor, *rest, keys_a_block: int = 16, scales=()):
        first, last, scale, longest, *made = rest
        self.before = keys, values, *scales
        self.query = torch.empty(1, len(product), made[5], keys.shape[3]).bfloat16()
        self.now = [cache.clone() for cache in self.before]
        self.written = [cache.clone() for cache in self.before]
        begin = interpreter.interpreter_builder.set_grid_idx

        def begin_alone(*index) -> None:
            self.collect()
            begin(*index)

        caches, now = self.now[:2], self.now[2:] or (None, None)
        given_now = self.query, *caches, first, last, counters(), scale, longest, 16, 0.0, None, *now
        with (
            interpreted(kernels, attention_chunk, attention_sums, helpers),
            patch.object(interpreter.interpreter_builder, "set_grid_idx", begin_alone),
        ):
            product = kernels.Product(product, *made)
            self.out = kernels.launch(
                (kernels._attention_kernel, kernels.attention_sum_kernel), *given_now, product, BLOCK_N=keys_a_block
            )
        self.collect()
        self.keys, self.values, *self.scales = self.written

    def collect(self) -> None:
        for now, before, written in zip(self.now, self.before, self.written, strict=True):
            new, known = now != before, written != before
            assert torch.equal(now[new & known], written[new & known]), "two programs wrote other bits"
            written[new] = now[new]
            now.copy_(before)
        self.query.fill_(torch.nan)


def reference(product, keys, values, first, last, scale, longest, *fused, scales=()) -> list[Tensor]:
    floating = not scales
    floats = [x.float() if isinstance(x, Tensor) and floating else x for x in (product, keys, values, *fused)]
    product, keys, values, bias, *fused = floats
    rest = *fused, scale, longest, 16, 0.0, None, *scales
    return attention_of_product(product, bias, keys, values, first, last, counters(), *rest)


ONCE = pytest.mark.races(("forward",))  # ``Alone`` changes memory between the programs of a launch


@pytest.mark.whole
@ONCE
@settings(max_examples=12, deadline=None)
@given(
    rows=some.integers(1, 16),
    first=some.integers(0, SLOTS - 16),
    kv_heads=some.sampled_from([1, 2]),
    groups=some.sampled_from([1, 3, 8]),
    width=some.sampled_from([8, 24, 64]),
    window=some.sampled_from([0, WINDOW]),
    norms=some.booleans(),
    keys_a_block=some.sampled_from([16, 64]),
    slots=some.sampled_from([100, SLOTS]),
    kind=some.sampled_from(sorted(ROTARY)),
    bias=some.booleans(),
    plus=some.sampled_from([0.0, 1.0]),
)
def test_each_program_of_fused_attention_is_independent_of_the_others_writes(
    rows, first, kv_heads, groups, width, window, norms, keys_a_block, slots, **more
):
    """No program depends on another's writes; together they write exactly the new rows."""
    first = first if window else first % (slots - 16)
    given_now = made(rows, first, kv_heads, groups, width, window, norms, slots, **more)
    found, expected = Alone(*given_now, keys_a_block=keys_a_block), reference(*given_now)
    for x, y in zip((found.out, found.keys, found.values), expected, strict=True):
        torch.testing.assert_close(x.float(), y, **CLOSE)
    others = torch.ones(found.keys.shape[2], dtype=torch.bool)
    others[given_now[4] % len(others)] = False
    for x, before in zip((found.keys, found.values), given_now[1:3], strict=True):
        assert torch.equal(x[:, :, others], before[:, :, others])


@ONCE
@pytest.mark.parametrize(
    ("rows", "groups", "width", "more"),
    [
        (4, 3, 24, {"kind": "neighbours of a half", "bias": True}),
        (8, 8, 16, {"kind": "by half a table"}),
        (5, 2, 16, {"kind": "neighbours", "plus": 1.0}),
    ],
)
def test_each_program_of_fused_int8_attention_is_independent_of_the_others_writes(rows, groups, width, more):
    given_now = list(made(rows, 40, 2, groups, width, 0, True, **more))
    given_now[1:3], scales = zip(*map(int8_codes, given_now[1:3]), strict=True)
    found, expected = Alone(*given_now, scales=scales), reference(*given_now, scales=scales)
    torch.testing.assert_close(found.out.float(), expected[0].float(), **CLOSE)
    for x, y in zip((found.keys, found.values), expected[1:3], strict=True):
        assert int((x.int() - y.int()).abs().max()) <= 1  # heads are rounded in fewer places, see CLOSE
        assert (x != y).float().mean() < 0.02
    for x, y in zip(found.scales, expected[3:], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=0)
    new = torch.zeros(SLOTS, dtype=torch.bool).index_fill_(0, given_now[4], True)
    for x, before in zip((found.keys, found.values, *found.scales), (*given_now[1:3], *scales), strict=True):
        assert torch.equal(x[:, :, ~new], before[:, :, ~new]) and not torch.equal(x[:, :, new], before[:, :, new])


@ONCE
def test_a_row_of_fused_attention_in_a_ring_is_right_and_has_the_same_bits_with_any_number_of_rows():
    given_most = made(16, 120, 2, 2, 24, WINDOW, True)
    most = Alone(*given_most)
    for x, y in zip((most.out, most.keys, most.values), reference(*given_most), strict=True):
        torch.testing.assert_close(x.float(), y, **CLOSE)
    for rows in (1, 7):
        found = Alone(*made(rows, 120, 2, 2, 24, WINDOW, True))
        slots = torch.arange(120, 136)[-rows:] % (2 * WINDOW)
        for few, many in ((found.keys, most.keys), (found.values, most.values)):
            assert torch.equal(few[:, :, slots], many[:, :, slots])


def twice(angles: Tensor) -> Tensor:
    return torch.cat((angles, angles), -1)


def each_twice(angles: Tensor) -> Tensor:
    return torch.repeat_interleave(angles, 2, dim=-1)


ROTATIONS = {
    "whole": (apply_rotary_pos_emb, 8, twice),
    "whole, as if in part": (phi3.apply_rotary_pos_emb, 8, twice),
    "in part": (phi3.apply_rotary_pos_emb, 4, twice),
    "by half a table": (gpt_oss.apply_rotary_pos_emb, 8, lambda angles: angles),
    "neighbours": (cohere.apply_rotary_pos_emb, 8, each_twice),
    "neighbours in part": (glm4.apply_rotary_pos_emb, 4, twice),
    "none": (lambda query, key, *_, **__: (query, key), 8, twice),
}
"""transformers' functions; angles of a position, and the columns that are made of them."""


class NormOfAll(LlamaRMSNorm):
    """A norm over all heads, as in OLMo 2."""

    def __init__(self, width: int, eps: float):
        super().__init__(2 * width, eps)

    def forward(self, x: Tensor) -> Tensor:
        pairs = x.unflatten(2, (-1, 2)).flatten(3)
        return super().forward(pairs).unflatten(3, (2, -1)).flatten(2, 3)


class Layers(nn.Module):
    """Two attentions on one cache, at the rows' positions and after them."""

    def __init__(self, norm=None, swapped=False, window=0, bias=False, rotation="whole", norm_last=False, int8=False):
        super().__init__()
        self.rotate, angles, self.columns = ROTATIONS[rotation]
        self.swapped, self.norm_last = swapped, norm_last
        self.weight, self.inv_freq = nn.Parameter(torch.randn(128, 64) / 8), torch.rand(angles)
        self.bias = nn.Parameter(torch.randn(128)) if bias else None
        self.q_norm, self.k_norm = (norm(16, eps=1e-5) if norm else nn.Identity() for _ in range(2))
        self.v_norm = nn.RMSNorm(16, 1e-5, elementwise_affine=False) if norm is nn.RMSNorm else nn.Identity()
        self.v_norm = Gemma4RMSNorm(16, 1e-5, with_scale=False) if norm is Gemma4RMSNorm else self.v_norm
        for each in (self.q_norm, self.k_norm):
            each.requires_grad_(False)
            for parameter in each.parameters():
                nn.init.uniform_(parameter, 0.5, 2).sub_(1.0 if norm is Gemma3RMSNorm else 0.0)
        self.to(torch.bfloat16)
        self.attention = CudaAttention(KVCacheShape(2, 16, 64, window, torch.bfloat16, int8=int8))

    def forward(self, x: Tensor, input_pos: Tensor) -> Tensor:
        for _ in range(2):
            angles = self.columns(torch.outer(input_pos.float(), self.inv_freq)[None])
            cos, sin = (angles.cos() * 1.0).to(x.dtype), angles.sin().to(x.dtype)
            product = bf16_small_m(x.reshape(-1, 64), self.weight, shared_counters(x)).reshape(1, -1, 128)
            product = product if self.bias is None else product + self.bias
            parts = product[..., :64], product[..., 64:96], product[..., 96:]
            query, key, value = (part.unflatten(-1, (-1, 16)) for part in parts)
            value = self.v_norm(value)
            if not self.norm_last:
                query, key = self.q_norm(query), self.k_norm(key)
            if self.swapped:
                query, key = (each.transpose(1, 2) for each in (query, key))
            query, key = self.rotate(query, key, cos, sin, unsqueeze_dim=1 if self.swapped else 2)
            if self.norm_last:
                query, key = self.q_norm(query), self.k_norm(key)
            if self.swapped:
                query, key = (each.transpose(1, 2) for each in (query, key))
            x = x + self.attention(query, key, value, self.attention.rows(input_pos), 0.25).flatten(2)
            input_pos = input_pos + 5
        return x


def fused_and_left(module: nn.Module, most: int) -> tuple[int, int]:
    """Compare a traced module's numbers with the eager ones. Returns the number of attentions that take a matmul's
    output, and of remaining cache writes."""
    torch.manual_seed(1)
    eager, shortest = deepcopy(module), 20 if most > 16 else 1
    rows = Dim("rows", min=shortest, max=most)
    example = torch.randn(1, 24 if most > 16 else 5, 64).bfloat16(), torch.arange(24 if most > 16 else 5)
    program = torch.export.export(module, example, dynamic_shapes=({1: rows}, {0: rows}), strict=False)
    rotate_in_attention(program)
    lowered = program.module()
    for start in (0, 7):
        given_now = torch.randn(1, shortest + 1, 64).bfloat16(), torch.arange(start, start + shortest + 1)
        torch.testing.assert_close(lowered(*given_now), eager(*given_now), **CLOSE)
    caches = dict(eager.named_buffers())
    for name, cache in lowered.named_buffers():
        codes = cache.dtype == torch.int8
        torch.testing.assert_close(cache.int(), caches[name].int(), atol=2, rtol=0) if codes else (
            torch.testing.assert_close(cache, caches[name], **CLOSE)
        )
    return tuple(sum(name in str(node.target) for node in program.graph.nodes) for name in ("of_product", "index_copy"))


@pytest.mark.first(1)
@pytest.mark.parametrize("window", [16])
@pytest.mark.parametrize("swapped", [True])
@pytest.mark.parametrize("norm", [None, nn.RMSNorm, LlamaRMSNorm, Gemma3RMSNorm, Gemma4RMSNorm])
def test_norms_rope_and_writes_between_a_product_and_its_attention_are_fused(norm, swapped, window):
    assert fused_and_left(Layers(norm, swapped, window), most=8) == (2, 0)


@pytest.mark.first(1)
@pytest.mark.parametrize("swapped", [False])
@pytest.mark.parametrize("rotation", ROTATIONS)
def test_rotary_embeddings_of_heads_with_a_bias_are_fused(rotation, swapped):
    assert fused_and_left(Layers(LlamaRMSNorm, swapped, bias=True, rotation=rotation), most=8) == (2, 0)


@pytest.mark.first(1)
@pytest.mark.parametrize("swapped", [True])
@pytest.mark.parametrize("norm", [None, Gemma4RMSNorm])
def test_writes_into_an_int8_cache_are_fused(norm, swapped):
    assert fused_and_left(Layers(norm, swapped, int8=True), most=8) == (2, 0)
    assert fused_and_left(Layers(norm, swapped, int8=True), most=40) == (0, 8)


OTHERWISE = {"norm of all heads": {"norm": NormOfAll}, "norm last": {"norm": LlamaRMSNorm, "norm_last": True}}


@pytest.mark.first(1)
@pytest.mark.parametrize("other", [*OTHERWISE.values(), {}], ids=[*OTHERWISE, "prefill"])
def test_attention_with_other_operations_is_not_fused(other):
    assert fused_and_left(Layers(**other), most=8 if other else 40) == (0, 4)
