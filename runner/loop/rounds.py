"""Runs the shifted loop: prefill and seed, then rounds that verify, accept, reseed and chain.

Draft slot p pairs the target's feature at p with token p + 1, at position p, and proposes token p + 2. The corrected
token of a round never needs a target forward of its own: it is the first row of the next window, and its draft slot is
written with the target's feature from the round that chose it. Both caches roll back by writing positions again.

A draft without a cache of its own attends to the target's. It is not seeded. Each round begins with the slot before the
anchor, and all draft steps of the round have that position.

A round may verify the proposals of a lookup in the text instead of the draft's. The draft slots of such a round are
deferred: they are written with the target's features before the draft's next step.

This file also cuts a text into calls of an artifact's methods: prefill chunks, verify windows and deferred draft slots.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from eagle3.runner.contract import Metadata
from eagle3.runner.hosts.session import Session, Step
from eagle3.runner.loop.adaptive_chain import ChainLength
from eagle3.runner.loop.cached_tokens import CachedTokens, common_prefix
from eagle3.runner.loop.choice import Choice
from eagle3.runner.loop.lookup_choice import LookupChoice
from eagle3.runner.loop.statistics import GenerationStats

Result = TypeVar("Result")


class Rounds:
    """The rounds of one generation, over a session whose caches hold the tokens of ``cached``."""

    def __init__(
        self,
        session: Session,
        chain: ChainLength,
        choice: Choice,
        cached: CachedTokens,
        lookup: LookupChoice | None = None,
    ):
        self._session, self._chain, self._choice, self._cached = session, chain, choice, cached
        self._lookup, self._by_lookup = lookup, False
        self._has_deferred = False  # True if the seed has deferred draft slots of lookup rounds
        self._wrote_deferred = True  # True if the round's draft step wrote deferred slots or those of the prompt
        self._seed = Seed()
        self._may_fuse = session.has_speculate and choice.greedy
        self._masks = session.metadata.proposals - 1  # rows that a P-EAGLE head writes after its input rows
        self._has_draft_cache = session.metadata.has_draft_cache

    def run(self, prompt: list[int], stats: GenerationStats) -> Iterator[list[int]]:
        """Yield [] after each chunk of the prompt but the last, then the first token, then the tokens that each round
        accepts. The rounds never end by themselves; the caller must stop at the context's last position."""
        self._chain.begin()
        if self._lookup is not None:
            self._lookup.begin(prompt)
        try:
            anchor = yield from self._prefill(prompt, stats)
            yield [anchor]
            window, drafting = timed(self._propose, write_slots=True)  # the next turn reuses the prompt's slots
            while window is not None:
                if not self._by_lookup and self._fused_round_fits(window.shape[1]):
                    window, drafting = (yield from self._fused_rounds(window, stats)), 0.0
                else:
                    (ids, proposed), verifying = timed(self._verify_window, window)
                    by_lookup = self._by_lookup
                    self._record(ids, proposed, drafting + verifying)
                    window, drafting = timed(self._propose)
                    stats.record(proposed, len(ids) - 1, by_lookup)
                    yield ids
        except Exception:
            self._cached.clear()
            raise

    def _verify_window(self, window: Tensor) -> tuple[list[int], int]:
        """Verify a window [1, 1 + k], whose first token, the anchor, is the last one accepted.

        Returns the target's tokens after the anchor (the accepted proposals and the corrected token), and k.
        """
        proposed = window.tolist()[0][1:]
        step = self._verify(window, self._anchor_pos)
        chosen = self._choice.target(step, proposed)
        ids = chosen.tolist()[0]
        rows = common_prefix(proposed, ids) + 1  # the accepted proposals, and the target's corrected token
        self._accept(ids := ids[:rows])
        self._keep(chosen[:, :rows], None if step.feature is None else step.feature[:, :rows])
        return ids, len(proposed)

    def _record(self, ids: list[int], proposed: int, seconds: float) -> None:
        """Report a round to the chain length and to the lookup. Rounds that also write deferred draft slots count 0
        s."""
        if not self._by_lookup:
            self._chain.record(
                proposed, len(ids) - 1, 0.0 if self._wrote_deferred and self._lookup is not None else seconds
            )
        if self._lookup is not None:
            self._lookup.record(ids, proposed, self._by_lookup, 0.0 if self._wrote_deferred else seconds)
        self._has_deferred, self._wrote_deferred = self._has_deferred or self._by_lookup, False

    def _keep(self, tokens: Tensor, feature: Tensor | None) -> None:
        """Add to the seed the draft slots up to the anchor's slot. A draft without a cache needs only the last slot.
        Without a draft only the anchor's token is kept."""
        if not self._has_draft_cache:
            self._seed, tokens = Seed(self._anchor_pos - 1), tokens[:, -1:]
            feature = None if feature is None else feature[:, -1:]
        self._seed.add(tokens, feature)

    def _fused_round_fits(self, rows: int) -> bool:
        """Return True if the artifact has a fused round of ``rows`` rows, and this window and the next fit into the
        context even if all proposals are accepted."""
        metadata = self._session.metadata
        if not self._may_fuse or rows != metadata.chain_len + 1:
            return False
        return self._anchor_pos + 2 * rows <= metadata.max_seq_len

    def _fused_rounds(self, window: Tensor, stats: GenerationStats) -> Generator[list[int], None, Tensor]:
        """Run fused rounds, which include reseeding and the next chain, as long as they fit and the chain length stays
        the same.

        Yields the tokens that each round accepts; returns the window of the next round. The outputs are converted to
        lists once per round, because each torch operation takes microseconds, and a round of a small model only half a
        millisecond.
        """
        session, cached, chain, chosen_by = self._session, self._cached, self._chain, self._choice.target
        start, longest, rollback = self._anchor_pos, window.shape[1] - 1, session.metadata.rollback_rows
        tokens, input_pos = window, session.positions[start : start + window.shape[1]]
        proposed, wanted = window.tolist()[0][1:], longest
        while self._fused_round_fits(1 + wanted):
            began = time.perf_counter()
            cached.run(self._anchor_pos, 1 + longest, rollback)
            cached.reach(self._anchor_pos + (2 * longest - 1 if self._has_draft_cache else longest))
            said, tokens, input_pos = session.speculate(tokens, input_pos)
            ids, following = chosen_by(Step(said, None), proposed).tolist()
            accepted = common_prefix(proposed, ids)
            self._accept(ids := ids[: accepted + 1])
            cached.draft_slots = self._anchor_pos
            self._record(ids, longest, time.perf_counter() - began)
            wanted = chain.next()
            stats.record(longest, accepted)
            found = self._found(wanted, drafted=True)
            yield ids
            if found:
                self._seed = Seed(self._anchor_pos)
                return torch.tensor([[ids[-1], *found]])
            proposed = following[1:]
        self._seed = Seed(self._anchor_pos)
        return said[1:, : 1 + wanted].contiguous()

    def _prefill(self, prompt: list[int], stats: GenerationStats) -> Generator[list[int], None, int]:
        """Write the prompt into both caches, except the last chunk's draft slots. Returns the token after the prompt.
        Yields [] between chunks, where the caller may stop."""
        session, cached = self._session, self._cached
        seeds = self._chain.speculates and self._has_draft_cache
        reused = cached.reuse(prompt, session.metadata, draft=seeds)
        stats.prompt_tokens += len(prompt)
        stats.reused_prompt_tokens += reused
        tokens = torch.tensor([prompt])
        for start, end in chunks(reused, len(prompt), session.metadata):
            if end - start < session.metadata.min_prefill:
                step = self._verify(tokens[:, start:end], start)
            else:
                cached.run(start, end - start, session.metadata.rollback_rows)
                step = session.prefill(tokens[:, start:end], session.positions[start:end])
            if end == len(prompt):
                break
            cached.tokens = prompt[: end + 1]
            if seeds:
                cached.reach(end - 1 + self._masks)
                feature = step.own_feature()
                session.draft_decode(tokens[:, start + 1 : end + 1], feature, session.positions[start:end])
                cached.draft_slots = end
            yield []
        last = Step(step.ids[:, -1:], step.feature, None if step.logits is None else step.logits[:, -1:])
        anchor = self._choice.target(last, [])
        cached.tokens = list(prompt)
        self._accept(ids := anchor[0].tolist())
        self._seed = Seed(start)
        self._keep(torch.cat((tokens[:, start + 1 :], anchor), dim=1), step.feature)
        return ids[0]

    def _verify(self, tokens: Tensor, start: int) -> Step:
        """Run the target on a window [1, C] at ``start``. One token is run by ``decode``, or if there is none by
        ``target_verify``."""
        session, rows = self._session, tokens.shape[1]
        self._cached.run(start, max(rows, 2), session.metadata.rollback_rows)
        if rows > 1:
            return session.target_verify(tokens, session.positions[start : start + rows])
        if session.has_decode:
            return session.decode(tokens, session.positions[start : start + 1])
        # A verify window has at least two rows; the slot that the second row writes is written again later.
        return first_row(session.target_verify(tokens.expand(1, 2).contiguous(), session.positions[start : start + 2]))

    @property
    def _anchor_pos(self) -> int:
        return len(self._cached.tokens) - 1

    def _accept(self, ids: list[int]) -> None:
        self._cached.tokens += ids
        if self._lookup is not None:
            self._lookup.text.add(ids)
        self._choice.accept(ids)

    def _propose(self, write_slots: bool = False) -> Tensor | None:
        """Write the draft slots of ``_seed`` with the target's features, then chain draft steps on the draft's own
        features, unless the draft proposes all tokens of a round at once. Without a draft step the slots are deferred
        to a later call, as long as they fit into it. With ``write_slots`` a chain of length 0 writes them as well.

        Returns the window [1, 1 + k]: the anchor and k proposals; None if the context ends at the anchor.
        """
        session, seed, anchor_pos = self._session, self._seed, self._anchor_pos
        self._by_lookup = False
        anchor = seed.tokens[-1][:, -1:]
        room = session.metadata.max_seq_len - 1 - anchor_pos
        if room < 1:
            return None
        if not self._chain.speculates:
            self._seed = Seed(anchor_pos)
            return window_of(anchor, self._found(0))
        wanted = min(self._chain.next(), room)
        forced = self._choice.forced([], wanted)
        all_forced = wanted > 0 and len(forced) == wanted
        found = self._found(wanted, forced) if not all_forced else []
        proposed = found or forced
        seed_can_wait = seed.rows + max(wanted, len(found)) < session.metadata.max_prefill
        if write_slots:  # write the prompt's slots now, in case the generation is stopped early
            seed_can_wait = bool(proposed) and seed_can_wait and seed.rows <= session.metadata.chain_len + 1
        if (found or len(forced) == wanted) and seed_can_wait:
            return window_of(anchor, proposed)
        step = self._write_slots(wanted)
        if found or not wanted:
            return window_of(anchor, found)
        chain = [self._choice.draft(step, [])]
        if self._masks:
            chain = [chain[0][:, :wanted]]
        for position in range(anchor_pos, last := anchor_pos + wanted - chain[0].shape[1]):
            forced = self._choice.forced(chain, last - position)
            if len(forced) == last - position:
                chain.append(torch.tensor([forced]))
                break
            at = position if self._has_draft_cache else anchor_pos - 1
            step = session.draft_decode(chain[-1], step.own_feature(), session.positions[at : at + 1])
            chain.append(self._choice.draft(step, chain))
        return torch.cat([anchor, *chain], dim=1)

    def _found(self, wanted: int, forced: Sequence[int] = (), drafted: bool = False) -> list[int]:
        """Return the lookup's proposals for the next round, which begin with ``forced``; [] if the draft proposes."""
        self._by_lookup = False
        if self._lookup is None:
            return []
        room = self._session.metadata.max_seq_len - 1 - self._anchor_pos
        found = self._lookup.offer(min(wanted, room), room, drafted)
        if found[: len(forced)] != list(forced):
            return []
        self._by_lookup = bool(found)
        return found

    def _write_slots(self, wanted: int) -> Step:
        """Write the slots of ``_seed`` and return that draft step. Up to ``wanted`` draft steps may follow."""
        session, cached, seed, anchor_pos = self._session, self._cached, self._seed, self._anchor_pos
        if self._has_draft_cache:
            cached.reach(max(anchor_pos + wanted, anchor_pos + self._masks))
        tokens, feature = seed.all()
        began = time.perf_counter()
        step = session.draft_decode(tokens, feature, session.positions[seed.slot : anchor_pos])
        if self._has_deferred and self._lookup is not None and self._has_draft_cache:
            self._lookup.seeded(seed.rows, time.perf_counter() - began)
        self._wrote_deferred, self._has_deferred = self._wrote_deferred or self._has_deferred, False
        cached.draft_slots, self._seed = anchor_pos, Seed(anchor_pos)
        return step

    def finish(self) -> None:
        """Write the deferred draft slots of lookup rounds, so that the next turn of a dialogue does not run the target
        for them again. A few slots are left unwritten, because computing them again costs less."""
        metadata = self._session.metadata
        few, room = metadata.chain_len + 1, metadata.max_seq_len - 1 - self._anchor_pos
        waits = self._chain.speculates and self._has_draft_cache and self._has_deferred and self._seed.rows > few
        if room > 0 and waits:
            try:
                self._write_slots(0)
            except Exception:
                self._cached.clear()
                raise


def timed(call: Callable[..., Result], *args: Any, **options: Any) -> tuple[Result, float]:
    """Return the result of ``call`` and the seconds it took."""
    start = time.perf_counter()
    returned = call(*args, **options)
    return returned, time.perf_counter() - start


class Seed:
    """The draft slots from ``slot`` on that are not yet written: for each, the token after it and the target's
    feature."""

    def __init__(self, slot: int = 0):
        self.slot, self.rows = slot, 0
        self.tokens: list[Tensor] = []
        self._features: list[Tensor] = []

    def add(self, tokens: Tensor, feature: Tensor | None) -> None:
        """Add slots with ``tokens`` [1, T] and ``feature`` [1, T, H], None if no draft reads it."""
        self.rows += tokens.shape[1]
        self.tokens.append(tokens)
        if feature is not None:
            self._features.append(feature)

    def all(self) -> tuple[Tensor, Tensor]:
        if len(self.tokens) == 1:
            return self.tokens[0], self._features[0]
        return torch.cat(self.tokens, dim=1), torch.cat(self._features, dim=1)


def window_of(anchor: Tensor, proposed: Sequence[int]) -> Tensor:
    """Return the window [1, 1 + k] of the anchor [1, 1] and k proposals."""
    return torch.cat([anchor, torch.tensor([proposed])], dim=1) if proposed else anchor


def first_row(step: Step) -> Step:
    ids, *others = (None if each is None else each[:, :1] for each in step)
    assert ids is not None
    return Step(ids, *others)


def chunks(start: int, end: int, metadata: Metadata) -> list[tuple[int, int]]:
    """Split the positions from ``start`` to ``end`` into the longest chunks that ``prefill`` takes, and a rest shorter
    than its minimum into verify windows."""
    window, spans = metadata.window, []
    while start < end:
        left = end - start
        size = min(left, metadata.max_prefill if left >= metadata.min_prefill else window)
        spans.append((start, start + size))
        start += size
    return spans
