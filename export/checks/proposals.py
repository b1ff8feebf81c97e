"""Compares the finished artifact's first proposals after a prompt with those of the eager head.

A wrongly lowered head changes no token of the text, since the target decides each. The only symptom is that proposals
are rejected, so this comparison looks at the proposals themselves.
"""

import torch
from torch import Tensor

from eagle3.export.planning.plan import Plan
from eagle3.export.speculator.speculator import Eagle3Speculator
from eagle3.runner.contract import DRAFT_DECODE, PREFILL


@torch.no_grad()
def compare_proposals(
    speculator: Eagle3Speculator, plan: Plan, prompt: list[int], window: list[int], tie: float
) -> int | None:
    """Compare the proposals in ``window``, the first verify window after ``prompt``, with the eager head's. The
    window's first row is the token after ``prompt``.

    Returns how many proposals agree, up to the first near-tie. Returns None for a prompt of several chunks, and if
    nothing was proposed. Raises ValueError if a proposal's logit lies further than ``tie`` below the best one, in
    standard deviations of the logits.
    """
    draft, rows = plan.draft, len(prompt)
    if len(window) < 2 or rows > min(
        plan.method(PREFILL).max_len, plan.method(DRAFT_DECODE).max_len if draft.has_cache else rows
    ):
        return None
    positions = torch.arange(rows)
    state, taps = speculator.target(torch.tensor([prompt]), positions, speculator.taps)
    feature = speculator.draft.fuse((state,) if draft.takes_final_state else taps)
    tokens = torch.tensor([prompt[1:] + window[:1]])
    if not draft.has_cache:
        tokens, feature, positions = tokens[:, -1:], feature[:, -1:], positions[-1:]
    same, slot = 0, rows - 1
    while same < len(window) - 1:
        logits, feature = speculator.draft(tokens, feature, positions, last=True)
        for row in logits[0, : len(window) - 1 - same]:
            if not _is_best(speculator, row, window[1 + same], rows + same, tie):
                return same
            same += 1
        slot += draft.has_cache
        tokens, feature, positions = torch.tensor([[window[same]]]), feature[:, -1:], torch.tensor([slot])
    return same


def _is_best(speculator: Eagle3Speculator, logits: Tensor, proposed: int, position: int, tie: float) -> bool:
    """Return True if the proposal is the eager head's best token, and False for a near-tie."""
    ids = speculator.draft.ids_in_target()
    column = proposed if ids is None else int((ids == proposed).nonzero()[0])
    best = logits.argmax()
    scored = logits[logits > logits.min()].float()  # some kinds give the same low logit to all but a few candidates
    behind = float((logits[best] - logits[column]) / scored.std())
    if behind > tie:
        wanted = int(best) if ids is None else int(ids[best])
        raise ValueError(
            f"the artifact's draft proposes token {proposed} after position {position}, the eager head proposes "
            f"{wanted} (by {behind:.2g} of the logits' spread): the lowering changed what the draft head computes"
        )
    return column == int(best)
