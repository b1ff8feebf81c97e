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


@pytest.mark.first(13)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "split", [[(0, 16), (16, 32), (32, 48), (48, 60)], [(0, 9), (9, 13), (13, 14), (14, 30), (30, 46), (46, 60)]]
)
def test_logits_and_taps_equal_transformers(name, split, checkpoints, eager_target):
    model, _ = checkpoints(name)
    torch.manual_seed(0)
    tokens = torch.randint(0, 96, (1, LENGTH))
    expected = model(tokens, output_hidden_states=True)
    target = eager_target(name)
    for start, end in split:
        logits, taps = run(target, tokens, torch.arange(start, end))
        torch.testing.assert_close(logits, expected.logits[:, start:end], atol=1e-4, rtol=1e-4)
        for tap, state in zip(TAPS[:3], taps[:3], strict=True):
            torch.testing.assert_close(state, expected.hidden_states[tap][:, start:end], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tap_past_the_last_layer_is_its_output_before_the_final_norm(name, checkpoints, eager_target):
    model, _ = checkpoints(name)
    tokens = torch.randint(0, 96, (1, 10), generator=torch.Generator().manual_seed(1))
    seen = []
    handle = model.model.layers[-1].register_forward_hook(lambda module, args, out: seen.append(out))
    model(tokens)
    handle.remove()
    output = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    _, taps = run(eager_target(name), tokens, torch.arange(10))
    torch.testing.assert_close(taps[3], output, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [*FAMILIES, "gemma4-E2B"])
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


@pytest.mark.parametrize("name", FAMILIES)
def test_writing_a_position_again_replaces_it(name, checkpoints, eager_target):
    model, _ = checkpoints(name)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 96, (1, LENGTH), generator=generator)
    target = eager_target(name)
    for start in range(0, 48, 12):
        run(target, tokens, torch.arange(start, start + 12))
    for start in range(48, 56, 2):
        wrong = torch.randint(0, 96, (1, LENGTH), generator=generator)
        run(target, wrong, torch.arange(start, start + 4))  # rejected: none of it may be seen later
        logits, _ = run(target, tokens, torch.arange(start, start + 2))
        expected = model(tokens[:, : start + 2]).logits[:, -2:]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_the_text_model_of_a_multimodal_checkpoint_is_found_by_its_names():
    names = {
        "model.layers.0.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight",
        "model.language_model.layers.0.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight",
        "language_model.model.layers.0.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight",
        "language_model.lm_head.weight": "lm_head.weight",
    }
    assert {name: text_name(name) for name in names} == names
