"""The draft head equals speculators' Eagle3DraftModel and DeepSpec's Qwen3Eagle3Model and Gemma4Eagle3Model, whose own
code made the golden numbers (scripts/golden/make_draft_golden.py, scripts/golden/make_deepspec_golden.py)."""

import pytest
import torch
from places import TESTS
from safetensors.torch import load_file

from eagle3.export.draft.loading import load_draft
from eagle3.export.draft.reading import read_draft
from eagle3.targets.attention import EagerAttention

GOLDEN = TESTS / "golden" / "eagle3"
CASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())


def open_case(case: str):
    draft = read_draft(GOLDEN / case)
    head = load_draft(draft, 32, torch.float32, EagerAttention, target=None)
    return draft, head, load_file(GOLDEN / case / "golden.safetensors")


def taps_of(golden, draft):
    return golden["taps"].chunk(len(draft.aux_layers), dim=-1)


def seeded(head, tokens, feature):
    """Write every slot, in chunks that the head's sliding window allows, and return the outputs."""
    chunk = head.window or tokens.shape[1]
    spans = [slice(start, start + chunk) for start in range(0, tokens.shape[1], chunk)]
    slots = torch.arange(tokens.shape[1])
    parts = [head(tokens[:, span], feature[:, span], slots[span]) for span in spans]
    return tuple(torch.cat(outputs, dim=1) for outputs in zip(*parts, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_every_slot_the_chain_and_rolled_back_slots_equal_the_trainers(case):
    draft, head, golden = open_case(case)
    close = {"atol": 1e-4, "rtol": 1e-4}
    feature = head.fuse(taps_of(golden, draft))
    torch.testing.assert_close(feature, golden["feature"], **close)
    length = feature.shape[1]
    logits, recurrent = seeded(head, golden["tokens"], feature)
    torch.testing.assert_close(logits, golden["logits_0"], **close)
    torch.testing.assert_close(recurrent, golden["recurrent_0"], **close)
    head(golden["tokens"][:, :4].flip(1), feature[:, :4], torch.arange(length - 4, length))  # rejected
    for start in (length - 6, length - 3):
        rows = slice(start, start + 3)
        again, recurrent = head(golden["tokens"][:, rows], feature[:, rows], torch.arange(start, start + 3))
        torch.testing.assert_close(again, golden["logits_0"][:, rows], **close)
    told = head.ids_in_target()  # the ids of sampled proposals, which the metadata has
    greedy = head.target_ids(torch.eye(draft.draft_vocab_size)).tolist()
    assert greedy == (list(range(draft.draft_vocab_size)) if told is None else told.tolist())
    token, state = head.target_ids(logits[:, -1:]), recurrent[:, -1:]
    for step in range(3):
        if step:
            logits, state = head(token, state, torch.tensor([length + step - 1]), last=True)
            token = head.target_ids(logits)
        assert token.item() == golden["chain_ids"][step]
        torch.testing.assert_close(logits[0, -1], golden["chain_logits"][step], **close)
        torch.testing.assert_close(state[0, -1], golden["chain_recurrent"][step], **close)


@pytest.mark.parametrize("positions", [[1], [3], [0, 2], [30, 31, 32]])
def test_gaps_and_overruns_of_draft_slots_are_refused(positions):
    draft, head, golden = open_case(CASES[0])
    feature = head.fuse(taps_of(golden, draft))[:, : len(positions)]
    if positions[0] == 30:
        head._slots_written = 30
    with pytest.raises(ValueError, match="gap|not consecutive|past max_seq_len"):
        head(golden["tokens"][:, : len(positions)], feature, torch.tensor(positions))


def test_a_sliding_window_hides_exactly_the_slots_before_it():
    """The window has 5 slots, so a change of slot 6 affects slots 6 to 10 and no later one."""
    case = "llama_window"
    draft, _, golden = open_case(case)
    assert draft.window == 5
    changed = golden["tokens"].clone()
    changed[0, 6] = (changed[0, 6] + 1) % 96
    given, other = (
        seeded(open_case(case)[1], tokens, open_case(case)[1].fuse(taps_of(golden, draft)))[0]
        for tokens in (golden["tokens"], changed)
    )
    differs = (given - other).abs().amax(-1)[0] > 1e-5
    assert differs.nonzero()[:, 0].tolist() == [6, 7, 8, 9, 10]
