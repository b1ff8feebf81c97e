"""Every family exported and run: a random model, a random draft, and the tokens are greedy decoding's."""

import pytest
import torch
from commands import run_command
from random_checkpoints import random_model, save_random_draft

from eagle3.export.cli import main as export_main
from eagle3.runner.artifact import open_artifact, open_session
from eagle3.runner.loop import complete

DRAFTS = {
    "gemma4-31B": {},
    "llama3.1-8B": {"draft_vocab": 96, "changes": {"d2t": None, "t2d": None}},  # speaks the whole vocabulary
    "qwen3-4B": {"changes": {"embed_tokens.weight": None}},  # shares the target's embedding
}


@pytest.mark.parametrize("name", DRAFTS)
def test_export_and_run(name, tmp_path):
    model = random_model(name, num_hidden_layers=3)
    model.save_pretrained(tmp_path / "target")
    draft = save_random_draft(tmp_path / "draft", model.config, aux_layers=(0, 2, 3), **DRAFTS[name])
    out = tmp_path / "out"
    run_command(
        export_main,
        *("--target-model", name, "--checkpoint", tmp_path / "target", "--draft", draft),
        *("--backend", "xnnpack", "--chain-len", 2, "--max-seq-len", 128, "--max-prefill", 16, "--output_dir", out),
    )
    session = open_session(open_artifact(out))
    assert session.metadata.sliding_window == (16 if name == "gemma4-31B" else 0)
    for length in (3, 12, 70):
        prompt = torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        expected = list(prompt)
        for _ in range(24):
            expected.append(int(model(torch.tensor([expected])).logits[0, -1].argmax()))
        assert complete(session, prompt, max_new_tokens=24, stop_ids=[]).token_ids == expected[length:]
