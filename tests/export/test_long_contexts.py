"""In contexts of 4k and 8k tokens, tokens equal transformers': with heads whose window is far shorter than the text,
with 8-bit caches, after a reused prefix, across the end of a ring, and up to the last slot."""

import pytest
import torch
from eager import eager_session
from random_checkpoints import random_model, save_random_draft
from transformers import AutoModelForCausalLM, DynamicCache

from eagle3.export.configuration.config import ExportConfig
from eagle3.export.planning.plan import make_plan
from eagle3.runner.loop.cached_tokens import CachedTokens
from eagle3.runner.loop.generation import complete
from eagle3.targets.decoder_layers import past_name

LONG = 8192
WINDOW = 256
"""The window of the target's sliding layers and of the head; a ring has twice as many slots."""
SHORT = 8 * 2 * WINDOW - 10
"""A prompt's length, so that rounds are rolled back on both sides of a ring's end."""
LAYERS = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "max_position_embeddings": LONG,
}
NEW_TOKENS = 30
REGRET = 0.05
"""Nats by which a token that is chosen over caches in 8 bits may be less likely than the likeliest."""
SHARPER = 8.0
"""Factor of the queries: with random queries a row would attend equally to all tokens of a long text."""
HEADS = {
    "draft window": ("full", {"draft_window": WINDOW}),
    "8 bits": ("sliding", {"kv_cache": "int8"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target with sliding layers and a full-attention layer, a head with full attention, and a head with a window."""
    folder = tmp_path_factory.mktemp("long")
    model = random_model("qwen3-4B", **LAYERS)
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight.mul_(SHARPER)
    model.save_pretrained(folder / "target")
    save_random_draft(folder / "full", model.config, (0, 1, 2))
    save_random_draft(folder / "sliding", model.config, (0, 1, 2), window=WINDOW)
    return folder


@pytest.fixture(scope="module", params=HEADS)
def found(request, folder):
    """The results for a short prompt, and for one that begins with it and is as long as the context allows."""
    (head, flags), text = HEADS[request.param], random_text()
    given = {"checkpoint": folder / "target", "draft": folder / head, "cuda_arch": "sm_90", "output_dir": None}
    plan = make_plan(ExportConfig("qwen3-4B", max_seq_len=LONG, max_prefill=WINDOW, chain_len=3, **given, **flags))
    session, cached, said = eager_session(plan), CachedTokens(), []
    for prompt in (text[:SHORT], text[: LONG - NEW_TOKENS]):
        said.append(complete(session, prompt, max_new_tokens=2 * NEW_TOKENS, stop_ids=[], cached=cached))
    return request.param, text, said


def random_text() -> list[int]:
    return torch.randint(3, 96, (LONG,), generator=torch.Generator().manual_seed(7)).tolist()


@torch.no_grad()
def scores_of(folder, text: list[int], count: int) -> torch.Tensor:
    """Return transformers' log-probabilities of the last ``count`` tokens of a text."""
    model, cache, found = AutoModelForCausalLM.from_pretrained(folder / "target").float(), DynamicCache(), []
    for start in range(0, len(text) - 1, 1024):
        chunk = torch.tensor([text[start : min(start + 1024, len(text) - 1)]])
        found.append(model(chunk, **{past_name(model): cache}).logits[0].log_softmax(-1))
    return torch.cat(found)[-count:]


@pytest.mark.first(1)
def test_long_context_tokens_are_transformers_most_likely_ones_up_to_the_last_slot(found, folder):
    kind, text, said = found
    for prompt, result in zip((text[:SHORT], text[: LONG - NEW_TOKENS]), said, strict=True):
        tokens = torch.tensor(result.token_ids)
        scores = scores_of(folder, prompt + result.token_ids, len(tokens))
        regret = scores.max(-1).values - scores.gather(1, tokens[:, None])[:, 0]
        assert float(regret.max()) <= (REGRET if kind == "8 bits" else 1e-5)
    assert len(said[0].token_ids) == 2 * NEW_TOKENS and len(said[1].token_ids) == NEW_TOKENS
    assert said[1].stats.reused_prompt_tokens >= SHORT - WINDOW
    assert said[0].stats.num_drafts > NEW_TOKENS  # most of the window's tokens were rejected
