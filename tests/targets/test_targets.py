"""A target equals transformers' own model: same logits and same hidden states at the taps, for any split into
forwards."""

import pytest
import torch
from random_checkpoints import FAMILIES
from torch.nn import functional as F

from eagle3.targets.decoder_layers import text_name

TAPS = (0, 2, 5, 6)  # the embedding, two inner layers, the last layer's output
LENGTH = 60  # almost four sliding windows of the Gemma: its ring of two windows wraps


def run(target, tokens, input_pos):
    state, taps = target(tokens[:, input_pos], input_pos, TAPS)
    return target.logits(state), taps


SPLIT = [(0, 16), (16, 32), (32, 41), (41, 45), (45, 46), (46, 60)]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_taps_equal_transformers_and_rejected_rows_leave_no_trace(name, checkpoints, eager_target):
    """The tap past the last layer is its output before the final norm."""
    model, _ = checkpoints(name)
    tokens, wrong = torch.randint(0, 96, (2, 1, LENGTH), generator=torch.Generator().manual_seed(2))
    last = []
    handle = model.model.layers[-1].register_forward_hook(lambda module, args, out: last.append(out))
    expected = model(tokens, output_hidden_states=True)
    handle.remove()
    states = (*expected.hidden_states[:-1], last[0][0] if isinstance(last[0], tuple) else last[0])
    target = eager_target(name)
    for start, end in SPLIT:
        if start:
            run(target, wrong, torch.arange(start, min(start + 4, LENGTH)))
        logits, taps = run(target, tokens, torch.arange(start, end))
        torch.testing.assert_close(logits, expected.logits[:, start:end], atol=1e-4, rtol=1e-4)
        for tap, state in zip(TAPS[: 3 + (start == 0)], taps, strict=False):
            torch.testing.assert_close(state, states[tap][:, start:end], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama3.1-8B", "qwen3-4B", "gemma3-27B", "gemma4-31B", "gemma4-E2B"])
def test_a_head_without_an_embedding_gets_the_targets_rows_and_its_scale_separately(name, checkpoints, eager_target):
    model, _ = checkpoints(name)
    target, tokens = eager_target(name), torch.arange(1, 20)[None]
    rows = F.embedding(tokens, model.get_input_embeddings().weight)
    own = model.get_input_embeddings()(tokens)
    assert torch.equal(target.embed_tokens(tokens), rows)
    torch.testing.assert_close(target.embed(tokens), own)
    assert torch.equal(own, rows) == (not name.startswith("gemma"))
    shared = [weight for weight in target.parameters() if weight is target.embed_tokens.weight]
    assert len(shared) == 1


def test_the_text_model_of_a_multimodal_checkpoint_is_found_by_its_names():
    names = {
        "model.layers.0.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight",
        "model.language_model.layers.0.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight",
        "language_model.model.layers.0.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight",
        "language_model.lm_head.weight": "lm_head.weight",
    }
    assert {name: text_name(name) for name in names} == names
