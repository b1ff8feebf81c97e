"""With ``--draft-window``, a head with full attention attends only to the last tokens, like a head trained with that
window."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from draft_oracle import check_draft
from eager import eager_session, eager_speculator
from random_checkpoints import random_model, save_random_draft, save_random_mlp

from eagle3.export.configuration.config import ExportConfig
from eagle3.export.draft.kinds.eagle.description import windowed
from eagle3.export.draft.loading import load_draft
from eagle3.export.draft.reading import read_draft
from eagle3.export.planning.plan import make_plan
from eagle3.runner.loop.generation import complete
from eagle3.targets import TARGETS
from eagle3.targets.attention import EagerAttention

WINDOW = 16
TINY = TARGETS["gemma4-tiny"]


def plan_of(**flags):
    return make_plan(ExportConfig("gemma4-tiny", output_dir=None, backend="xnnpack", **flags))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random target, a head with full attention, and the same head with the window in its configuration."""
    folder = tmp_path_factory.mktemp("windows")
    model = random_model("llama3.1-8B")
    model.save_pretrained(folder / "target")
    save_random_draft(folder / "full", model.config, (0, 2, 3))
    save_random_draft(folder / "sliding", model.config, (0, 2, 3), window=WINDOW)
    shutil.copy(folder / "full" / "model.safetensors", folder / "sliding" / "model.safetensors")
    return folder


def test_draft_window_gives_the_numbers_of_a_head_with_that_window(folder):
    given, wanted = windowed(read_draft(folder / "full"), WINDOW), read_draft(folder / "sliding")
    assert given.windows == wanted.windows == (WINDOW,) and given.window == WINDOW
    heads = [load_draft(each, 128, torch.float32, EagerAttention, None) for each in (given, wanted)]
    full = load_draft(read_draft(folder / "full"), 128, torch.float32, EagerAttention, None)
    generator, slot, apart = torch.Generator().manual_seed(3), 0, 0.0
    for rows in (9, 12, 1, 1, 12, 3, 12):
        tokens = torch.randint(0, 96, (1, rows), generator=generator)
        features = torch.randn(1, rows, 64, generator=generator)
        found, expected = (head(tokens, features, torch.arange(slot, slot + rows)) for head in heads)
        torch.testing.assert_close(found, expected, atol=0, rtol=0)
        logits, _ = full(tokens, features, torch.arange(slot, slot + rows))
        apart = max(apart, float((logits - found[0]).abs().max()))
        slot += rows
        if slot <= WINDOW:
            assert apart < 1e-5  # within the window nothing changes
    assert apart > 0.1
    assert check_draft(given, 3)["logits"] < 1e-4


def test_tokens_equal_greedy_decoding_after_many_draft_windows():
    plan = plan_of(draft_window=WINDOW)
    session = eager_session(plan, eager_speculator(plan))
    assert session.metadata.draft_sliding_window == WINDOW
    assert plan.method("prefill").max_len <= WINDOW
    prompt = torch.randint(3, 800, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    speculated, plain = (complete(session, prompt, max_new_tokens=40, stop_ids=[], chain=k) for k in (3, 0))
    assert speculated.token_ids == plain.token_ids and speculated.stats.num_drafts


def test_an_export_reports_a_context_longer_than_the_heads_training_and_the_flag_to_type(folder, tmp_path):
    short = Path(shutil.copytree(folder / "full", tmp_path / "short"))
    config = json.loads((short / "config.json").read_text())
    config["transformer_layer_config"]["max_position_embeddings"] = 64
    (short / "config.json").write_text(json.dumps(config))
    given = {"checkpoint": folder / "target", "draft": short, "max_seq_len": 128, "backend": "xnnpack"}
    plan = make_plan(ExportConfig("llama3.1-8B", **given))
    assert "was made for 64 positions, the context has 128" in plan.warnings[0]
    assert plan.warnings[0].endswith(": type --draft-window 64 to let it attend to the last 64 tokens only")
    assert not make_plan(ExportConfig("llama3.1-8B", **given, draft_window=64)).warnings
    assert len(make_plan(ExportConfig("llama3.1-8B", **given, draft_window=65)).warnings) == 1


def test_draft_window_is_refused_for_heads_without_full_attention(folder, tmp_path):
    with pytest.raises(ValueError, match="trained with a sliding window of 16 tokens"):
        windowed(read_draft(folder / "sliding"), 8)
    head = save_random_mlp(tmp_path / "mlp", random_model("llama3.1-8B").config)
    with pytest.raises(ValueError, match="--draft-window 8 is for EAGLE heads.*MLP speculator"):
        windowed(read_draft(head), 8)
