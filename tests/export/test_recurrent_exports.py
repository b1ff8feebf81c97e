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

CASES = (("kimi_linear", "8da8w"), ("lara_mini", None))
"""LaraMini's checkpoint is split into views, and it has a sliding window. Falcon-H1, with Mamba 2, is exported by
``family_exports.py``, and every family with a state by ``scripts/survey/check_recurrent.py``."""


@pytest.fixture(scope="module", params=CASES, ids=lambda case: " ".join(filter(None, case)))
def exported(request, tmp_path_factory):
    """Return a session, and a function that returns the token after a text. It is transformers' token or, if linears
    are quantized, that of another session, which computes the whole text."""
    family, qlinear = request.param
    folder, model = tmp_path_factory.mktemp("recurrent"), random_family(family)
    model.save_pretrained(folder / "target")
    save_random_draft(folder / "draft", model.config, taps(model.config))
    paths = {"checkpoint": folder / "target", "draft": folder / "draft", "output_dir": folder / "out"}
    longest = getattr(model.config, "sliding_window", None) or 100
    lengths = {"chain_len": 2, "max_seq_len": 256, "max_prefill": min(longest, 100)}
    export(ExportConfig("auto", **paths, **lengths, backend="xnnpack", speculate=True, qlinear=qlinear))
    session, other = (open_session(open_artifact(folder / "out")) for _ in range(2))

    def following(text: list[int]) -> int:
        if qlinear:
            return complete(other, text, max_new_tokens=1, stop_ids=[]).token_ids[0]
        return int(model(torch.tensor([text])).logits[0, -1].argmax())

    return session, following


def greedy(following, text: list[int], count: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(following(text + tokens))
    return tokens


@pytest.mark.whole
def test_the_tokens_of_a_fused_round_and_of_three_methods_are_greedy(exported):
    """The prompts have a part of a window, less than a chunk, a block, and two chunks of more than a block."""
    session, following = exported
    for length in (3, 12, 70, 190):
        prompt = torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        expected = greedy(following, prompt, 24)
        for each in (session, ThreeMethods(session)):
            assert complete(each, prompt, max_new_tokens=24, stop_ids=[]).token_ids == expected


@pytest.mark.whole
def test_a_dialogue_reuses_the_states_of_its_earlier_turns(exported):
    """Each turn keeps the last answer, or drops its last tokens."""
    session, following = exported
    generator = torch.Generator().manual_seed(1)
    text, cached, reused = [], CachedTokens(), []
    for dropped in (0, 0, 3, 0, 8):
        text = text[: len(text) - dropped] + torch.randint(3, 96, (30,), generator=generator).tolist()
        expected = greedy(following, text, 8)
        said = complete(session, text, max_new_tokens=8, stop_ids=[], cached=cached)
        assert said.token_ids == expected
        reused.append(said.stats.reused_prompt_tokens)
        text += expected
    assert reused[0] == 0 and all(count > 0 for count in reused[1:])
