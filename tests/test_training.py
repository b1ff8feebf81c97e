"""The unrolled head of scripts/tiny_draft.py is the head in use: each step at each slot as the chain computes it."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from tiny_draft import Unroll

from eagle3.export.draft.loading import load_draft
from eagle3.export.draft.reading import read_draft
from eagle3.targets.attention import EagerAttention

GOLDEN = Path(__file__).parent / "golden" / "llama_nbr_true"


def test_every_step_of_the_unrolled_head_equals_the_chain():
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
