"""Structured output obeys its grammar, equals constrained decoding without speculation, and invalid grammars are
refused in one line."""

import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from scripted import scripted_metadata
from scripted_logits import LogitsSession, random_logits

from eagle3.runner.hosts.session import Step
from eagle3.runner.loop.choice import Greedy
from eagle3.runner.loop.generation import complete
from eagle3.runner.model import Model
from eagle3.runner.options import Options
from eagle3.runner.sampling.constrained import Constrained, GrammarFailed, Guide
from eagle3.runner.sampling.constraint import SEPARATORS, Grammars
from eagle3.runner.sampling.sampler import Sampler
from eagle3.runner.text.checks import shown
from eagle3.runner.text.text import Text
from eagle3.targets import TARGETS

CHECKPOINT = TARGETS["gemma4-tiny"].checkpoint
TEXT = "def main(argv=None):\n    "
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "color": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "age", "color"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "boolean"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["v", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
ASKED = [
    {"json": PERSON},
    {"json": TREE},
    {"regex": r"[a-f]{3,9}-[0-9]{2}(, [a-z]+){0,3}"},
    {"choice": ["return None", "return 0", "raise SystemExit"]},
    {"grammar": 'start: item ("," item)*\nitem: /[a-z]{1,4}/ "=" /[0-9]{1,3}/'},
]
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 3}


@pytest.fixture(scope="module")
def model(session, artifact):
    return Model(session.metadata, lambda: session, artifact)


@pytest.fixture(scope="module")
def grammars():
    """Return the grammars of the shipped tokenizer, for a scripted session."""
    return Grammars(CHECKPOINT / "tokenizer.json", scripted())


def scripted(**given):
    return replace(scripted_metadata(eos_ids=(1,), **given), vocab_size=2048, has_logits=True)


class ByHand:
    """A choice that does constrained greedy decoding only by masks."""

    greedy = False

    def __init__(self, schema):
        tokenizer = LLTokenizer((CHECKPOINT / "tokenizer.json").read_text(), n_vocab=2048, eos_token=[1])
        self._matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema, defaults=SEPARATORS))

    def target(self, step, proposed):
        assert not proposed
        mask = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")[:2048]
        return torch.where(torch.from_numpy(mask == 1), step.logits[:, -1], -torch.inf).argmax(-1, keepdim=True)

    def forced(self, proposed, count):
        return []

    def accept(self, tokens):
        assert tokens == [1] or self._matcher.consume_tokens(tokens)


@pytest.mark.parametrize("schema", [PERSON, TREE], ids=["flat", "recursive"])
def test_a_constrained_greedy_answer_equals_masking_by_hand(model, session, schema):
    said = model.generate(TEXT, max_new_tokens=120, structured_outputs={"json": schema})
    expected = complete(session, said.prompt_token_ids, max_new_tokens=120, chain=0, choice=ByHand(schema))
    assert said.token_ids == expected.token_ids
    assert said.stats.num_accepted_tokens > said.stats.num_drafts


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_logits_give_the_text_of_constrained_decoding_without_speculation(grammars, data):
    seed = data.draw(st.integers(0, 10_000), "tables")
    asked = data.draw(st.sampled_from([*ASKED, {"json_object": True}]), "grammar")
    few = data.draw(st.sampled_from([20, 400, 2048]), "draft vocabulary")
    sampling = Options(
        temperature=data.draw(st.sampled_from([0.0, 0.8, 2.0]), "temperature"),
        top_k=data.draw(st.sampled_from([0, 3]), "top_k"),
        top_p=data.draw(st.sampled_from([1.0, 0.7]), "top_p"),
        min_p=data.draw(st.sampled_from([0.0, 0.1]), "min_p"),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.4]), "penalty"),
        frequency_penalty=data.draw(st.sampled_from([0.0, 0.3, -0.1]), "frequency"),
        presence_penalty=data.draw(st.sampled_from([0.0, 0.9]), "presence"),
        seed=data.draw(st.integers(0, 1000), "seed"),
    )
    draft_ids = torch.randperm(2048, generator=torch.Generator().manual_seed(seed))[:few].sort().values
    target, draft = random_logits(seed, 13, 2048)[0], random_logits(seed + 1, 7, few)[0]
    metadata = replace(scripted(), draft_ids=draft_ids, draft_vocab_size=few)
    prompt = data.draw(st.lists(st.integers(4, 2047), min_size=1, max_size=12), "prompt")
    texts = []
    for chain in (0, 1, 2, 3):
        session = LogitsSession(metadata, target, draft, draft_ids)
        inner = Greedy() if sampling.plain else Sampler(sampling, metadata, prompt)
        choice = Constrained(inner, Guide(grammars.compile(asked)), metadata)
        texts.append(complete(session, prompt, max_new_tokens=30, chain=chain, choice=choice).token_ids)
    assert texts[0] == texts[1] == texts[2] == texts[3]
    guide = Guide(grammars.compile(asked))
    assert all(guide.take(token) for token in texts[0])


class AllAtOnce(LogitsSession):
    """A P-EAGLE with three proposals and logits: each row is the draft's after the proposals before it."""

    def draft_decode(self, tokens, feature, input_pos):
        step = super().draft_decode(tokens, feature, input_pos)
        prefix = self.draft_cache[int(input_pos[-1])].prefix
        rows = [self._draft_of((*prefix, *step.ids[0, :count].tolist())) for count in range(step.ids.shape[1])]
        return step._replace(logits=torch.stack(rows)[None])


@pytest.mark.parametrize(("asked", "temperature"), [(ASKED[0], 0.0), (ASKED[2], 1.0)], ids=["json", "regex"])
def test_a_head_that_drafts_in_one_call_obeys_the_grammar(grammars, asked, temperature):
    metadata = replace(scripted(proposals=3), draft_vocab_size=2048)
    target, draft = random_logits(3, 13, 2048)[0], random_logits(4, 7, 2048)[0]
    texts = []
    for chain in (0, 3):
        session = AllAtOnce(metadata, target, draft, torch.arange(2048))
        inner = Sampler(Options(temperature=temperature, seed=1), metadata, [9, 8, 7]) if temperature else Greedy()
        choice = Constrained(inner, Guide(grammars.compile(asked)), metadata)
        texts.append(complete(session, [9, 8, 7], max_new_tokens=30, chain=chain, choice=choice))
    assert texts[0].token_ids == texts[1].token_ids
    assert texts[1].stats.num_accepted_tokens > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_constrained_proposals_of_a_draft_equal_to_the_target_are_accepted(grammars, temperature):
    """The draft's vocabulary lacks the first ids; its rows are masked like the target's, after its own proposals."""
    logits, asked = random_logits(5, 1, 2048)[0], {"regex": "([a-e][0-4]){60}"}
    metadata = replace(scripted(), draft_ids=torch.arange(5, 2048), draft_vocab_size=2043)
    session = LogitsSession(metadata, logits, logits[:, 5:], metadata.draft_ids)
    inner = Sampler(Options(temperature=temperature, seed=2), metadata, [9, 8]) if temperature else Greedy()
    choice = Constrained(inner, Guide(grammars.compile(asked)), metadata)
    assert complete(session, [9, 8], max_new_tokens=40, choice=choice).stats.mean_acceptance_length > 3.9


def test_tokens_forced_by_a_grammar_take_no_draft_step(model):
    """A list of one string forces every token. The caches have the prompt, which takes the draft a call."""
    model.generate(TEXT, max_new_tokens=20)
    asked = {"choice": ["return the value of the first argument that is given"]}
    said = model.generate(TEXT, max_new_tokens=60, structured_outputs=asked)
    assert (said.text, said.finish_reason) == (asked["choice"][0], "stop")
    assert said.stats.method_calls["draft_decode"] == 0
    assert said.stats.num_drafts == 3
    again = model.generate(said.text + "\n", max_new_tokens=20)  # the draft's cache has all its slots
    model.forget()
    fresh = model.generate(said.text + "\n", max_new_tokens=20)
    assert again.token_ids == fresh.token_ids


class Counting:
    """A matcher that counts the calls of each method."""

    def __init__(self, matcher):
        self._matcher, self.calls = matcher, Counter[str]()

    def __getattr__(self, name):
        self.calls[name] += 1
        return getattr(self._matcher, name)


def test_a_forced_text_is_computed_once_however_often_it_is_asked_for(grammars):
    """llguidance computes all of a forced text at each call, which takes 0.1 s for 14,000 characters."""
    guide = Guide(grammars.compile({"choice": ["return " * 200]}))
    guide._matcher = counting = Counting(guide._matcher)
    whole = guide.forced(10_000)
    for place in range(0, 60, 3):
        ahead = whole[place : place + 3]
        assert guide.forced(3) == ahead and guide.allowed().nonzero()[0].tolist() == ahead[:1]
        with guide.ahead(ahead) as reached:
            assert reached and guide.forced(1) == [whole[place + 3]] and not guide.allows(ahead[0] + 1)
        assert all(guide.take(token) for token in ahead)
    assert counting.calls["compute_ff_tokens"] == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_proposal_is_followed_once_in_a_round(grammars, temperature):
    """The draft's later rows, the target's rows and the accepted text ask for the same states again."""
    metadata = replace(scripted(), draft_vocab_size=2048)
    target, draft = random_logits(1, 13, 2048)[0], random_logits(2, 7, 2048)[0]
    session, guide = LogitsSession(metadata, target, draft, torch.arange(2048)), Guide(grammars.compile(ASKED[2]))
    guide._matcher = counting = Counting(guide._matcher)
    inner = Sampler(Options(temperature=temperature, seed=1), metadata, [9, 8, 7]) if temperature else Greedy()
    said = complete(session, [9, 8, 7], max_new_tokens=30, chain=3, choice=Constrained(inner, guide, metadata))
    followed, masks = counting.calls["try_consume_tokens"], counting.calls["compute_bitmask"]
    assert max(followed, masks) <= 4 * (said.stats.num_drafts + 1)


def test_a_grammar_has_a_limited_time(grammars):
    constraint = grammars.compile({"regex": "[a-z]+"})
    with pytest.raises(GrammarFailed, match="s of processor time for 0 tokens, but 0 s and 1 ms a token are the limit"):
        Guide(replace(constraint, seconds=(0.0, 0.001))).allowed()
    assert Guide(replace(constraint, seconds=(9.0, 0.0))).allowed().any()


def test_forced_proposals_leave_the_drafts_slots_correct(grammars):
    """There are more forced tokens than one call of the draft takes; the scripted caches refuse a gap or a stale
    slot."""
    asked = {"regex": "(abcdefghijklmnopqrstuvwxyz0123456789){3}[a-z]{9}"}
    metadata = scripted()
    target, draft = random_logits(1, 13, 2048)[0], random_logits(2, 7, 2048)[0]
    session = LogitsSession(metadata, target, draft, torch.arange(2048))
    choice = Constrained(Greedy(), Guide(grammars.compile(asked)), metadata)
    said = complete(session, [9, 8, 7, 6, 5], max_new_tokens=55, choice=choice)
    text = Text(CHECKPOINT).decode(said.token_ids)
    assert ("abcdefghijklmnopqrstuvwxyz0123456789" * 3).startswith(text) and len(text) > 72
    assert len(said.token_ids) == 55 and said.stats.num_drafts < 55


@pytest.mark.parametrize(("opened", "sampled"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("chain", [0, 3])
def test_reasoning_is_unconstrained_and_the_text_after_it_is_constrained(grammars, opened, chain, sampled):
    """<unk> ends reasoning and <pad> may open it; both are likely here."""
    metadata = scripted()
    target, draft = random_logits(11, 13, 2048)[0], random_logits(12, 7, 2048)[0]
    target[3, 3] = target[7, 3] = target[9, 3] = 40.0
    asked = {"choice": ["return None"], "reasoning_end": "<unk>"} | ({} if opened else {"reasoning_begin": "<pad>"})
    if not opened:
        target[:, 0] = 30.0  # reasoning opens wherever it may
    prompt, session = [9, 8, 7], LogitsSession(metadata, target, draft, torch.arange(2048))
    inner = [Sampler(Options(temperature=0.1, seed=1), metadata, prompt) if sampled else Greedy() for _ in range(2)]
    free = complete(session, prompt, max_new_tokens=40, chain=0, choice=inner[0]).token_ids
    choice = Constrained(inner[1], Guide(grammars.compile(asked)), metadata)
    session = LogitsSession(metadata, target, draft, torch.arange(2048))
    said = complete(session, prompt, max_new_tokens=60, chain=chain, choice=choice).token_ids
    end = free.index(3)
    assert said[: end + 1] == free[: end + 1]
    assert Text(CHECKPOINT).decode(said[end + 1 :]) == "return None" and said[-1] == 1


def test_without_reasoning_opened_the_text_is_constrained_from_the_start(model):
    asked = {"choice": ["return 0"], "reasoning_begin": "<pad>", "reasoning_end": "<unk>"}
    assert model.generate(TEXT, structured_outputs=asked).text == "return 0"


def test_special_tokens_are_shown_on_request_except_end_tokens(model):
    options = {"max_new_tokens": 6, "structured_outputs": {"grammar": 'start: "a" <unk> "b"'}}
    assert model.generate(TEXT, **options).text == "ab"
    assert model.generate(TEXT, skip_special_tokens=False, **options).text == "a<unk>b"


def test_a_replay_of_a_constrained_text_is_constrained(model):
    said = model.generate(TEXT, max_new_tokens=60, structured_outputs={"json": PERSON}, **SAMPLED)
    assert model.replay(said).divergence is None


def test_constrained_text_has_log_probabilities(model):
    said = model.generate(TEXT, max_new_tokens=60, structured_outputs={"json": PERSON}, logprobs=1)
    assert [each.token_id for each in said.logprobs] == said.token_ids
    assert said.logprobs[0].top[0][0] != said.token_ids[0]  # raw logits ignore the grammar


def test_openais_penalties_equal_their_formula():
    logits, metadata = random_logits(1, 3, 2048, scale=1.0), scripted()
    sampling = Options(presence_penalty=0.5, frequency_penalty=0.25, seed=0)
    sampler = Sampler(sampling, metadata, [5, 6, 11])
    sampler.accept([8, 8, 9])
    seen = [{8: 2, 9: 1}, {8: 3, 9: 1}, {8: 3, 9: 1, 10: 1}]
    for height in np.arange(0, 3, 0.05):
        table = logits.clone()
        table[0, :, 8:11] = 9.0 + float(height)
        table[0, :, 11] = 10.0
        expected = table.clone()
        for row, counts in enumerate(seen):
            for token, count in counts.items():
                expected[0, row, token] -= 0.5 + 0.25 * count
        assert sampler.target(Step(None, None, table), [8, 10]).tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, r"json of structured_outputs is refused: .*uniqueItems"),
        ({"json": "{"}, "no JSON schema"),
        ({"json": {"type": "string", "pattern": "(?=a)"}}, "look-around"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, r"minimum \(5\) is greater than maximum \(3\)"),
        ({"regex": "a("}, "unclosed group"),
        ({"grammar": "start: foo"}, 'unknown name: "foo"'),
        ({"choice": []}, "must be a list of one string or more"),
        ({"json_object": False}, "must be true"),
        ({"regex": "a", "json": {}}, "must have one of json, json_object"),
        ([], "must be a mapping"),
        ({"regex": "a", "reasoning_begin": "<pad>"}, "no reasoning_end"),
        ({"regex": "a", "reasoning_end": "</think>"}, "'</think>', which is no added token"),
    ],
    ids=shown,
)
def test_invalid_structured_outputs_are_refused_before_anything_runs(model, asked, message):
    with pytest.raises(ValueError, match=message) as failure:
        model.stream(TEXT, structured_outputs=asked)
    assert "\n" not in str(failure.value)


def test_structured_outputs_with_ignore_eos_are_refused():
    with pytest.raises(ValueError, match="leave ignore_eos out"):
        Options(structured_outputs={"regex": "a"}, ignore_eos=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"has_logits": False}, "needs logits, which this artifact lacks"), ({"eos_ids": ()}, "needs an end token")],
)
def test_an_artifact_without_logits_or_end_tokens_refuses_structured_outputs(change, message):
    with pytest.raises(ValueError, match=message):
        Grammars(CHECKPOINT / "tokenizer.json", replace(scripted(), **change))


def test_structured_outputs_without_llguidance_say_what_to_type(monkeypatch, model):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"type pip install 'eagle3-export\[serve\]'"):
        Grammars(CHECKPOINT / "tokenizer.json", model.metadata)


def test_a_tokenizer_that_llguidance_rejects_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "None"}}')
    with pytest.raises(ValueError, match="llguidance does not take the tokenizer"):
        Grammars(tmp_path / "tokenizer.json", scripted())
