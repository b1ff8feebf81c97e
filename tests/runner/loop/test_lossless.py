"""A generation that speculation changed is found, with the cause of the change."""

import json
from dataclasses import replace

import pytest
import torch
from scripted import VOCABULARY, ScriptedSession, greedy_sequence, scripted_metadata

from eagle3.runner.contract import DECODE, PREFILL, SPECULATE, TARGET_VERIFY
from eagle3.runner.hosts.session import Step
from eagle3.runner.loop.cached_tokens import CachedTokens
from eagle3.runner.loop.generation import complete
from eagle3.runner.loop.lossless import lines, replay
from eagle3.runner.model import Model

PROMPT = [3, 1, 4, 1, 5, 9, 6]
AT = 21  # where the two best logits are nearly tied


def greedy(prefix):
    return (7 * prefix[-1] + 3 * len(prefix) + prefix[0]) % VOCABULARY


class Rounding(ScriptedSession):
    """A session whose two best logits differ by 1, but by ``margin`` at position ``AT``, where calls with ``(method,
    rows)`` in ``odd`` swap them in every row."""

    def __init__(self, odd=(), margin=1e-5, has_logits=True, **metadata):
        super().__init__(replace(scripted_metadata(**metadata), has_logits=has_logits), greedy, greedy)
        self.odd, self.margin = odd, margin

    def _chosen(self, name, step, positions):
        logits = torch.zeros(1, step.ids.shape[1], VOCABULARY)
        for row, position in enumerate(positions[-step.ids.shape[1] :].tolist()):
            best = int(step.ids[0, row])
            pair = [best, (best + 1) % VOCABULARY]
            if position + 1 == AT and (name, len(positions)) in self.odd:
                pair.reverse()
            logits[0, row, pair] = torch.tensor([2.0, 2.0 - self.margin if position + 1 == AT else 1.0])
        return Step(logits.argmax(-1), step.feature, logits if self.metadata.has_logits else None)

    def prefill(self, tokens, input_pos):
        return self._chosen(PREFILL, super().prefill(tokens, input_pos), input_pos)

    def decode(self, tokens, input_pos):
        return self._chosen(DECODE, super().decode(tokens, input_pos), input_pos)

    def target_verify(self, tokens, input_pos):
        return self._chosen(TARGET_VERIFY, super().target_verify(tokens, input_pos), input_pos)


FOUR = ((TARGET_VERIFY, 4),)


def checked(session, count=30, **options):
    return replay(session, PROMPT, complete(session, PROMPT, max_new_tokens=count).token_ids, **options)


def by(divergence, token):
    return {(said.method, said.rows, said.row) for said in divergence.said if said.token == token}


def test_the_artifact_is_lossless_and_the_session_is_usable_after_a_replay(session):
    prompt = [2, 318, 1664, 11]
    said = complete(session, prompt, max_new_tokens=40).token_ids
    found = replay(session, prompt, said)
    assert lines(found) == [f"identical: {len(said)} tokens, replayed by decode"]
    assert found.as_json() == {"compared": len(said), "method": "decode", "divergence": None}
    assert complete(session, prompt, max_new_tokens=40).token_ids == said


def test_a_wrong_token_of_the_artifact_is_a_real_difference_and_its_methods_agree(session):
    prompt = list(range(40, 60))
    said = complete(session, prompt, max_new_tokens=12, stop_ids=()).token_ids
    found = replay(session, prompt, [*said[:7], (said[7] + 1) % session.metadata.vocab_size, *said[8:]])
    divergence = found.divergence
    assert (found.compared, divergence.index, divergence.position) == (8, 7, 27)
    assert (divergence.token, divergence.replayed) == ((said[7] + 1) % session.metadata.vocab_size, said[7])
    assert divergence.near_tie is divergence.reproduced is False
    windows = {(TARGET_VERIFY, rows, row) for rows in (2, 3, 4) for row in range(rows)}
    assert by(divergence, said[7]) == {(DECODE, 1, 0), (PREFILL, 27, 26), *windows}
    assert divergence.threshold == 1e-3  # the tolerance of float32
    assert divergence.relative_margin > 0.01  # the shipped model has no near-tie here
    for each in divergence.said:
        assert each.moved < 1e-4
        assert abs(each.margin - divergence.margin) < 1e-3
    assert "real difference" in lines(found)[-1]


def test_a_near_tie_is_reported_with_the_methods_that_round_differently():
    found = checked(Rounding(FOUR))
    divergence, token = found.divergence, greedy_sequence(greedy, PROMPT, 30)[AT - len(PROMPT)]
    assert (divergence.index, divergence.position) == (AT - len(PROMPT), AT)
    assert (divergence.token, divergence.replayed) == ((token + 1) % VOCABULARY, token)
    assert divergence.near_tie is divergence.reproduced is True
    assert divergence.margin == pytest.approx(1e-5, rel=0.1)
    assert divergence.moved == pytest.approx(2 * divergence.relative_margin)  # the two logits changed places
    assert by(divergence, divergence.token) == {(TARGET_VERIFY, 4, row) for row in range(4)}
    others = {(TARGET_VERIFY, rows, row) for rows in (2, 3) for row in range(rows)}
    assert by(divergence, token) == {(DECODE, 1, 0), (PREFILL, 7, 6), *others}
    own = divergence.said[-1]
    assert (own.speculated, own.rows, own.row, own.token) == (True, 4, 1, divergence.token)
    assert json.loads(json.dumps(found.as_json()))["divergence"]["said"][0]["method"] == DECODE
    assert lines(found, chr) == [
        f"differs at token 15 (position 21): {token + 1} {chr(token + 1)!r} with speculation, {token} {chr(token)!r} "
        "replayed by decode",
        f"  {token + 1} {chr(token + 1)!r}: target_verify of 4 rows, target_verify of 4 rows "
        "(row 2) over speculation's caches",
        f"  {token} {chr(token)!r}: decode, target_verify of 2 rows, target_verify of 3 rows, prefill of 7 rows",
        f"  the two best logits there differ by {divergence.margin:.2g}, {divergence.relative_margin:.2g} of their "
        "standard deviation",
        f"  a near-tie, not a defect: the two tokens' logits had to move by {divergence.moved:.2g} of their standard "
        "deviation, and kernels for different numbers of rows, which add in different orders, may move them by 0.001",
    ]


class FusedRounds(Rounding):
    """A session that rounds differently only in ``speculate``, which returns no logits."""

    def __init__(self):
        super().__init__()
        self.has_speculate = True

    def speculate(self, tokens, input_pos):
        self.odd = FOUR
        try:
            return super().speculate(tokens, input_pos)
        finally:
            self.odd = ()


def test_a_near_tie_of_fused_rounds_is_reported_with_speculate():
    found = checked(FusedRounds())
    divergence, own = found.divergence, found.divergence.said[-1]
    assert divergence.near_tie is divergence.reproduced is True and divergence.position == AT
    assert (own.method, own.speculated, own.token, own.moved) == (SPECULATE, True, divergence.token, None)
    assert divergence.moved == pytest.approx(divergence.relative_margin)  # no other method gives this token
    said = f"  {divergence.token}: speculate of 4 rows (row {own.row + 1}) over speculation's caches"
    assert said in lines(found)


def test_speculation_is_run_again_with_its_own_chain_length():
    session = Rounding(((TARGET_VERIFY, 2),))
    said = complete(session, PROMPT, max_new_tokens=30, chain=1).token_ids
    own = replay(session, PROMPT, said, chain=1).divergence.said[-1]
    assert (own.speculated, own.rows) == (True, 2)
    assert not replay(session, PROMPT, said).divergence.reproduced


def test_a_replay_does_not_end_at_stop_tokens():
    stop = greedy_sequence(greedy, PROMPT, 30)[3]
    session = Rounding(eos_ids=[stop])
    found = replay(session, PROMPT, complete(session, PROMPT, max_new_tokens=30, stop_ids=()).token_ids)
    assert (found.compared, found.divergence) == (30, None)


def test_methods_whose_logits_are_far_apart_are_a_defect():
    found = checked(Rounding(FOUR, margin=0.5))
    assert found.divergence.near_tie is False
    assert found.divergence.reproduced
    assert "a real difference" in lines(found)[-1]


def test_a_token_that_no_method_gives_is_a_defect_and_not_a_near_tie():
    """The loop emits the third best token, where the two best are a near-tie."""
    session = Rounding()
    said = complete(session, PROMPT, max_new_tokens=30).token_ids
    said[AT - len(PROMPT)] = (said[AT - len(PROMPT)] + 2) % VOCABULARY
    found = replay(session, PROMPT, said)
    assert found.divergence.index == AT - len(PROMPT)
    assert found.divergence.near_tie is False
    assert "no method" in lines(found)[1]


def test_a_difference_is_found_even_without_logits():
    found = checked(Rounding(FOUR, has_logits=False))
    divergence = found.divergence
    assert divergence.position == AT
    assert by(divergence, divergence.token) == {(TARGET_VERIFY, 4, row) for row in range(4)}
    assert divergence.margin is divergence.relative_margin is divergence.moved is divergence.near_tie is None
    assert "no logits" in lines(found)[-1]


def test_without_decode_a_replay_uses_windows_with_one_new_token():
    session = Rounding(((TARGET_VERIFY, 2),))
    session.has_decode = False
    found = checked(session)
    divergence = found.divergence
    assert (found.method, divergence.position) == (TARGET_VERIFY, AT)
    assert by(divergence, divergence.replayed) == {(TARGET_VERIFY, 2, 0), (TARGET_VERIFY, 2, 1)}
    assert DECODE not in {said.method for said in divergence.said}
    session.odd = ()
    assert lines(checked(session)) == [
        "identical: 30 tokens, replayed by target_verify, one new token per verify window"
    ]


def test_a_difference_at_the_contexts_end_is_explained():
    """One slot follows the row of the last token."""
    session = Rounding(((TARGET_VERIFY, 3),), max_seq_len=AT + 1)
    found = replay(session, PROMPT, greedy_sequence(greedy, PROMPT, 99, max_seq_len=AT + 1))
    assert (found.compared, found.divergence) == (AT + 1 - len(PROMPT), None)
    said = greedy_sequence(greedy, PROMPT, 99, max_seq_len=AT + 1)
    said[-1] = (said[-1] + 1) % VOCABULARY
    divergence = replay(session, PROMPT, said).divergence
    assert divergence.position == AT
    assert by(divergence, divergence.token) == {(TARGET_VERIFY, 3, 1), (TARGET_VERIFY, 3, 2)}


@pytest.mark.parametrize("window", [0, 4, 8])
def test_no_probe_reads_slots_that_were_never_written_or_overwritten_in_a_ring(window):
    """The scripted caches check this."""
    for index in range(40):
        session = Rounding(window=window, draft_window=window, min_prefill=3, max_prefill=min(window or 12, 12))
        said = greedy_sequence(greedy, PROMPT[:1], 40)
        said[index] = (said[index] + 1) % VOCABULARY
        divergence = replay(session, PROMPT[:1], said).divergence
        assert divergence.index == index
        assert (DECODE, 1, 0) in by(divergence, divergence.replayed)


def test_a_difference_caused_by_reused_caches_is_not_reported_as_reproduced():
    """All tokens of the second prompt but the last are cached, so ``decode`` computes the last one; without a cache
    ``prefill`` would compute it."""
    session, cached = Rounding(((DECODE, 1),)), CachedTokens()
    prompt = [*PROMPT, *greedy_sequence(greedy, PROMPT, AT - len(PROMPT))]
    complete(session, prompt[:-1], max_new_tokens=5, cached=cached)
    generation = complete(session, prompt, max_new_tokens=5, cached=cached)
    assert generation.stats.reused_prompt_tokens == len(prompt) - 1
    found = replay(session, prompt, generation.token_ids)
    assert (found.compared, found.divergence.near_tie, found.divergence.reproduced) == (1, True, False)
    assert by(found.divergence, generation.token_ids[0]) == {(DECODE, 1, 0)}
    assert "reused cached positions" in lines(found)[-3]


@pytest.mark.parametrize("count", [0, 58])
def test_a_replay_of_an_impossible_number_of_tokens_is_refused(count):
    with pytest.raises(ValueError, match=f"{count} generated tokens"):
        replay(Rounding(), PROMPT, [0] * count)


@pytest.mark.parametrize(
    ("record", "tie"),
    [
        (None, 0.1),
        ("{", 0.1),
        ('{"check": {"tolerance": "0.3"}}', 0.1),
        ('{"check": {"tolerance": 0.05}}', 0.1),
        ('{"check": {"tolerance": 0.21}}', 0.21),
    ],
)
def test_a_replay_uses_the_tolerance_measured_by_the_export_check(record, tie, tmp_path):
    if record is not None:
        (tmp_path / "export.json").write_text(record)
    session = Rounding(FOUR, manifest={"qlinear": "8da4w"})
    model = Model(session.metadata, lambda: session, tmp_path)
    said = model.generate(PROMPT, max_new_tokens=30, ignore_eos=True)
    assert model.replay(said).divergence.threshold == tie
