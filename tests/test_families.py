"""Every family exported and run, and one that nobody named: a random model, a random draft, and the tokens are greedy
decoding's."""

import pytest
import torch
from family_configs import family_config
from random_checkpoints import random_model, save_random_draft
from transformers import AutoModelForCausalLM

from eagle3.export.config import ExportConfig
from eagle3.export.pipeline import load_speculator, run_export
from eagle3.export.plan import make_plan
from eagle3.export.preflight import preflight
from eagle3.export.progress import Progress
from eagle3.export.twin.randomize import randomize
from eagle3.runner.artifact import open_artifact, open_session
from eagle3.runner.loop import complete
from eagle3.targets.attention import EagerAttention

DRAFTS = {
    "gemma4-31B": {},
    "llama3.1-8B": {"draft_vocab": 96, "changes": {"d2t": None, "t2d": None}},  # speaks the whole vocabulary
    "qwen3-4B": {"changes": {"embed_tokens.weight": None}},  # shares the target's embedding
    "auto": {"window": 12},
    "gpt-oss-20b": {},  # sinks, experts with biases
    "llama4-maverick": {},  # chunks, rotations on complex numbers, experts in some of the layers
}
EXPERTS = ("gpt-oss-20b", "llama4-maverick")
WINDOWS = {"gemma4-31B": 16, "auto": 16, "gpt-oss-20b": 16, "llama4-maverick": 24}


def unnamed_model():
    """A family that is in no table: norms after attention and MLP, sliding and full layers."""
    config = family_config("olmo3")
    config.num_hidden_layers, config.layer_types = 3, ["sliding_attention", "full_attention", "sliding_attention"]
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    randomize(model, seed=5)
    return model


@pytest.mark.parametrize("name", DRAFTS)
def test_export_and_run(name, tmp_path):
    layers = 2 if name in EXPERTS else 3
    model = unnamed_model() if name == "auto" else random_model(name, num_hidden_layers=layers)
    model.save_pretrained(tmp_path / "target")
    draft = save_random_draft(tmp_path / "draft", model.config, aux_layers=(0, layers - 1, layers), **DRAFTS[name])
    flags = {"target_model": name, "checkpoint": tmp_path / "target", "draft": draft, "output_dir": tmp_path / "out"}
    lengths = {"chain_len": 2, "max_seq_len": 128, "max_prefill": DRAFTS[name].get("window", 16)}
    plan = make_plan(ExportConfig(**flags, **lengths, backend="xnnpack"))
    record = run_export(plan, preflight(plan, Progress()), Progress())
    assert record["check"]["compared_with_eager"]
    session = open_session(open_artifact(tmp_path / "out"))
    assert session.metadata.sliding_window == WINDOWS.get(name, 0)
    for length in (3, 12, 70):
        prompt = torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        expected = list(prompt)
        for _ in range(24):
            expected.append(int(model(torch.tensor([expected])).logits[0, -1].argmax()))
        assert complete(session, prompt, max_new_tokens=24, stop_ids=[]).token_ids == expected[length:]
    if name == "auto":
        check_draft_slots(session, load_speculator(plan, EagerAttention, torch.float32))


def check_draft_slots(session, speculator):
    """Slots beyond the head's window, in chunks and one by one, as the eager head computes them."""
    generator = torch.Generator().manual_seed(9)
    size = speculator.draft.fc.out_features
    for start, end in ((0, 12), (12, 24), (24, 25), (25, 26), (25, 33)):
        tokens = torch.randint(0, 96, (1, end - start), generator=generator)
        feature = torch.randn(1, end - start, size, generator=generator)
        token, state = session.draft_decode(tokens, feature, torch.arange(start, end))
        logits, expected = speculator.draft(tokens, feature, torch.arange(start, end), last=True)
        assert token.item() == speculator.draft.target_ids(logits).item()
        torch.testing.assert_close(state, expected, atol=1e-4, rtol=1e-4)
