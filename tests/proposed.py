"""The proposals of a draft head, kept while a session is used."""

import torch

from eagle3.runner.contract import DRAFT_DECODE
from eagle3.runner.hosts.session import TimedSession


def proposed(session: TimedSession) -> list[list[int]]:
    """Filled while ``session`` is used: the proposals of each call of ``draft_decode``."""
    proposals, call = [], session._call

    def keep(name: str, *inputs: torch.Tensor) -> list[torch.Tensor]:
        results = list(call(name, *inputs))
        if name == DRAFT_DECODE:
            proposals.append(results[0].flatten().tolist())
        return results

    session._call = keep
    return proposals
