"""Random targets with recurrent layers are exported with random EAGLE-3 heads and run: their tokens equal
transformers' greedy ones."""

import pytest
import torch
from family_exports import random_family, taps
from random_checkpoints import save_random_draft
from scripted import ThreeMethods

from eagle3.export import ExportConfig, export
from eagle3.runner.artifact.opening import open_artifact
from eagle3.runner.hosts.opening import open_session
from eagle3.runner.loop.cached_tokens import CachedTokens
from eagle3.runner.loop.generation import complete

CASES = (("kimi_linear", "8da8w", ["linear_attention", "full_attention"]), ("lara_mini", None, None))
"""LaraMini's checkpoint is split into views, and it has a sliding window. Falcon-H1, with Mamba 2, is exported by
``family_exports.py``, and every family with a state by ``scripts/survey/check_recurrent.py``."""


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case[0])
def exported(request, tmp_path_factory):
    """Return a session, and a function that asserts that tokens follow a text. They are transformers' tokens or, if
    linears are quantized, some of them are those of another session, which computes the whole text."""
    family, qlinear, kinds = request.param
    folder, model = tmp_path_factory.mktemp("recurrent"), random_family(family, kinds)
    model.save_pretrained(folder / "target")
    save_random_draft(folder / "draft", model.config, taps(model.config))
    paths = {"checkpoint": folder / "target", "draft": folder / "draft", "output_dir": folder / "out"}
    longest = getattr(model.config, "sliding_window", None) or 100
    lengths = {"chain_len": 2, "max_seq_len": 256, "max_prefill": min(longest, 100)}
    export(ExportConfig("auto", **paths, **lengths, backend="xnnpack", speculate=True, qlinear=qlinear))
    session, other = (open_session(open_artifact(folder / "out")) for _ in range(2))

    def follow(text: list[int], tokens: list[int]) -> None:
        if qlinear:
            for at in range(0, len(tokens), 4):
                said = complete(other, text + tokens[:at], max_new_tokens=1, stop_ids=[])
                assert said.token_ids == tokens[at : at + 1]
        else:
            logits = model(torch.tensor([text + tokens[:-1]])).logits[0]
            assert logits[len(text) - 1 :].argmax(-1).tolist() == tokens

    return session, follow


@pytest.mark.whole
def test_the_tokens_of_a_fused_round_and_of_three_methods_are_greedy(exported):
    """The prompts have a part of a window, less than a chunk, a block, and two chunks of more than a block."""
    session, follow = exported
    for length in (3, 12, 70, 190):
        prompt = torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        both = (complete(each, prompt, max_new_tokens=24, stop_ids=[]) for each in (session, ThreeMethods(session)))
        fused, three = (said.token_ids for said in both)
        assert fused == three and len(fused) == 24
        follow(prompt, fused)


@pytest.mark.whole
def test_a_dialogue_reuses_the_states_of_its_earlier_turns(exported):
    """Each turn keeps the last answer, or drops its last tokens."""
    session, follow = exported
    generator = torch.Generator().manual_seed(1)
    text, cached, reused = [], CachedTokens(), []
    for dropped in (0, 0, 3, 0, 8):
        text = text[: len(text) - dropped] + torch.randint(3, 96, (30,), generator=generator).tolist()
        said = complete(session, text, max_new_tokens=8, stop_ids=[], cached=cached)
        follow(text, said.token_ids)
        reused.append(said.stats.reused_prompt_tokens)
        text += said.token_ids
    assert reused[0] == 0 and all(count > 0 for count in reused[1:])
