"""A session: an opened artifact (or an eager speculator) whose methods run one step each.

Whatever runs the methods, ``loop.py`` sees the same calls. A session has one KV cache: one generation at a time.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from eagle3.runner.contract import DECODE, DRAFT_DECODE, PREFILL, SPECULATE, TARGET_VERIFY, Metadata


class Step(NamedTuple):
    """What a method gives; shapes in ``eagle3.runner.contract``."""

    ids: Tensor
    feature: Tensor | None
    """None of a whole round, which keeps it."""
    logits: Tensor | None = None
    """None where the artifact has none, and of a whole round."""

    def own_feature(self) -> Tensor:
        """The feature of a step that is not a whole round."""
        assert self.feature is not None, "a whole round keeps its feature"
        return self.feature


class WholeRound(NamedTuple):
    """What ``speculate`` gives: ``said`` on the host; what the next call takes, where the session keeps it."""

    said: Tensor
    tokens: Tensor
    input_pos: Tensor


class Session(Protocol):
    """Shapes as in ``eagle3.runner.contract``; H is the draft's hidden size. Ids and positions are on the host; a
    feature is where the session keeps it, and goes back as it came, whole or cut to its first rows; logits are there
    too."""

    metadata: Metadata
    positions: Tensor
    """int64 [max_seq_len], 0, 1, 2, ...: slices of it are every ``input_pos``, since making one anew costs 20 us."""
    has_decode: bool
    has_speculate: bool
    seconds: defaultdict[str, float]
    """Seconds spent inside each method so far."""
    calls: Counter[str]
    """Calls of each method so far."""

    def prefill(self, tokens: Tensor, input_pos: Tensor) -> Step: ...
    def target_verify(self, tokens: Tensor, input_pos: Tensor) -> Step: ...
    def draft_decode(self, tokens: Tensor, feature: Tensor, input_pos: Tensor) -> Step: ...
    def decode(self, tokens: Tensor, input_pos: Tensor) -> Step: ...
    def speculate(self, tokens: Tensor, input_pos: Tensor) -> WholeRound:
        """Inputs from the host, or those that the round before gave."""

    def close(self) -> None:
        """Give back what the session holds; it cannot be used after that."""


def missing_method(name: str, closed: bool) -> str:
    """Why a session cannot call a method."""
    flag = "--speculate" if name == SPECULATE else "--with-decode"
    return f"the artifact {'is closed' if closed else f'has no method {name}: export it with {flag}'}"


class TimedSession:
    """The methods over one ``_call``, each call counted and timed."""

    def __init__(self, metadata: Metadata):
        self.metadata = metadata
        self.positions = torch.arange(metadata.max_seq_len)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()

    def _call(self, name: str, *inputs: Tensor) -> Iterable[Tensor]:
        """The outputs of a method, in the contract's order."""
        raise NotImplementedError

    def _timed(self, name: str, *inputs: Tensor) -> Iterable[Tensor]:
        start = time.perf_counter()
        outputs = self._call(name, *inputs)
        self.seconds[name] += time.perf_counter() - start
        self.calls[name] += 1
        return outputs

    def prefill(self, tokens: Tensor, input_pos: Tensor) -> Step:
        return Step(*self._timed(PREFILL, tokens, input_pos))

    def target_verify(self, tokens: Tensor, input_pos: Tensor) -> Step:
        return Step(*self._timed(TARGET_VERIFY, tokens, input_pos))

    def draft_decode(self, tokens: Tensor, feature: Tensor, input_pos: Tensor) -> Step:
        return Step(*self._timed(DRAFT_DECODE, tokens, feature, input_pos))

    def decode(self, tokens: Tensor, input_pos: Tensor) -> Step:
        return Step(*self._timed(DECODE, tokens, input_pos))

    def speculate(self, tokens: Tensor, input_pos: Tensor) -> WholeRound:
        return WholeRound(*self._timed(SPECULATE, tokens, input_pos))

    def close(self) -> None:
        pass


class EagerSession(TimedSession):
    """The same methods of a PyTorch module, to hold an artifact against."""

    has_decode = has_speculate = True

    def __init__(self, speculator: torch.nn.Module, metadata: Metadata):
        super().__init__(metadata)
        self._speculator = speculator

    def _call(self, name: str, *inputs: Tensor) -> Iterable[Tensor]:
        with torch.no_grad():
            return getattr(self._speculator, name)(*inputs)
