"""A session runs the methods of an opened artifact (or of an eager module), one step per call.

The loop (``loop/rounds.py``) makes the same calls whichever host runs the methods. A session has one KV cache, so it
runs one generation at a time.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from eagle3.runner.contract import (
    DECODE,
    DRAFT_DECODE,
    PREFILL,
    READ_STATE,
    SPECULATE,
    TARGET_VERIFY,
    WRITE_STATE,
    Metadata,
)


class Step(NamedTuple):
    """The outputs of a method; shapes are in ``eagle3.runner.contract``."""

    ids: Tensor
    feature: Tensor | None
    """It is None for a fused round and for an artifact without a draft head."""
    logits: Tensor | None = None
    """They are None if the artifact has no logits, and for a fused round."""

    def own_feature(self) -> Tensor:
        """Return the feature of a step that is not a fused round."""
        assert self.feature is not None, "a fused round returns no feature"
        return self.feature


class FusedRound(NamedTuple):
    """The outputs of ``speculate``: ``said`` (greedy ids and next window) on the host, and the inputs of the next call,
    which stay on the session's device."""

    said: Tensor
    tokens: Tensor
    input_pos: Tensor


class Session(Protocol):
    """The interface that the loop uses. Shapes are as in ``eagle3.runner.contract``; H is the draft's hidden size.

    Ids and positions are on the host. Features and logits are on the session's device. The caller passes a feature back
    as it was returned, whole or cut to its first rows. A draft without a cache gets one row of it.
    """

    metadata: Metadata
    positions: Tensor
    """int64 [max_seq_len], 0, 1, 2, ... Every ``input_pos`` is a slice of it, because a new tensor costs 20 us."""
    has_decode: bool
    has_speculate: bool
    seconds: defaultdict[str, float]
    """Seconds spent inside each method so far."""
    calls: Counter[str]
    """Calls of each method so far."""
    load_seconds: float
    """Seconds spent loading methods so far, which ``seconds`` leaves out."""

    def prefill(self, tokens: Tensor, input_pos: Tensor) -> Step: ...
    def target_verify(self, tokens: Tensor, input_pos: Tensor) -> Step: ...
    def draft_decode(self, tokens: Tensor, feature: Tensor, input_pos: Tensor) -> Step: ...
    def decode(self, tokens: Tensor, input_pos: Tensor) -> Step: ...
    def speculate(self, tokens: Tensor, input_pos: Tensor) -> FusedRound:
        """Run a fused round. The inputs come from the host, or are those that the previous round returned."""

    def read_state(self, pieces: Tensor) -> list[Tensor]:
        """Return a piece of each buffer of the state, on the host; ``pieces`` int64 [groups]."""

    def write_state(self, pieces: Tensor, values: Sequence[Tensor]) -> None:
        """Write a piece of each buffer of the state."""

    def close(self) -> None:
        """Free the session's memory. It cannot be used afterwards."""


def missing_method(name: str, closed: bool) -> str:
    """Return an error message that says why a session cannot call the method ``name``."""
    flag = {SPECULATE: "--speculate", DECODE: "--with-decode"}.get(name, "--sessions")
    return f"the artifact {'is closed' if closed else f'has no method {name}: export it with {flag}'}"


def rows_of_method(name: str, rows: int, metadata: Metadata, outputs: Iterable[Tensor]) -> list[Tensor]:
    """Cut the outputs of ``target_rows``, called with ``rows`` rows, to the outputs of the method ``name``."""
    ids, *others = outputs
    last = rows if name == TARGET_VERIFY else 1
    if metadata.has_logits:
        others[-1] = others[-1][:, -last:]
    return [ids[:, -last:], *others]


class TimedSession:
    """Implements all methods through ``_call``, and counts and times the calls."""

    def __init__(self, metadata: Metadata):
        self.metadata = metadata
        self.positions = torch.arange(metadata.max_seq_len)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.load_seconds = 0.0

    def _load(self, name: str) -> None:
        """Load a method unless it is loaded."""

    def _call(self, name: str, *inputs: Tensor) -> Iterable[Tensor]:
        """Run a method and return its outputs in the contract's order."""
        raise NotImplementedError

    def _timed(self, name: str, *inputs: Tensor) -> Iterable[Tensor]:
        method = self.metadata.method_for(name)
        before = time.perf_counter()
        self._load(method)
        start = time.perf_counter()
        self.load_seconds += start - before
        outputs = self._call(method, *inputs)
        if method != name:
            outputs = rows_of_method(name, inputs[0].shape[1], self.metadata, outputs)
        self.seconds[name] += time.perf_counter() - start
        self.calls[name] += 1
        return outputs

    def _step(self, name: str, tokens: Tensor, input_pos: Tensor) -> Step:
        """Run a method of the target."""
        ids, *others = self._timed(name, tokens, input_pos)
        return Step(ids, *others) if self.metadata.has_draft else Step(ids, None, *others)

    def prefill(self, tokens: Tensor, input_pos: Tensor) -> Step:
        return self._step(PREFILL, tokens, input_pos)

    def target_verify(self, tokens: Tensor, input_pos: Tensor) -> Step:
        return self._step(TARGET_VERIFY, tokens, input_pos)

    def draft_decode(self, tokens: Tensor, feature: Tensor, input_pos: Tensor) -> Step:
        return Step(*self._timed(DRAFT_DECODE, tokens, feature, input_pos))

    def decode(self, tokens: Tensor, input_pos: Tensor) -> Step:
        return self._step(DECODE, tokens, input_pos)

    def speculate(self, tokens: Tensor, input_pos: Tensor) -> FusedRound:
        return FusedRound(*self._timed(SPECULATE, tokens, input_pos))

    def read_state(self, pieces: Tensor) -> list[Tensor]:
        return [value.cpu().clone(memory_format=torch.contiguous_format) for value in self._timed(READ_STATE, pieces)]

    def write_state(self, pieces: Tensor, values: Sequence[Tensor]) -> None:
        self._timed(WRITE_STATE, pieces, *values)

    def close(self) -> None:
        pass


class MethodsSession(TimedSession):
    """Runs ``methods``, functions by the names of the program's methods."""

    def __init__(self, methods: Mapping[str, Callable[..., Iterable[Tensor]]], metadata: Metadata):
        super().__init__(metadata)
        self._methods = methods
        self.has_decode, self.has_speculate = metadata.method_for(DECODE) in methods, SPECULATE in methods

    def _call(self, name: str, *inputs: Tensor) -> Iterable[Tensor]:
        return self._methods[name](*inputs)


class EagerSession(TimedSession):
    """Runs the same methods on a PyTorch module, as the reference for an artifact."""

    has_decode = True

    def __init__(self, speculator: torch.nn.Module, metadata: Metadata):
        super().__init__(metadata)
        self.has_speculate = metadata.has_draft
        self._speculator = speculator

    def _call(self, name: str, *inputs: Tensor) -> Iterable[Tensor]:
        with torch.no_grad():
            return getattr(self._speculator, name)(*inputs)
