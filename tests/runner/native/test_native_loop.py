"""The native loop writes every slot, and proposes at every position, as the Python loop does."""

import json
import subprocess

import pytest
from counting_artifact import SLOTS, VOCABULARY, save_counting
from native_runs import ROUNDS, check_equal
from told_chain import Told

from eagle3.runner import load
from eagle3.runner.contract import MODEL_FILE
from eagle3.runner.loop.generation import complete

KINDS = {
    "a cache": {},
    "no cache": {"cache": False},
    "all at once": {"proposals": 3, "decode": False},
    "fused rounds": {"speculate": True, "decode": False},
}


@pytest.fixture(scope="module", params=KINDS)
def counting(request, tmp_path_factory):
    """A folder with a counting program, and the model."""
    folder = tmp_path_factory.mktemp("counting")
    save_counting(folder, **KINDS[request.param])
    with load(folder) as model:
        yield folder, model


def prompt(length):
    return [(7 * i + i * i) % VOCABULARY for i in range(length)]


def test_the_head_is_right_in_most_cases(counting):
    """Otherwise the counts of the other tests would show nothing."""
    _, model = counting
    for length in (1, 9, 60):
        stats = model.generate(prompt(length), ngram=False, max_new_tokens=60, ignore_eos=True).stats
        assert 0.5 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.95


@pytest.mark.parametrize("options", [{}, {"chain_len": 0}, {"chain_len": 1}, {"chain_len": 2}, {"chain_len": "auto"}])
def test_rounds_of_every_length_up_to_the_last_slot(built, counting, options):
    folder, model = counting
    lengths = 1, 2, 3, 4, 5, 8, 9, 12, 13, 60, SLOTS - 4, SLOTS - 2, SLOTS - 1
    prompts = [[length % VOCABULARY, *prompt(length)[1:]] for length in lengths]  # another first token: no prefix
    check_equal(built, model, folder, prompts, max_new_tokens=SLOTS, ignore_eos=True, **options)


def test_the_budget_and_stop_tokens_cut_within_accepted_tokens(built, counting):
    folder, model = counting
    whole = model.generate(prompt(10), ngram=False, max_new_tokens=9, ignore_eos=True).token_ids
    for budget in range(1, 10):
        check_equal(built, model, folder, [prompt(10)], max_new_tokens=budget, ignore_eos=True)
        check_equal(built, model, folder, [prompt(10)], stop_token_ids=[whole[budget - 1]], max_new_tokens=40)


def test_prefixes_of_every_length_are_taken_up(built, counting):
    folder, model = counting
    text = prompt(20) + model.generate(prompt(20), ngram=False, max_new_tokens=40, ignore_eos=True).token_ids
    prompts = [prompt(20)]
    for kept in (*range(1, 30, 3), *range(30, 60)):
        prompts += [text[:kept] + [3], text]
    check_equal(built, model, folder, prompts, max_new_tokens=9, ignore_eos=True)
    check_equal(built, model, folder, prompts[:20], max_new_tokens=9, chain_len=0, ignore_eos=True)


@pytest.mark.parametrize("lengths", [[3, 0, 0, 2], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 1], [1, 3]])
def test_slots_of_rounds_without_drafts_are_written_later(built, counting, lengths):
    folder, model = counting
    expected = complete(model.session, prompt(11), max_new_tokens=70, chain=Told(lengths), stop_ids=())
    command = [built / "internals", "rounds", folder / MODEL_FILE, "70", ",".join(map(str, lengths))]
    done = subprocess.run([*command, *map(str, prompt(11))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ids, stats = done.stdout.splitlines()
    assert [int(each) for each in ids.split()][:70] == expected.token_ids
    mine, theirs = json.loads(stats), expected.stats.counts()
    assert {key: mine[key] for key in ROUNDS} == {key: theirs[key] for key in ROUNDS}
    calls = {name: each["calls"] for name, each in mine["methods"].items()}
    assert calls == dict(expected.stats.method_calls)
