"""Greedy ids are computed from scores before the softcap, by blocks on CUDA, and the first of equal scores wins."""

import pytest
import torch
from random_checkpoints import SIZE
from torch._inductor.decomposition import select_decomp_table
from transformers import Gemma2Config, Gemma2ForCausalLM

from eagle3.export.lowering.cuda.inductor.fusion import BLOCK, argmax_of_blocks, argmax_over_blocks, block_of
from eagle3.targets.attention import EagerAttention
from eagle3.targets.decoder_layers import DecoderLayersTarget


@pytest.mark.parametrize("columns", [2 * BLOCK + 1, 3 * BLOCK, 32000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_of_blocks_is_torchs_argmax_and_takes_the_first_of_equals(columns, dtype):
    torch.manual_seed(columns)
    x = torch.randn(2, 5, columns).to(dtype)
    x[0, 0] = -torch.inf
    x[0, 1] = -3.0  # all equal
    x[1, 0, [BLOCK - 1, BLOCK, columns - 1]] = 100.0
    x[1, 1, columns - 1] = 100.0
    x[1, 2, [BLOCK + 7, BLOCK + 5]] = 100.0
    for rows in (x, (x * 2).round()):  # most of the latter have many equals
        assert torch.equal(argmax_of_blocks(rows, -1), rows.argmax(-1))
        assert torch.equal(argmax_of_blocks(rows, 2, keepdim=True), rows.argmax(-1, keepdim=True))
    assert argmax_of_blocks(x, 0) is argmax_of_blocks(x[..., : 2 * BLOCK], -1) is NotImplemented


def test_blocks_divide_the_vocabularies_of_known_targets_without_remainder():
    blocks = {width: block_of(width) for width in (32000, 128256, 151936, 201088, 262144)}
    assert not any(width % size for width, size in blocks.items()) and blocks[262144] == BLOCK
    assert block_of(65537) == BLOCK  # a prime


def test_inductor_uses_the_blockwise_argmax_only_within_the_context():
    op = torch.ops.aten.argmax.default
    before = select_decomp_table().get(op)
    with argmax_over_blocks():
        assert select_decomp_table()[op] is argmax_of_blocks
    assert select_decomp_table().get(op) is before


@pytest.mark.parametrize("config", [{}, {"final_logit_softcapping": 2.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softcapped_scores_equal_transformers_logits_with_the_same_argmax(config, dtype):
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**SIZE, **({"final_logit_softcapping": None} | config))).to(dtype)
    model.lm_head.weight.data.mul_(40)  # logits far beyond the softcap, many of them equal
    target, state = DecoderLayersTarget(model, 64, EagerAttention, dtype), torch.randn(1, 64, SIZE["hidden_size"])
    state = state.to(dtype)
    scores, logits = target.scores(state), target.logits(state)
    head = model.lm_head(state)
    assert torch.equal(scores, head)
    cap = config.get("final_logit_softcapping")
    assert torch.equal(logits, (torch.tanh(head / cap) * cap if cap else head).float())
    chosen = logits.gather(-1, scores.argmax(-1, keepdim=True))[..., 0]
    assert torch.equal(chosen, logits.amax(-1))
    if cap:
        assert not torch.equal(scores.argmax(-1), logits.argmax(-1))  # of equals the score's is not always the first
