"""Prompts are echoed with their log-probabilities, by which lm-evaluation-harness scores a model with completions."""

import json

import httpx
import pytest
import torch
from scripted import ScriptedSession, scripted_metadata
from served import served
from transformers import AutoModelForCausalLM

from eagle3.runner.model import BusyError, Model
from eagle3.runner.serve.engine import prompt_logprobs
from eagle3.targets import TARGETS

TINY = TARGETS["gemma4-tiny"].checkpoint
SOURCE = "def main(path):\n    with open(path) as file:\n        return [line.strip() for line in file]\n\n\n"
ASKED = {"model": "tiny", "temperature": 0, "echo": True, "logprobs": 1, "seed": 1234}


@pytest.fixture(scope="module")
def by_transformers():
    """A function that returns the log-softmax [T, V] after each token of a prompt, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()

    def logprobs(ids):
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)

    return logprobs


def choices(server, **given) -> list[dict]:
    answer = server.post("/completions", ASKED | given)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


@pytest.mark.parametrize("repeats", [1, 12])  # within the sliding window, and beyond the ring's size
def test_an_echoed_prompt_has_transformers_log_probabilities(server, model, by_transformers, repeats):
    ids = model.encode(SOURCE * repeats)
    expected = by_transformers(ids)
    [choice] = choices(server, prompt=[ids], max_tokens=1)
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(ids) + 1  # with the generated token, which clients cut off
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    of_prompt = torch.tensor(found["token_logprobs"][1:-1])
    chosen = expected[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(of_prompt, chosen, atol=1e-3, rtol=0)
    best = torch.tensor([next(iter(each.values())) for each in found["top_logprobs"][1:]])
    torch.testing.assert_close(best, expected.max(dim=-1).values, atol=1e-3, rtol=0)
    greedy = [
        one == max(top.values()) for one, top in zip(of_prompt.tolist(), found["top_logprobs"][1:-1], strict=True)
    ]
    assert greedy == (expected[:-1].argmax(dim=-1) == torch.tensor(ids[1:])).tolist() and any(greedy)


def test_an_echo_with_max_tokens_0_generates_nothing(server, model):
    ids = model.encode(SOURCE)
    both = server.post("/completions", ASKED | {"prompt": [ids, ids], "max_tokens": 0}).json()
    assert both["usage"]["prompt_tokens"] == 2 * len(ids) and both["usage"]["completion_tokens"] == 0
    [text] = choices(server, prompt=SOURCE, max_tokens=0)
    assert both["choices"] == [text, text | {"index": 1}]
    found = text["logprobs"]
    assert (text["text"], text["finish_reason"]) == (SOURCE, "length")
    assert found["tokens"][0] == "<bos>" and "".join(found["tokens"][1:]) == SOURCE
    assert found["text_offset"][:2] == [0, 0] and {len(each) for each in found.values()} == {len(ids)}
    for offset, token in list(zip(found["text_offset"], found["tokens"], strict=True))[1:]:
        assert SOURCE[offset:].startswith(token)
    [silent] = choices(server, prompt=SOURCE, max_tokens=0, logprobs=None)
    assert (silent["text"], silent["logprobs"]) == (SOURCE, None)


def test_the_text_after_an_echo_equals_the_text_without_it(server, model):
    plain = choices(server, prompt=SOURCE, max_tokens=12, echo=False)[0]
    [echoed] = choices(server, prompt=SOURCE, max_tokens=12)
    assert echoed["text"] == SOURCE + plain["text"]
    count = len(model.encode(SOURCE))
    for name in ("tokens", "token_logprobs"):
        assert echoed["logprobs"][name][count:] == pytest.approx(plain["logprobs"][name], abs=1e-4)
    assert echoed["logprobs"]["text_offset"][count] == len(SOURCE)
    assert choices(server, prompt=SOURCE, max_tokens=12, echo=False)[0]["text"] == plain["text"]


def test_a_stream_contains_the_echo_once(server):
    [whole] = choices(server, prompt=SOURCE, max_tokens=12)
    given = ASKED | {"prompt": SOURCE, "max_tokens": 12, "stream": True}
    lines = httpx.post(f"{server.url}/completions", json=given, timeout=60).text.splitlines()
    parts = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert sum((part["logprobs"]["tokens"] for part in parts if part["logprobs"]), []) == whole["logprobs"]["tokens"]


def test_the_end_token_is_counted_after_an_echo(server, model):
    ids = model.encode(SOURCE)
    [choice] = choices(server, prompt=ids, max_tokens=1, logit_bias={"1": 1e4})
    assert model.metadata.eos_ids == (1,) and choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["tokens"]) == len(ids) + 1 and choice["logprobs"]["tokens"][-1] == "<eos>"


def test_a_prompt_of_one_token_has_no_log_probability(server):
    [choice] = choices(server, prompt=[2], max_tokens=0)
    assert choice["logprobs"] == {
        "tokens": ["<bos>"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0],
    }  # fmt: skip


def test_an_artifact_without_logits_refuses_an_echo_with_log_probabilities(artifact):
    session = ScriptedSession(scripted_metadata(), lambda prefix: 5, lambda prefix: 5)
    with served([Model(session.metadata, lambda: session, artifact)], artifact) as running:
        answer = running.post("/completions", ASKED | {"prompt": [5, 6], "max_tokens": 1})
    assert answer.status_code == 400 and "logits" in answer.json()["error"]["message"]


def test_scoring_a_prompt_does_not_change_other_generations(server, model):
    before = choices(server, prompt=SOURCE, max_tokens=12, echo=False)
    for prompt in (SOURCE * 3, SOURCE[:40]):
        choices(server, prompt=prompt, max_tokens=0)
        assert model.cached.tokens == []
    assert choices(server, prompt=SOURCE, max_tokens=12, echo=False) == before


def test_abandoning_a_scored_prompt_frees_the_model(model):
    ids = model.encode(SOURCE)
    said = model.generate(ids, max_new_tokens=8).token_ids
    scores = prompt_logprobs(model, ids, 1)
    assert len(next(scores)) == model.metadata.window
    with pytest.raises(BusyError):
        next(model.stream(ids))
    scores.close()
    assert model.generate(ids, max_new_tokens=8).token_ids == said
