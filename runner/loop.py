"""The shifted loop: prefill and seed, then rounds of verify, accept, reseed and chain.

Draft slot p pairs the target's feature at p with token p + 1, at position p, and proposes token p + 2. The corrected
token of a round never needs a target forward of its own: it is the next window's first row, and its slot is reseeded
with the feature that proved it. Both caches roll back by writing positions again.
"""

import itertools
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.runner.contract import Metadata
from eagle3.runner.session import Session
from eagle3.runner.statistics import SpeculationStats

STOP, LENGTH = "stop", "length"


@dataclass(frozen=True)
class Generation:
    """A finished generation. ``token_ids`` are the new ones, a stop token included, as transformers counts them."""

    token_ids: list[int]
    finish_reason: str
    stats: SpeculationStats


@dataclass(frozen=True)
class Round:
    """``ids`` [1, C] are the target's greedy tokens after each row of the window, the first ``accepted`` of them as
    proposed. ``window`` [1, C'] is the next one, None where the context has no room for it."""

    ids: Tensor
    accepted: int
    window: Tensor | None


def generate(
    session: Session,
    prompt: Sequence[int],
    max_new_tokens: int = 128,
    chain_len: int | None = None,
    stop_ids: Sequence[int] | None = None,
    speculate: bool = True,
) -> Generator[list[int], None, Generation]:
    """A generator of new token ids as they are accepted; its return value is the ``Generation``.

    The tokens are those of greedy decoding. Generation ends at a stop token, after ``max_new_tokens``, or when the
    context is full.

    Args:
        session: its cache may hold anything, the prompt is written from position 0
        prompt: token ids, at least one and fewer than the artifact's max_seq_len
        chain_len: draft tokens a round, at most the artifact's (the default)
        stop_ids: default: the artifact's
        speculate: False decodes token by token, for a baseline; the artifact must have ``decode``

    Raises:
        ValueError: an empty or too long prompt, an id outside the vocabulary, a chain length or budget out of bounds
    """
    metadata = session.metadata
    check_request(metadata, prompt, max_new_tokens, chain_len)
    stats = SpeculationStats()
    steps = (
        _speculate(session, prompt, chain_len or metadata.chain_len, stats) if speculate else _decode(session, prompt)
    )
    budget = min(max_new_tokens, metadata.max_seq_len - len(prompt))
    return _emit(steps, budget, frozenset(metadata.eos_ids if stop_ids is None else stop_ids), stats)


def _emit(
    steps: Iterator[list[int]], budget: int, stop_ids: frozenset[int], stats: SpeculationStats
) -> Generator[list[int], None, Generation]:
    """Pass on what ``steps`` accepts until a stop token or the budget ends it."""
    tokens = []
    for fresh in steps:
        fresh, finish_reason = cut(fresh, budget - len(tokens), stop_ids)
        tokens += fresh
        yield fresh
        if finish_reason:
            break
    return Generation(tokens, finish_reason, stats)


def complete(session: Session, prompt: Sequence[int], **options) -> Generation:
    """``generate`` to its end."""
    steps = generate(session, prompt, **options)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def cut(fresh: list[int], budget: int, stop_ids: frozenset[int]) -> tuple[list[int], str | None]:
    """The tokens that may still be emitted, and why it ends there if it does."""
    for index, token in enumerate(fresh[:budget]):
        if token in stop_ids:
            return fresh[: index + 1], STOP
    return fresh[:budget], LENGTH if len(fresh) >= budget else None


def prefill(session: Session, prompt: Sequence[int], seed_draft: bool = True) -> tuple[Tensor, tuple]:
    """Write the prompt into both caches, all but the last chunk's draft slots.

    Returns the greedy token after it [1, 1], and the last chunk's (draft tokens [1, T], features [1, T, H], first slot)
    for ``propose``.
    """
    tokens = torch.tensor([list(prompt)])
    for start, end in chunks(len(prompt), session.metadata):
        ids, feature = _forward_prompt(session, tokens, start, end)
        if end < len(prompt) and seed_draft:
            session.draft_decode(tokens[:, start + 1 : end + 1], feature, session.positions[start:end])
    return ids, (torch.cat((tokens[:, start + 1 :], ids), dim=1), feature, start)


def chunks(length: int, metadata: Metadata) -> list[tuple[int, int]]:
    """Split a prompt: chunks as long as ``prefill`` takes, what is shorter than its minimum in verify windows."""
    window, spans, start = metadata.chain_len + 1, [], 0
    while start < length:
        left = length - start
        size = min(left, metadata.max_prefill if left >= metadata.min_prefill else window)
        spans.append((start, start + size))
        start += size
    return spans


def play_round(session: Session, window: Tensor, anchor_pos: int, chain_len: int) -> Round:
    """Verify a window whose first token, the anchor, stands at ``anchor_pos``; reseed the draft and chain the next."""
    ids, feature = session.target_verify(window, session.positions[anchor_pos : anchor_pos + window.shape[1]])
    accepted = 0
    for proposed, greedy in zip(window[0, 1:].tolist(), ids[0].tolist(), strict=False):
        if proposed != greedy:
            break
        accepted += 1
    rows = accepted + 1  # the accepted proposals and the corrected token, which are the target's own ids
    return Round(ids, accepted, propose(session, ids[:, :rows], feature[:, :rows], anchor_pos, chain_len))


def propose(session: Session, tokens: Tensor, feature: Tensor, slot: int, chain_len: int) -> Tensor | None:
    """Write draft slots from ``slot`` on with the target's own features, then chain on the draft's, unless it
    proposes all tokens of a round at once.

    Args:
        tokens: [1, T], the token after each slot; the last one is the anchor, at position slot + T
        feature: [1, T, H]

    Returns:
        the window [1, 1 + k]: the anchor and k proposals, k <= chain_len; None where the context ends at the anchor
    """
    anchor_pos = slot + tokens.shape[1]
    room = session.metadata.max_seq_len - 1 - anchor_pos
    if room < 1:
        return None
    wanted = min(chain_len, room)
    proposals, state = session.draft_decode(tokens, feature, session.positions[slot:anchor_pos])
    token, window = proposals, [tokens[:, -1:], proposals[:, :wanted]]
    for position in range(anchor_pos, anchor_pos + wanted - proposals.shape[1]):
        token, state = session.draft_decode(token, state, session.positions[position : position + 1])
        window.append(token)
    return torch.cat(window, dim=1)


def _speculate(session: Session, prompt: Sequence[int], chain_len: int, stats: SpeculationStats) -> Iterator[list[int]]:
    anchor, seed = prefill(session, prompt)
    yield [anchor.item()]
    window, anchor_pos = propose(session, *seed, chain_len), len(prompt)
    while True:  # generate ends it, at the context's last position at the latest
        played = play_round(session, window, anchor_pos, chain_len)
        stats.record(window.shape[1] - 1, played.accepted)
        yield played.ids[0, : played.accepted + 1].tolist()
        window, anchor_pos = played.window, anchor_pos + played.accepted + 1


def _decode(session: Session, prompt: Sequence[int]) -> Iterator[list[int]]:
    token, _ = prefill(session, prompt, seed_draft=False)
    yield [token.item()]
    for position in itertools.count(len(prompt)):
        token, _ = session.decode(token, session.positions[position : position + 1])
        yield [token.item()]


def _forward_prompt(session: Session, tokens: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
    """The greedy token after the last row [1, 1] and the features [1, T, H] of a chunk of the prompt."""
    rows = tokens[:, start:end]
    if end - start >= session.metadata.min_prefill:
        return session.prefill(rows, session.positions[start:end])
    if end - start == 1:  # a verify window has two rows at least: what the second writes is written again later
        rows = rows.expand(1, 2).contiguous()
    ids, feature = session.target_verify(rows, session.positions[start : start + rows.shape[1]])
    return ids[:, end - start - 1 : end - start], feature[:, : end - start]


def check_request(metadata: Metadata, prompt: Sequence[int], max_new_tokens: int, chain_len: int | None) -> None:
    """Raise ValueError for what ``generate`` does not take, in one line."""
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token")
    if len(prompt) >= metadata.max_seq_len:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, the artifact's context {metadata.max_seq_len}: shorten the prompt, "
            "or export with a larger --max-seq-len"
        )
    for token in prompt:
        if not 0 <= token < metadata.vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary 0..{metadata.vocab_size - 1}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}, but must be 1 or more")
    if chain_len is not None and not 1 <= chain_len <= metadata.chain_len:
        raise ValueError(
            f"chain length {chain_len}, but the artifact verifies 1 to {metadata.chain_len} draft tokens a round: "
            "export it with a larger --chain-len"
        )
