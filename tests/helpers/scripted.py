"""A scripted session: the target's greedy tokens are a function of the prefix, and so are the draft's proposals.

Its caches have an entry wherever real caches have keys and values, and refuse incorrect accesses: gaps, reads of
entries that were never written, were overwritten or belong to another prefix, and features that do not belong to their
slot.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch

from eagle3.runner.contract import Metadata
from eagle3.runner.hosts.session import FusedRound, Step
from eagle3.runner.loop.cached_tokens import common_prefix

VOCABULARY = 23
MASK = -1  # the token of a P-EAGLE's mask rows


def scripted_metadata(
    max_seq_len=64,
    min_prefill=4,
    max_prefill=7,
    chain_len=3,
    eos_ids=(),
    window=0,
    draft_window=0,
    proposals=1,
    manifest=None,
    verify_rows=None,
    rollback_rows=None,
) -> Metadata:
    return Metadata(
        max_seq_len=max_seq_len,
        vocab_size=VOCABULARY,
        n_layers=1,
        min_prefill=min_prefill,
        max_prefill=max_prefill,
        sliding_window=window,
        chain_len=chain_len,
        draft_vocab_size=VOCABULARY,
        bos_id=-1,
        eos_ids=tuple(eos_ids),
        manifest=manifest or {},
        use_kv_cache=True,
        use_sdpa_with_kv_cache=False,
        enable_dynamic_shape=True,
        proposals=proposals,
        draft_sliding_window=draft_window,
        verify_rows=verify_rows,
        rollback_rows=rollback_rows,
    )


class Entry(NamedTuple):
    """The keys and values at a position, which depend on all tokens (``prefix``) up to its own. ``guessed`` is True if
    they depend on a feature that is not the target's."""

    position: int
    prefix: tuple[int, ...]
    guessed: bool = False


class ScriptedCache:
    """A cache. With a ``window`` it is a ring of two windows, whose slots hold the last write; without one it has a
    slot per position."""

    def __init__(self, window: int):
        self.window = window
        self.entries: dict[int, Entry] = {}

    def write(self, entry: Entry) -> None:
        self.entries[self._slot(entry.position)] = entry

    def __getitem__(self, position: int) -> Entry:
        entry = self.entries.get(self._slot(position))
        assert entry is not None, f"position {position} was never written"
        assert entry.position == position, f"the slot of position {position} holds position {entry.position}"
        return entry

    def check(self, entry: Entry, seeded: int | None = None) -> None:
        """Check that every entry that a row attends to exists and has the row's prefix, and that none before slot
        ``seeded`` is guessed."""
        behind = len(entry.prefix) - entry.position
        for position in range(max(0, entry.position - self.window + 1) if self.window else 0, entry.position + 1):
            held = self[position]
            assert held.prefix == entry.prefix[: position + behind], f"position {position} is of another prefix"
            assert not held.guessed or position >= seeded, f"slot {position} was not seeded again"

    def _slot(self, position: int) -> int:
        return position % (2 * self.window) if self.window else position


class ScriptedState:
    """The state of recurrent layers: the tokens that it and the saved state were computed from, and a ring of the rows
    that a call may have rejected."""

    def __init__(self, rollback_rows: int):
        self.rollback_rows = rollback_rows
        self.committed: tuple[int, ...] = ()
        self.saved: tuple[int, ...] = ()
        self.rows: dict[int, Entry] = {}

    def run(self, before: tuple[int, ...], entries: list[Entry]) -> None:
        """Check that the rows of a call can be computed after the tokens ``before``, and commit what it commits."""
        first, rollback, chunk = len(before), self.rollback_rows, len(entries) > self.rollback_rows
        state = self.committed if first else ()
        if chunk and 0 < first < len(self.committed) and first == len(self.saved):
            state = self.saved
        assert len(state) <= first <= len(state) + rollback, f"a state of {len(state)} tokens, a call at {first}"
        for position in range(len(state), first):
            row = self.rows[position % rollback]
            assert row.position == position and row.prefix == before[: position + 1], "the row is of another text"
        assert state == before[: len(state)], "the state is of another text"
        self.committed = before
        if chunk:
            self.committed = self.saved = entries[-rollback - 1].prefix
        self.rows |= {entry.position % rollback: entry for entry in entries[-rollback:]}


class ScriptedSession:
    """A session made of two functions of a tuple of ids: ``greedy(prefix) -> token`` is the target and
    ``proposal(prefix) -> token`` the draft. The feature of position p is [p, a number of its own], so that a draft slot
    can check that it got the right one. The call at which ``calls_left`` reaches 0 raises ``failure`` after
    ``rows_written`` of its rows.
    """

    def __init__(self, metadata: Metadata, greedy: Callable, proposal: Callable):
        self.metadata, self.greedy, self.proposal = metadata, greedy, proposal
        self.positions = torch.arange(metadata.max_seq_len)
        self.target_cache = ScriptedCache(metadata.sliding_window)
        self.draft_cache = ScriptedCache(metadata.draft_sliding_window)
        self.state = ScriptedState(metadata.rollback_rows) if metadata.rollback_rows else None
        self.has_decode, self.has_speculate = True, False
        self.seconds, self.calls, self.load_seconds = Counter(), Counter(), 0.0
        self.windows: list[int] = []
        self.fused_rounds = 0
        self.failure: BaseException | None = None
        self.calls_left = self.rows_written = 0
        self._prefixes: list[tuple[int, ...]] = []
        self._seeded = 0

    def _write(self, cache: ScriptedCache, entries: list[Entry]) -> None:
        fails = self.failure is not None and self.calls_left == 0
        self.calls_left -= 1
        for entry in entries[: self.rows_written if fails else None]:
            cache.write(entry)
        if fails:
            raise self.failure

    def _target(self, tokens, input_pos):
        positions, row = input_pos.tolist(), tokens[0].tolist()
        assert positions == list(range(positions[0], positions[0] + len(row)))
        assert positions[-1] < self.metadata.max_seq_len, "past the cache"
        before = self.target_cache[positions[0] - 1].prefix if positions[0] else ()
        entries = [Entry(p, (*before, *row[: i + 1])) for i, p in enumerate(positions)]
        if self.state is not None:
            self.state.run(before, entries)
        self._write(self.target_cache, entries)
        for entry in entries:
            self.target_cache.check(entry)
        ids = torch.tensor([[self.greedy(entry.prefix) for entry in entries]])
        feature = torch.tensor([[[p, len(self._prefixes) + i] for i, p in enumerate(positions)]])
        self._prefixes += [entry.prefix for entry in entries]
        return Step(ids, feature.float())

    def prefill(self, tokens, input_pos):
        assert self.metadata.min_prefill <= tokens.shape[1] <= self.metadata.max_prefill
        step = self._target(tokens, input_pos)
        return Step(step.ids[:, -1:], step.feature)

    def decode(self, tokens, input_pos):
        assert tokens.shape[1] == 1
        return self._target(tokens, input_pos)

    def target_verify(self, tokens, input_pos):
        assert 2 <= tokens.shape[1] <= self.metadata.window
        self.windows.append(tokens.shape[1])
        return self._target(tokens, input_pos)

    def draft_decode(self, tokens, feature, input_pos):
        positions, row = input_pos.tolist(), tokens[0].tolist()
        assert 1 <= len(row) <= max(self.metadata.max_prefill, self.metadata.window)
        assert feature.shape[:2] == tokens.shape
        assert positions[-1] < self.metadata.max_seq_len - 1, "a draft slot whose token is past the context"
        entries, seeded = [], positions[-1] + 1
        for p, token, (given, number) in zip(positions, row, feature[0].tolist(), strict=True):
            assert given in (p, -1), f"slot {p} was given the feature of {given}"
            if given == p:
                before = self._prefixes[int(number)]
                assert before == self.target_cache[p].prefix, "the feature of a rejected prefix"
            else:
                before, seeded = self.draft_cache[p - 1].prefix, self._seeded
            entries.append(Entry(p, (*before, token), guessed=given != p))  # slot p holds token p + 1
        for _ in range(1, self.metadata.proposals):
            position, prefix, _ = entries[-1]
            entries.append(Entry(position + 1, (*prefix, MASK), guessed=True))
        self._write(self.draft_cache, entries)
        self._seeded = seeded
        for entry in entries:
            self.draft_cache.check(entry, seeded)
        prefix = entries[len(row) - 1].prefix
        for _ in range(self.metadata.proposals):
            prefix = (*prefix, self.proposal(prefix))
        return Step(torch.tensor([prefix[-self.metadata.proposals :]]), torch.tensor([[[-1.0, 0.0]]]))

    def speculate(self, tokens, input_pos):
        """Run a fused round. It also writes draft rows after the accepted ones, with entries that belong to no
        prefix."""
        (first, *_), window = input_pos.tolist(), tokens[0].tolist()
        assert len(window) == self.metadata.chain_len + 1
        assert first + 2 * len(window) <= self.metadata.max_seq_len, "the next window may not fit"
        step = self.target_verify(tokens, input_pos)
        rows = common_prefix(window[1:], step.ids[0].tolist()) + 1
        for position in range(first, first + len(window) + self.metadata.proposals - 1):
            self.draft_cache.write(Entry(position, (), guessed=True))
        drafted = self.draft_decode(step.ids[:, :rows], step.feature[:, :rows], input_pos[:rows])
        chain, following = [step.ids[:, rows - 1 : rows], drafted.ids], input_pos + rows
        for position in range(first + rows, first + rows + len(window) - 1 - self.metadata.proposals):
            drafted = self.draft_decode(drafted.ids, drafted.feature, self.positions[position : position + 1])
            chain.append(drafted.ids)
        self.fused_rounds += 1
        window = torch.cat(chain, dim=1)
        return FusedRound(torch.cat((step.ids, window)), window, following)


class ThreeMethods:
    """A session without ``speculate``, so that each round calls three methods."""

    has_speculate = False

    def __init__(self, session):
        self._session = session

    def __getattr__(self, name):
        return getattr(self._session, name)


def greedy_sequence(greedy: Callable, prompt: list[int], count: int, stop_ids=(), max_seq_len: int = 64) -> list[int]:
    """Return the tokens of decoding one token at a time."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < count and len(tokens) < max_seq_len:
        tokens.append(greedy(tuple(tokens)))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]
