"""The lookup in a text finds the right places, is used when it is faster, and changes no token."""

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from loop_cases import PROMPT, greedy, wrong
from random_speculators import (
    FEW,
    disturb,
    generate_some,
    random_metadata,
    random_request,
    random_speculator,
)
from scripted import VOCABULARY, ScriptedSession, greedy_sequence, scripted_metadata
from scripted_logits import LogitsSession, random_logits
from told_chain import Told

from eagle3.runner.loop import lookup_choice as lookup_module
from eagle3.runner.loop.adaptive_chain import AcceptanceRates, AdaptiveChain
from eagle3.runner.loop.cached_tokens import CachedTokens
from eagle3.runner.loop.choice import Greedy
from eagle3.runner.loop.generation import complete, generate
from eagle3.runner.loop.lookup_choice import HEAD, LOOKUP, SHORTEST, LookupChoice, RoundCosts, TextIndex
from eagle3.runner.sampling.options import Sampling
from eagle3.runner.sampling.sampler import Sampler

# --- the index


def longest_common(tokens):
    """Return the most tokens that the end has in common with an earlier place, by trying all places, and the latest
    such place."""
    end, best = len(tokens), (0, 0)
    for place in range(1, end):
        common = 0
        while common < place and tokens[place - 1 - common] == tokens[end - 1 - common]:
            common += 1
        best = max(best, (common, place))
    return best


@settings(max_examples=300, deadline=None)
@given(random=st.randoms(use_true_random=True))
def test_the_lookup_finds_the_place_with_the_most_tokens_in_common(random: Random):
    """The text is also changed in between, and the lookup is asked after each token or only sometimes."""
    index = TextIndex()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup_module, "PLACES", 1000)
        patch.setattr(lookup_module, "LONGEST", 1000)
        for _ in range(random.randint(1, 6)):
            kept = index.tokens[: random.randint(0, len(index.tokens))]
            changed = kept + [random.randrange(FEW) for _ in range(random.randint(0, 20))]
            index.become(changed)
            assert index.tokens == changed
            for _ in range(random.randint(0, 20)):
                index.add([random.randrange(FEW) for _ in range(random.choice([1, 1, 4]))])
                common, place = longest_common(index.tokens)
                if random.random() < 0.7:
                    assert index.common() == (common if common >= SHORTEST else 0)
                    ahead = index.ahead(7)
                    if common < SHORTEST:
                        assert ahead == []
                    else:  # the proposals follow an equally long match, or repeat the text after it
                        text = index.tokens + ahead
                        starts = [
                            at
                            for at in range(common, len(index.tokens))
                            if text[at - common : at] == text[len(index.tokens) - common : len(index.tokens)]
                        ]
                        assert any(ahead == text[at : at + 7] for at in starts), (text, starts, place)


def test_the_lookup_proposes_from_the_latest_place_and_follows_it_while_it_is_right():
    index = TextIndex()
    index.add([1, 2, 3, 7, 7, 1, 2, 3, 8, 9, 4, 1, 2, 3])
    assert (index.common(), index.ahead(3)) == (3, [8, 9, 4])
    index.add([8, 9])
    assert (index.common(), index.ahead(3)) == (5, [4, 1, 2])
    index.add([5])
    assert (index.common(), index.ahead(3)) == (0, [])
    index.become([5, 6, 5, 6, 5, 6, 5])
    assert index.ahead(6) == [6, 5, 6, 5, 6, 5]


def test_the_index_holds_nothing_of_earlier_texts():
    index, random = TextIndex(), Random(0)
    for _ in range(3):
        index.become([random.randrange(10**6) for _ in range(20)])
    assert len(index._latest) == 20 - SHORTEST + 1


@pytest.mark.parametrize("before", [[1, 2, 3], [7, 8, 9]])  # the second leaves no key of the index to remove
def test_an_interrupted_addition_of_tokens_leaves_the_index_valid(before):
    """After an interruption such as Ctrl-C, the index has a place whose token is not in the text."""
    index = TextIndex()
    index.add([*before, 4, 1, 2])

    class Interrupting(list):
        def append(self, _):
            raise KeyboardInterrupt

    index.tokens = Interrupting(index.tokens)
    with pytest.raises(KeyboardInterrupt):
        index.add([3])
    index.tokens = list(index.tokens)
    shorter = [2, 1, 2, 3]  # the place that the interruption left is beyond its end
    for text in (shorter, [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3]):
        index.become(text)
        assert index.ahead(1) == ([] if text is shorter else [5])


# --- costs and the choice


def test_round_costs_converge_to_time_ratios_while_the_machines_speed_changes():
    costs, random = RoundCosts(), Random(0)
    assert costs[HEAD, 3] > costs[LOOKUP, 3] > costs[HEAD, 0] == 1
    true = {(HEAD, 3): 1.9, (LOOKUP, 3): 1.1, (LOOKUP, 7): 1.6, (HEAD, 0): 1.0}
    for index in range(600):
        kind = random.choice(list(true))
        stall = 20 if random.random() < 0.05 else 1
        speed = 1 if index < 300 else 3
        costs.record(kind, stall * speed * true[kind] * random.lognormvariate(0, 0.1))
    for kind, cost in true.items():
        assert costs[kind] / costs[HEAD, 0] == pytest.approx(cost, rel=0.15)
    assert costs[LOOKUP, 6] / costs[LOOKUP, 7] == pytest.approx(1.12 / 1.14)


def played(choice, text, chain_len, head_rate, seconds, seed=0):
    """Play rounds over the tokens of ``text`` after its first 40. Returns the number of rounds of each kind, and the
    seconds."""
    random, done, taken, kinds = Random(seed), 40, 0.0, {LOOKUP: 0, HEAD: 0}
    choice.begin(text[:done])
    while done < len(text) - 20:
        found = choice.offer(chain_len, 100, False)
        if found:
            proposed = len(found)
            accepted = next((i for i, token in enumerate(found) if token != text[done + i]), proposed)
        else:
            proposed = chain_len
            accepted = next((i for i in range(proposed) if random.random() > head_rate), proposed)
        ids = text[done : done + accepted + 1]
        choice.text.add(ids)
        took = seconds(bool(found), proposed)
        choice.record(ids, proposed, bool(found), took)
        done, taken = done + len(ids), taken + took
        kinds[bool(found)] += 1
    return kinds, taken / (done - 40)


def costs_of(draft):
    return lambda by_lookup, proposed: 1 + 0.02 * proposed + (0 if by_lookup else draft * proposed)


def text_of(kind, seed=0, count=3000):
    """Return a text of new words, of a few alternating lines, or of lines with equal beginnings and different ends."""
    random = Random(seed)
    lines = [[random.randrange(1000) for _ in range(random.randint(8, 20))] for _ in range(8)]
    text = []
    while len(text) < count:
        if kind == "new":
            text.append(random.randrange(1000))
        elif kind == "repeats":
            text += random.choice(lines)
        else:
            text += [*random.choice(lines)[:3], *(random.randrange(1000) for _ in range(3))]
    return text[:count]


class Never(LookupChoice):
    def offer(self, chain_len, room, drafted):
        super().offer(chain_len, room, drafted)
        return []


class Always(LookupChoice):
    def offer(self, chain_len, room, drafted):
        super().offer(chain_len, room, drafted)
        return self._offered[: self._longest]


@pytest.mark.first(3)
@pytest.mark.parametrize(("rate", "longest"), [(0.6, 7), (0.9, 3), (0.3, 7)])
@pytest.mark.parametrize("kind", ["new", "repeats", "misleads"])
def test_lookup_and_head_together_are_within_3_percent_of_the_better_one(kind, rate, longest):
    """The speed is within 3% for each text, over several seeds, with a cheap draft."""
    ratios = []
    for seed in range(3):
        text = text_of(kind, seed)
        of = [played(cls(3, longest), text, 3, rate, costs_of(0.08), seed)[1] for cls in (LookupChoice, Never, Always)]
        ratios.append(min(of[1:]) / of[0])
    assert sum(ratios) / len(ratios) > 0.97, ratios


def test_the_lookup_is_chosen_for_repeated_text_and_the_head_for_new_text():
    choice = LookupChoice(3, 7)
    kinds, _ = played(choice, text_of("repeats"), 3, 0.5, costs_of(0.08))
    assert kinds[LOOKUP] > 2 * kinds[HEAD]
    kinds, _ = played(choice, text_of("new"), 3, 0.5, costs_of(0.08))
    assert kinds[LOOKUP] < 0.02 * kinds[HEAD]


@pytest.mark.parametrize(("common", "leaves"), [(3, False), (30, True)])
def test_tokens_of_the_head_that_exist_are_discarded_only_for_a_long_match(common, leaves):
    """The tokens were drafted by a fused round and must be drafted again, which pays only if the place continues for
    several rounds."""
    text, choice = list(range(20, 60)), LookupChoice(3, 3)
    choice._costs._costs |= {(HEAD, 3): 2.0, (LOOKUP, 3): 1.0}
    choice.begin([*text, 1, *text[:common]])
    choice._lookup, choice._head = [AcceptanceRates(3, 0.8)] * 4, [AcceptanceRates(3, 0.85)] * 4
    assert choice.offer(3, 50, drafted=False)
    assert bool(choice.offer(3, 50, drafted=True)) == leaves


def test_only_a_part_of_a_costly_window_is_proposed():
    text = text_of("repeats")
    choice, asked = LookupChoice(3, 15), []

    def seconds(by_lookup, proposed):
        if by_lookup:
            asked.append(proposed)
        return 1 + (0.02 if proposed <= 3 else 1.0) * proposed

    played(choice, text, 3, 0.2, seconds)
    assert asked[100:].count(3) > 0.9 * len(asked[100:])
    cheap, asked = LookupChoice(3, 15), []
    played(cheap, text, 3, 0.2, seconds := lambda by, proposed: asked.append(proposed) or 1.0)
    assert asked[100:].count(15) > 0.5 * len(asked[100:])


# --- generations


@settings(max_examples=300, deadline=None)
@given(random=st.randoms(use_true_random=True))
def test_generations_with_lookup_and_shared_caches_give_the_tokens_of_single_generations(random: Random):
    """The scripted caches refuse draft slots that were not written with the target's own features."""
    metadata, (target, draft) = random_metadata(random), random_speculator(random)
    metadata = replace(metadata, verify_rows=random.choice([None, random.randint(metadata.chain_len + 1, 16)]))
    draft_window = metadata.draft_sliding_window and metadata.draft_sliding_window - metadata.proposals + 1
    # the longest window that the ring caches allow, and whose rows a recurrent state can give up
    for most in filter(None, (metadata.sliding_window, draft_window, metadata.rollback_rows)):
        metadata = replace(metadata, verify_rows=min(metadata.window, most))
    session, cached, said = ScriptedSession(metadata, target, draft), CachedTokens(), [[]]
    choice = Often(metadata.chain_len, metadata.window - 1, random)
    note(f"{metadata}")
    for _ in range(random.randint(2, 6)):
        prompt, options = random_request(random, metadata, said)
        rounds = random.choice([None, None, random.randint(0, 5)])
        disturb(session, random)
        if random.random() < 0.3:
            options["chain"] = AdaptiveChain(metadata.chain_len)
        lookup = random.choice([choice, choice, LookupChoice(metadata.chain_len, metadata.window - 1), None])
        note(f"{vars(cached)}, {prompt}, {options}, left after {rounds}, {session.failure!r} at {session.calls_left}")
        tokens, ended = generate_some(session, prompt, rounds, cached=cached, lookup=lookup, **options)
        alone = greedy_sequence(target, prompt, options["max_new_tokens"], options["stop_ids"], metadata.max_seq_len)
        assert tokens == (alone if ended else alone[: len(tokens)])
        said.append(prompt + tokens)


class Often(LookupChoice):
    """A lookup that proposes what it finds at random and in any number, and sometimes random tokens."""

    def __init__(self, chain_len, longest, random):
        super().__init__(chain_len, longest)
        self._random = random

    def offer(self, chain_len, room, drafted):
        super().offer(chain_len, room, drafted)
        most = min(self._longest, room)
        self._offered = self._offered or [self._random.randrange(FEW) for _ in range(most)]
        return self._offered[: self._random.randint(0, most)] if self._random.random() < 0.7 else []


def repeating(prefix):
    """Return the next token of a target that repeats the same 11 tokens."""
    return (5 * (len(prefix) % 11) + 2) % VOCABULARY


REPEATED = [repeating(range(at)) for at in range(25)]


def test_a_repeating_text_is_accepted_completely_and_counted_as_the_lookups():
    session = ScriptedSession(scripted_metadata(max_seq_len=120, verify_rows=8), repeating, wrong)
    result = complete(session, REPEATED, max_new_tokens=80, lookup=LookupChoice(3, 7))
    assert result.token_ids == [repeating(range(at)) for at in range(25, 105)]
    stats = result.stats
    assert stats.num_lookup_accepted_tokens == stats.num_accepted_tokens == stats.num_lookup_draft_tokens
    assert max(session.windows) == 8 and stats.num_drafts < 20
    counts = stats.counts()
    assert counts["num_lookup_drafts"] == stats.num_lookup_drafts > 0
    stats.add(result.stats)
    assert stats.num_lookup_drafts == 2 * counts["num_lookup_drafts"]


def test_lookup_rounds_take_no_draft_step_and_their_slots_are_written_before_the_next_one():
    """A head that was always right is right again at once, because its slots have the target's features."""
    metadata = scripted_metadata(max_seq_len=200, max_prefill=7)
    session = ScriptedSession(metadata, repeating, repeating)
    lookup = InTurns([True] * 9 + [False] * 3)
    result = complete(session, REPEATED, max_new_tokens=120, lookup=lookup)
    stats = result.stats
    assert stats.num_accepted_tokens == stats.num_draft_tokens > stats.num_lookup_draft_tokens > 60
    assert session.calls == {} and stats.mean_acceptance_length == 4
    drafted = stats.num_drafts - stats.num_lookup_drafts
    assert drafted > 5


class InTurns(LookupChoice):
    """A choice between lookup and head by a script."""

    def __init__(self, script):
        super().__init__(3, 3)
        self._script, self._asked = script, 0

    def offer(self, chain_len, room, drafted):
        super().offer(chain_len, room, drafted)
        self._asked += 1
        by_lookup = self._script[self._asked % len(self._script)]
        return self._offered[: min(3, room)] if by_lookup else []


@pytest.mark.parametrize("whole", [False, True], ids=["three methods", "fused rounds"])
def test_the_next_turn_reuses_a_reply_that_the_lookup_proposed(whole):
    metadata = scripted_metadata(max_seq_len=200, max_prefill=60, min_prefill=4)
    session, cached = ScriptedSession(metadata, repeating, wrong), CachedTokens()
    session.has_speculate = whole
    lookup = LookupChoice(3, 3)
    said = REPEATED + complete(session, REPEATED, max_new_tokens=60, cached=cached, lookup=lookup).token_ids
    turn = [*said, repeating(said), 1]
    again = complete(session, turn, max_new_tokens=3, cached=cached, lookup=lookup)
    assert again.stats.reused_prompt_tokens >= len(said) - 4


@pytest.mark.parametrize("lookup", [None, LookupChoice(3, 7)], ids=["head", "lookup"])
def test_the_next_turn_reuses_a_prompt_whose_reply_ended_early(lookup):
    """A reply ends early at a stop string, or when a client disconnects."""
    metadata = scripted_metadata(max_seq_len=600, max_prefill=250, verify_rows=8)
    session, cached = ScriptedSession(metadata, repeating, wrong), CachedTokens()
    prompt = [repeating(range(at)) for at in range(200)]
    rounds = generate(session, prompt, max_new_tokens=60, cached=cached, lookup=lookup)
    said = [token for _ in range(4) for token in next(rounds)]
    rounds.close()
    again = complete(session, [*prompt, *said, 9], max_new_tokens=1, cached=cached)
    assert again.stats.reused_prompt_tokens >= len(prompt) - 1


def test_the_lookup_works_without_a_draft_head():
    session = ScriptedSession(scripted_metadata(max_seq_len=120), repeating, wrong)
    session.draft_decode = None
    result = complete(session, REPEATED, max_new_tokens=60, chain=0, lookup=LookupChoice(0, 3))
    assert result.token_ids == [repeating(range(at)) for at in range(25, 85)]
    assert result.stats.num_accepted_tokens > 40


def test_a_head_round_that_writes_deferred_slots_does_not_count_its_seconds(monkeypatch):
    chain = Told([3])
    session = ScriptedSession(scripted_metadata(max_seq_len=200), repeating, repeating)
    for _ in generate(session, REPEATED, max_new_tokens=100, chain=chain, lookup=InTurns([True, True, False, False])):
        pass
    seconds = [taken for _, _, taken in chain.rounds]
    assert seconds.count(0.0) in (len(seconds) // 2, len(seconds) // 2 + 1) and max(seconds) > 0


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_samples_with_the_lookup_equal_sampling_without_speculation(data):
    """The noise of a token depends only on seed, position and id. A proposal from any source is therefore accepted if
    it is the token that sampling draws, whatever the distribution of the proposals."""
    seed = data.draw(st.integers(0, 10_000), "tables")
    sampling = Sampling(
        temperature=data.draw(st.sampled_from([0.3, 1.0]), "temperature"),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.3]), "penalty"),
        seed=data.draw(st.integers(0, 1000), "seed"),
    )
    metadata = replace(scripted_metadata(verify_rows=6), has_logits=True, draft_vocab_size=VOCABULARY)
    target, draft = random_logits(seed, 5, VOCABULARY, scale=6.0)[0], random_logits(seed + 1, 7, VOCABULARY)[0]
    prompt = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=20), "prompt")
    texts = []
    for chain, looked_up in ((0, None), (3, Always(3, 5)), (0, Always(0, 5)), (2, LookupChoice(3, 5))):
        session = LogitsSession(metadata, target, draft, torch.arange(VOCABULARY))
        choice = Sampler(sampling, metadata, prompt)
        options = {"max_new_tokens": 40, "chain": chain, "choice": choice, "lookup": looked_up}
        texts.append(complete(session, prompt, **options).token_ids)
    assert texts[0] == texts[1] == texts[2] == texts[3]


def test_samples_over_seeds_with_the_lookup_have_the_targets_probabilities():
    """A chi-square test over 800 seeds of the second token, which the lookup proposes for every seed."""
    logits = torch.zeros(1, VOCABULARY)
    logits[0, :4] = torch.tensor([2.0, 1.0, 0.5, 0.0])
    logits[0, 4:] = -20.0
    metadata = replace(scripted_metadata(), has_logits=True)
    counts, proposed = torch.zeros(4, dtype=torch.double), 0
    for seed in range(800):
        session = LogitsSession(metadata, logits, logits, torch.arange(VOCABULARY))
        prompt = [9, 9, 9, 9, 9, 0, 0, 0, 0, 0]
        choice = Sampler(Sampling(temperature=1.0, seed=seed), metadata, prompt)
        result = complete(session, prompt, max_new_tokens=4, chain=0, choice=choice, lookup=Zeros(0, 3))
        counts[result.token_ids[1]] += 1
        proposed += result.stats.num_lookup_drafts
    expected = 800 * logits[0, :4].double().softmax(-1)
    assert proposed >= 800
    assert ((counts - expected) ** 2 / expected).sum() < 24  # 3 degrees of freedom: chance exceeds this once in 40,000


class Zeros(LookupChoice):
    """A lookup that always proposes the most likely token."""

    def offer(self, chain_len, room, drafted):
        return [0] * min(self._longest, room)


class Wrong(LookupChoice):
    def offer(self, chain_len, room, drafted):
        return [(greedy(tuple(self.text.tokens)) + 1) % VOCABULARY] * min(self._longest, room)


class Forcing(Greedy):
    """A grammar that forces two tokens, the target's own."""

    greedy = False

    def __init__(self, prompt):
        self._tokens = list(prompt)

    def forced(self, _proposed, count):
        tokens = list(self._tokens)
        for _ in range(min(count, 2)):
            tokens.append(greedy(tuple(tokens)))
        return tokens[len(self._tokens) :]

    def accept(self, tokens):
        self._tokens += tokens


def test_tokens_forced_by_a_grammar_precede_the_lookups_proposals():
    """Proposals with another beginning are certainly wrong. If all tokens are forced, the lookup is not asked."""
    for chain in (3, 2):
        session = ScriptedSession(scripted_metadata(), greedy, wrong)
        options = {"chain": chain, "choice": Forcing(PROMPT), "lookup": Wrong(3, 3)}
        result = complete(session, PROMPT, max_new_tokens=30, **options)
        assert result.token_ids == greedy_sequence(greedy, PROMPT, 30)
        assert not result.stats.num_lookup_drafts
        if chain == 2:
            assert result.stats.num_accepted_tokens > result.stats.num_drafts


def test_rounds_forced_by_a_grammar_after_lookup_rounds_are_not_counted_as_the_lookups():
    class Late(Greedy):
        """A grammar that forces the repeating text from position 60 on."""

        greedy, length = False, len(REPEATED)

        def forced(self, proposed, count):
            ahead = self.length + sum(tokens.shape[1] for tokens in proposed)
            return [repeating(range(ahead + step)) for step in range(count)] if self.length >= 60 else []

        def accept(self, tokens):
            self.length += len(tokens)

    session = ScriptedSession(scripted_metadata(max_seq_len=200), repeating, wrong)
    options = {"choice": Late(), "lookup": LookupChoice(3, 3)}
    result = complete(session, REPEATED, max_new_tokens=100, **options)
    assert result.token_ids == [repeating(range(at)) for at in range(25, 125)]
    before = (60 - len(REPEATED)) // 4 + 1  # rounds of four tokens
    assert 0 < result.stats.num_lookup_drafts <= before < result.stats.num_drafts - 10
