"""Families and kinds of draft head with random weights, and a family without an entry, are exported and run: their
tokens equal greedy decoding."""

import json

import pytest
import torch
from commands import run_command
from family_exports import DRAFTS, EXPERTS, FOR_LLAMA, WITH_SPECULATE, WITHOUT_LOGITS, family_model, family_plan
from scripted import ThreeMethods

from eagle3.export.pipeline import load_speculator
from eagle3.runner.artifact.opening import open_artifact
from eagle3.runner.commands.inspect import main as inspect_main
from eagle3.runner.contract import SPECULATE
from eagle3.runner.hosts.opening import open_session
from eagle3.runner.loop.cached_tokens import CachedTokens
from eagle3.runner.loop.generation import complete
from eagle3.targets.attention import EagerAttention

OF_16 = ("gemma4-31B", "gemma4-E2B", "assistant", "auto", "gpt-oss-20b", "lfm2")
WINDOWS = dict.fromkeys(OF_16, 16) | {"llama4-maverick": 24}
WITHOUT_DRAFT_CACHE = ("assistant", "gemma4-E2B")
PARALLEL = ("qwen3-4B", "gemma4-E2B", "dflash", *EXPERTS, *FOR_LLAMA)
TAPS = {
    **dict.fromkeys(("llama3.1-8B", *WITHOUT_DRAFT_CACHE), "the target's final state after its norm"),
    **dict.fromkeys((*EXPERTS, "falcon_h1"), "hidden_states 0, 1, 2"),
    **dict.fromkeys(("dflash2", "dspark"), "hidden_states 1, 3, 4"),
    "qwen3.5-9B": "the target's final state after its norm",
}


@pytest.mark.first(1)
@pytest.mark.parametrize("name", DRAFTS)
def test_an_exported_familys_tokens_equal_greedy_decoding(name, family_exports):
    model, out = family_model(name), family_exports / name / "out"
    record = json.loads((out / "export.json").read_text())
    assert record["check"]["compared_with_eager"]
    assert record["manifest"]["taps_are"].startswith(TAPS.get(name, "hidden_states 0, 2, 3"))
    session = open_session(open_artifact(out))
    assert session.metadata.sliding_window == WINDOWS.get(name, 0)
    assert session.metadata.proposals == (2 if name in PARALLEL else 1)
    for length in (3, 12, 70):
        prompt = torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        expected = list(prompt)
        for _ in range(24):
            expected.append(int(model(torch.tensor([expected])).logits[0, -1].argmax()))
        fused, three = (
            complete(each, prompt, max_new_tokens=24, stop_ids=[]) for each in (session, ThreeMethods(session))
        )
        assert fused.token_ids == three.token_ids == expected[length:]
        assert fused.stats.counts() == three.stats.counts()
        assert (SPECULATE in fused.stats.method_calls) == (name in WITH_SPECULATE)


def test_a_dialogue_reuses_the_convolution_states_of_its_earlier_turns(family_exports):
    """Each turn keeps the last answer, or drops its last tokens; the rings of 34 positions wrap."""
    model, session = family_model("lfm2"), open_session(open_artifact(family_exports / "lfm2" / "out"))
    generator = torch.Generator().manual_seed(1)
    text, cached, reused = [], CachedTokens(), []
    for dropped in (0, 0, 3, 0, 5):
        text = text[: len(text) - dropped] + torch.randint(3, 96, (10,), generator=generator).tolist()
        expected = list(text)
        for _ in range(8):
            expected.append(int(model(torch.tensor([expected])).logits[0, -1].argmax()))
        said = complete(session, text, max_new_tokens=8, stop_ids=[], cached=cached)
        assert said.token_ids == expected[len(text) :]
        reused.append(len(text) - 10 - said.stats.reused_prompt_tokens)
        text = expected
    assert reused == [0, 1, 1, 1, 1]


@pytest.mark.parametrize("name", [name for name in DRAFTS if name not in WITHOUT_DRAFT_CACHE])
def test_draft_slots_beyond_a_window_equal_the_eager_heads(name, family_exports):
    """Tokens are given in chunks and one by one."""
    session = open_session(open_artifact(family_exports / name / "out"))
    speculator = load_speculator(family_plan(name, family_exports / name), EagerAttention, torch.float32)
    generator = torch.Generator().manual_seed(9)
    for start, end in ((0, 12), (12, 24), (24, 25), (25, 26), (25, 33)):
        tokens = torch.randint(0, 96, (1, end - start), generator=generator)
        feature = torch.randn(1, end - start, 64, generator=generator)
        token, state, logits = session.draft_decode(tokens, feature, torch.arange(start, end))
        wanted, *expected = speculator.draft_decode(tokens, feature, torch.arange(start, end))
        assert token.tolist() == wanted.tolist()
        found = [state] if name in WITHOUT_LOGITS else [state, logits]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", WITHOUT_DRAFT_CACHE)
def test_a_head_without_a_cache_proposes_the_tokens_of_the_eager_head(name, family_exports):
    """The calls are a prefill, then a verify window whose last rows are rejected, beyond the ring of two windows. An
    assistant reads the caches that the target's methods wrote."""
    session = open_session(open_artifact(family_exports / name / "out"))
    speculator = load_speculator(family_plan(name, family_exports / name), EagerAttention, torch.float32)
    generator = torch.Generator().manual_seed(9)
    for start in range(0, 60, 15):
        for method, end in (("prefill", start + 12), ("target_verify", start + 15)):
            tokens = torch.randint(0, 96, (1, end - start - 12 * (method != "prefill")), generator=generator)
            positions = torch.arange(end - tokens.shape[1], end)
            for owner in (session, speculator):
                getattr(owner, method)(tokens, positions)
        feature = torch.randn(1, 1, 64, generator=generator)
        given = tokens[:, :1], feature, torch.tensor([start + 12])
        token, state, logits = session.draft_decode(*given)
        wanted, *expected = speculator.draft_decode(*given)
        assert token.tolist() == wanted.tolist()
        torch.testing.assert_close([state, logits], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", WITHOUT_LOGITS)
def test_an_artifact_without_logits_has_the_first_format_version(name, family_exports):
    found = json.loads(run_command(inspect_main, family_exports / name / "out", "--json").stdout)
    assert not {"get_has_logits", "get_draft_ids"} & set(found["metadata"])  # its head has a vocabulary of its own
    assert found["metadata"]["get_draft_vocab_size"] < found["metadata"]["get_vocab_size"]
    assert found["metadata"]["get_manifest"]["format_version"] == 1
    assert {len(method["outputs"]) for method in found["methods"].values()} == {2}
