"""The check of first proposals accepts near-ties and nothing else, for the scores of any kind of head."""

from types import SimpleNamespace

import pytest
import torch

from eagle3.export.checks.artifact import _is_best

TIE = 0.5
ALL_TOKENS = SimpleNamespace(draft=SimpleNamespace(ids_in_target=lambda: None))


def logits_of(candidates: int, vocabulary: int = 150_000) -> torch.Tensor:
    """Return scores with a standard deviation of 2.5; with ``candidates``, all other tokens have the smallest of these
    scores, less one."""
    scores = 2.5 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(0))
    if candidates:
        best = scores.topk(candidates)
        scores = torch.full_like(scores, float(best.values.min()) - 1).scatter(0, best.indices, best.values)
    return scores


@pytest.mark.parametrize("candidates", [0, 16])
def test_a_near_tied_proposal_is_accepted_and_a_far_one_is_a_fault(candidates):
    logits = logits_of(candidates)
    best, second = logits.topk(2).indices.tolist()
    logits[second] = logits[best] - 0.1
    assert _is_best(ALL_TOKENS, logits, best, 7, TIE)
    assert not _is_best(ALL_TOKENS, logits, second, 7, TIE)
    with pytest.raises(ValueError, match=f"proposes token {int(logits.argmin())} after position 7"):
        _is_best(ALL_TOKENS, logits, int(logits.argmin()), 7, TIE)
