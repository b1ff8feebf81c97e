"""Generates tokens: checks a request, and yields the tokens that rounds accept, up to a stop token or the budget."""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3.runner.contract import Metadata
from eagle3.runner.hosts.session import Session
from eagle3.runner.loop.adaptive_chain import ChainLength, FixedChain
from eagle3.runner.loop.cached_tokens import CachedTokens
from eagle3.runner.loop.choice import Choice, Greedy
from eagle3.runner.loop.lookup_choice import LookupChoice
from eagle3.runner.loop.results import LENGTH, STOP
from eagle3.runner.loop.rounds import Rounds
from eagle3.runner.loop.statistics import GenerationStats
from eagle3.runner.text.checks import check_ids


@dataclass(frozen=True)
class Generation:
    """A finished generation. ``token_ids`` are the new tokens, including a stop token, as in transformers."""

    token_ids: list[int]
    finish_reason: str
    stats: GenerationStats


def generate(
    session: Session,
    prompt: Sequence[int],
    max_new_tokens: int = 128,
    chain: int | ChainLength | None = None,
    stop_ids: Sequence[int] | None = None,
    choice: Choice | None = None,
    cached: CachedTokens | None = None,
    stats: GenerationStats | None = None,
    lookup: LookupChoice | None = None,
    by_chunk: bool = False,
) -> Generator[list[int], None, Generation]:
    """Yield new token ids as they are accepted; the generator's return value is the ``Generation``.

    The tokens are those of decoding without speculation by the same ``choice``. Generation ends at a stop token, after
    ``max_new_tokens``, or when the context is full.

    Args:
        session: runs the methods; its caches may hold any tokens that ``cached`` does not list
        prompt: token ids, at least one and fewer than the artifact's max_seq_len
        chain: draft tokens per round, at most the artifact's number (the default); 0 turns speculation off
        stop_ids: the stop tokens; default: the artifact's
        choice: chooses each token; default: greedy
        cached: the tokens in the session's caches, kept up to date; default: none
        stats: counts and seconds are added to this object, which becomes the ``Generation``'s
        lookup: proposes tokens from the text itself; default: only the draft proposes
        by_chunk: yield [] after each chunk of the prompt but the last, so that the caller can stop or do other work

    Raises:
        ValueError: an empty or too long prompt, an id outside the vocabulary, a chain length or budget out of bounds
    """
    metadata = session.metadata
    check_request(metadata, prompt, max_new_tokens, chain if isinstance(chain, int) else None)
    if not metadata.has_draft:
        chain = 0
    if chain is None or isinstance(chain, int):
        chain = FixedChain(metadata.chain_len if chain is None else chain)
    rounds = Rounds(session, chain, choice or Greedy(), CachedTokens() if cached is None else cached, lookup)
    budget = min(max_new_tokens, metadata.max_seq_len - len(prompt))
    stops = frozenset(metadata.eos_ids if stop_ids is None else stop_ids)
    stats = GenerationStats() if stats is None else stats
    return _emit(session, rounds, list(prompt), budget, stops, stats, by_chunk)


def _emit(
    session: Session,
    rounds: Rounds,
    prompt: list[int],
    budget: int,
    stop_ids: frozenset[int],
    stats: GenerationStats,
    by_chunk: bool,
) -> Generator[list[int], None, Generation]:
    """Yield the tokens that ``rounds`` accept until a stop token or the budget ends the generation. The seconds exclude
    the caller's time between two tokens and the loading of methods."""
    tokens: list[int] = []
    stats.generations += 1
    steps, start, loaded = rounds.run(prompt, stats), time.perf_counter(), session.load_seconds
    used = session.seconds.copy(), session.calls.copy()
    for fresh in steps:
        stats.add_calls(session.seconds, session.calls, *used)
        fresh, finish_reason = cut(fresh, budget - len(tokens), stop_ids)
        seconds = time.perf_counter() - start - (session.load_seconds - loaded)
        if tokens:
            stats.decode_seconds += seconds
        else:
            stats.prefill_seconds += seconds
        tokens += fresh
        stats.generation_tokens += len(fresh)
        if fresh or by_chunk:
            yield fresh
        if finish_reason:
            rounds.finish()
            return Generation(tokens, finish_reason, stats)
        used = session.seconds.copy(), session.calls.copy()
        start, loaded = time.perf_counter(), session.load_seconds
    raise AssertionError("rounds do not end by themselves")


def complete(session: Session, prompt: Sequence[int], **options: Any) -> Generation:
    """Run ``generate`` to its end and return its ``Generation``."""
    steps = generate(session, prompt, **options)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def cut(fresh: list[int], budget: int, stop_ids: frozenset[int]) -> tuple[list[int], str | None]:
    """Return the tokens that may still be emitted, and the reason if generation ends there, else None."""
    for index, token in enumerate(fresh[:budget]):
        if token in stop_ids:
            return fresh[: index + 1], STOP
    return fresh[:budget], LENGTH if len(fresh) >= budget else None


def check_request(metadata: Metadata, prompt: Sequence[int], max_new_tokens: int, chain_len: int | None) -> None:
    """Raise ValueError with one line for arguments that ``generate`` does not accept."""
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token")
    if len(prompt) >= metadata.max_seq_len:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, the artifact's context {metadata.max_seq_len}: shorten the prompt, "
            "or export with a larger --max-seq-len"
        )
    check_ids(prompt, metadata.vocab_size)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}, but must be 1 or more")
    if chain_len is not None and chain_len > 0 and not metadata.has_draft:
        raise ValueError(
            f"chain length {chain_len}, but the artifact has no draft head (--draft none): leave it out, or give "
            "--ngram for proposals from the text"
        )
    if chain_len is not None and not 0 <= chain_len <= metadata.chain_len:
        raise ValueError(
            f"chain length {chain_len}, but the artifact verifies at most {metadata.chain_len} draft tokens a round: "
            "export it with a larger --chain-len"
        )
