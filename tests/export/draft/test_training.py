"""Heads trained on whole sequences compute the same as in inference: each step at each slot equals the chain
(scripts/train/tiny_draft.py), and each mask row equals a round (scripts/train/tiny_peagle.py)."""

import torch
from places import TESTS
from safetensors.torch import load_file
from tiny_draft import Unroll
from tiny_peagle import PROPOSALS, WholeSequences, all_rows

from eagle3.export.draft.loading import load_draft
from eagle3.export.draft.reading import read_draft
from eagle3.targets.attention import EagerAttention

GOLDEN = TESTS / "golden" / "eagle3" / "llama_nbr_true"


def test_every_step_of_the_unrolled_head_in_training_equals_the_chain():
    draft, golden = read_draft(GOLDEN), load_file(GOLDEN / "golden.safetensors")
    head = load_draft(draft, 32, torch.float32, EagerAttention, target=None)
    feature = head.fuse(golden["taps"].chunk(3, dim=-1))
    tokens, length = golden["tokens"], 8
    unroll = Unroll(head, length)
    states = [unroll.step(tokens[:, :length], feature[:, :length])]
    for step in (1, 2):
        states.append(unroll.step(tokens[:, step : step + length], states[-1]))
    for slot in (0, 3, length - 1):
        _, state = head(tokens[:, : slot + 1], feature[:, : slot + 1], torch.arange(slot + 1), last=True)
        torch.testing.assert_close(states[0][:, slot : slot + 1], state, atol=1e-5, rtol=1e-5)
        for step in (1, 2):
            at = torch.tensor([slot + step])
            _, state = head(tokens[:, slot + step, None], state, at, last=True)
            torch.testing.assert_close(states[step][:, slot : slot + 1], state, atol=1e-5, rtol=1e-5)


def test_mask_rows_after_several_slots_in_training_equal_a_round_after_each():
    folder = TESTS / "golden" / "peagle" / "peagle_two_layers"
    draft, golden = read_draft(folder), load_file(folder / "golden.safetensors")
    trained = load_draft(draft, 32, torch.float32, lambda _: WholeSequences(), target=None)
    used = load_draft(draft, 32, torch.float32, EagerAttention, target=None, proposals=PROPOSALS)
    tokens, feature = golden["tokens"][:, :10], trained.fuse(golden["taps"].chunk(3, dim=-1))[:, :10]
    anchors = torch.tensor([0, 3, 4, 9])
    states = all_rows(trained, used.mask_feature, tokens, feature, anchors)
    behind = states[:, 10:].unflatten(1, (len(anchors), PROPOSALS - 1))
    for index, slot in enumerate(anchors):
        rows = slice(0, slot + 1)
        _, found = used(tokens[:, rows], feature[:, rows], torch.arange(slot + 1), last=True)
        expected = torch.cat((states[:, slot, None], behind[:, index]), 1)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
