"""Families and kinds of draft head exported and run, and a family that nobody named: random weights, and the tokens are
greedy decoding's."""

import pytest
import torch
from dialect_files import IDS, PEAGLE, random_eagle, random_peagle, write
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


def taps(config) -> tuple[int, ...]:
    return 0, config.num_hidden_layers - 1, config.num_hidden_layers


DRAFTS = {
    "gemma4-31B": lambda folder, config: save_random_draft(folder, config, taps(config)),
    "llama3.1-8B": lambda folder, config: write(folder, "safeailab", random_eagle(), True, draft_vocab_size=None),
    "qwen3-4B": lambda folder, config: write(folder, "speculators", random_peagle(), **PEAGLE, **{IDS: [0, 2, 3]}),
    "auto": lambda folder, config: save_random_draft(folder, config, taps(config), window=12),
    "gpt-oss-20b": lambda folder, config: save_random_draft(folder, config, taps(config)),
    "llama4-maverick": lambda folder, config: save_random_draft(folder, config, taps(config)),
}
"""An EAGLE-3, an EAGLE that shares the target's embedding and lm_head, a P-EAGLE, an EAGLE-3 with a window; targets
with sinks and experts with biases, with chunks, rotations on complex numbers and experts in some of the layers."""
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
    draft = DRAFTS[name](tmp_path / "draft", model.config)
    flags = {"target_model": name, "checkpoint": tmp_path / "target", "draft": draft, "output_dir": tmp_path / "out"}
    lengths = {"chain_len": 2, "max_seq_len": 128, "max_prefill": 12 if name == "auto" else 16}
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
    assert session.metadata.proposals == (2 if name == "qwen3-4B" else 1)
    check_draft_slots(session, load_speculator(plan, EagerAttention, torch.float32))


def check_draft_slots(session, speculator):
    """Slots beyond the head's window, in chunks and one by one, as the eager head computes them."""
    generator = torch.Generator().manual_seed(9)
    size = speculator.draft.norm.weight.numel() if speculator.draft.norm else 64
    for start, end in ((0, 12), (12, 24), (24, 25), (25, 26), (25, 33)):
        tokens = torch.randint(0, 96, (1, end - start), generator=generator)
        feature = torch.randn(1, end - start, size, generator=generator)
        token, state = session.draft_decode(tokens, feature, torch.arange(start, end))
        wanted, expected = speculator.draft_decode(tokens, feature, torch.arange(start, end))
        assert token.tolist() == wanted.tolist()
        torch.testing.assert_close(state, expected, atol=1e-4, rtol=1e-4)
