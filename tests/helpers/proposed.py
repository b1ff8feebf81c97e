"""Records the proposals of a draft head while a session is used."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from eagle3.runner.contract import DRAFT_DECODE
from eagle3.runner.hosts.session import TimedSession


@contextmanager
def proposed(session: TimedSession) -> Iterator[list[list[int]]]:
    """Yield a list that is filled, while ``session`` is used, with the proposals of each call of ``draft_decode``."""
    proposals, call = [], session._call

    def keep(name: str, *inputs: torch.Tensor) -> list[torch.Tensor]:
        results = list(call(name, *inputs))
        if name == DRAFT_DECODE:
            proposals.append(results[0].flatten().tolist())
        return results

    with patch.object(session, "_call", keep):
        yield proposals
