"""Random targets of Mamba 2 are exported with random EAGLE-3 heads and run: their tokens equal transformers' greedy
ones."""

import pytest
import torch
from family_exports import random_family, taps
from random_checkpoints import save_random_draft
from scripted import ThreeMethods

from eagle3.export import ExportConfig, export
from eagle3.runner.artifact.opening import open_artifact
from eagle3.runner.cache.cached_tokens import CachedTokens
from eagle3.runner.hosts.opening import open_session
from eagle3.runner.rounds.loop import complete

CASES = (("bamba", None), ("granitemoehybrid", None), ("nemotron_h", None), ("bamba", "8da8w"))
"""Falcon-H1 is exported by ``family_exports.py``."""


@pytest.fixture(scope="module", params=CASES, ids=lambda case: " ".join(filter(None, case)))
def exported(request, tmp_path_factory):
    """transformers' model, a session over its artifact, and whether its linears are quantized."""
    family, qlinear = request.param
    folder, model = tmp_path_factory.mktemp("mamba2"), random_family(family)
    model.save_pretrained(folder / "target")
    save_random_draft(folder / "draft", model.config, taps(model.config))
    paths = {"checkpoint": folder / "target", "draft": folder / "draft", "output_dir": folder / "out"}
    lengths = {"chain_len": 2, "max_seq_len": 256, "max_prefill": 100}
    export(ExportConfig("auto", **paths, **lengths, backend="xnnpack", speculate=True, qlinear=qlinear))
    return model, open_session(open_artifact(folder / "out")), qlinear is not None


def greedy(model, session, is_quantized: bool, text: list[int], count: int) -> list[int]:
    """Return the tokens that follow ``text``: of transformers, or of the artifact's ``prefill`` of the whole text."""
    text, start = list(text), len(text)
    for _ in range(count):
        if is_quantized:
            said = complete(session, text, max_new_tokens=1, stop_ids=[]).token_ids
            text += said
        else:
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[start:]


@pytest.mark.whole
def test_the_tokens_of_a_fused_round_and_of_three_methods_are_greedy(exported):
    """The prompts have a part of a window, less than a chunk, a block, and two chunks of more than a block."""
    _, session, _ = exported
    for length in (3, 12, 70, 190):
        prompt = torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        expected = greedy(*exported, prompt, 24)
        for each in (session, ThreeMethods(session)):
            assert complete(each, prompt, max_new_tokens=24, stop_ids=[]).token_ids == expected


@pytest.mark.whole
def test_a_dialogue_reuses_the_states_of_its_earlier_turns(exported):
    """Each turn keeps the last answer, or drops its last tokens."""
    _, session, _ = exported
    generator = torch.Generator().manual_seed(1)
    text, cached, reused = [], CachedTokens(), []
    for dropped in (0, 0, 3, 0, 8):
        text = text[: len(text) - dropped] + torch.randint(3, 96, (30,), generator=generator).tolist()
        expected = greedy(*exported, text, 8)
        said = complete(session, text, max_new_tokens=8, stop_ids=[], cached=cached)
        assert said.token_ids == expected
        reused.append(said.stats.reused_prompt_tokens)
        text += expected
    assert reused[0] == 0 and all(count > 0 for count in reused[1:])
