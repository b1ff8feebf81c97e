"""Checks that a generation with speculation is lossless: the same tokens are chosen again, one at a time.

1. ``replay`` decodes the prompt again without speculation, up to the first token that differs.
2. At that position every method computes the token again, and speculation is run again up to that round
   (``divergence.py``).
3. ``lines`` describes the result for a person.

Lossless means: the same tokens as decoding with the same weights and kernels. A kernel for one row and a kernel for a
whole verify window add in different orders, so if two logits are nearly equal, either may come out larger. Nothing else
may differ.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from eagle3.runner.artifact.near_ties import near_tie_of
from eagle3.runner.contract import DECODE, SPECULATE, TARGET_VERIFY
from eagle3.runner.hosts.session import Session
from eagle3.runner.loop.adaptive_chain import ChainLength
from eagle3.runner.loop.choice import Greedy
from eagle3.runner.loop.divergence import Divergence, MakeChoice, Place, Said, Watched
from eagle3.runner.loop.generation import generate
from eagle3.runner.loop.lookup_choice import LookupChoice


@dataclass(frozen=True)
class Replay:
    compared: int
    """Number of tokens compared, including the one that differs."""
    method: str
    """The method that computed each token after the first: ``decode``, or ``target_verify`` with one new token per
    verify window."""
    divergence: Divergence | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def replay(
    session: Session,
    prompt: Sequence[int],
    token_ids: Sequence[int],
    make_choice: MakeChoice = Greedy,
    chain: int | ChainLength | None = None,
    near_tie: float | None = None,
    lookup: LookupChoice | None = None,
) -> Replay:
    """Generate ``token_ids`` again without speculation and compare, up to the first token that differs.

    It overwrites the session's caches from the first position on, so call ``CachedTokens.clear`` before. The session
    can be used afterwards.

    Args:
        prompt, token_ids: the generation to check
        make_choice: returns a new choice (greedy or sampling) like the one of that generation
        chain: the chain length of that generation. With an adaptive one, the repeated rounds may have other lengths
        lookup: the prompt lookup of that generation. In the repetition it may propose in other rounds
        near_tie: how far rounding moves logits, in standard deviations of the logits; None for the recipe's value

    Raises:
        ValueError: no tokens, more than the context has room for, or a prompt that ``generate`` does not accept
    """
    room = session.metadata.max_seq_len - len(prompt)
    if not 0 < len(token_ids) <= room:
        raise ValueError(
            f"{len(token_ids)} generated tokens to compare, but must be 1 to {room}: give those of a generation"
        )
    method, watched = DECODE if session.has_decode else TARGET_VERIFY, Watched(make_choice())
    steps = generate(session, prompt, len(token_ids), chain=0, stop_ids=(), choice=watched)
    with closing(steps):
        agreed = 0
        for [replayed], token in zip(steps, token_ids, strict=True):
            if replayed != token:
                break
            agreed += 1
        else:
            return Replay(agreed, method)
    assert watched.step is not None  # the step that chose the token that differs
    tie = near_tie_of(session.metadata, None) if near_tie is None else near_tie
    place = Place(session, prompt, token_ids[: agreed + 1], replayed, watched.step, make_choice, tie)
    return Replay(agreed + 1, method, place.divergence(chain, lookup))


def lines(replay: Replay, decode_token: Callable[[int], str] | None = None) -> list[str]:
    """Describe a replay for a person. ``decode_token`` returns the text of a token; None without a tokenizer."""
    found = replay.divergence
    by = replay.method if replay.method == DECODE else f"{replay.method}, one new token per verify window"
    if found is None:
        return [f"identical: {replay.compared} tokens, replayed by {by}"]

    def named(token: int) -> str:
        return str(token) if decode_token is None else f"{token} {decode_token(token)!r}"

    said: dict[int, list[Said]] = {found.token: [], found.replayed: []}
    for each in found.said:
        said.setdefault(each.token, []).append(each)
    every = _rows_by_call(found.said)
    return [
        f"differs at token {found.index + 1} (position {found.position}): {named(found.token)} with speculation, "
        f"{named(found.replayed)} replayed by {by}",
        *(f"  {named(token)}: {', '.join(_calls(who, every)) or 'no method'}" for token, who in said.items()),
        *([] if found.reproduced else [f"  {_NOT_REPRODUCED}"]),
        *(f"  {line}" for line in _verdict(found)),
    ]


_NOT_REPRODUCED = (
    "speculation, run again over empty caches, gives another token: it had reused cached positions, its adaptive chain "
    "lengths differ now, or this machine does not compute the same result twice"
)


def _rows_by_call(said: Iterable[Said]) -> dict[tuple[str, int, bool], list[int]]:
    """Map each (method, rows, speculated) to the numbers of the rows that computed the position, counted from 1."""
    found: dict[tuple[str, int, bool], list[int]] = {}
    for each in said:
        found.setdefault((each.method, each.rows, each.speculated), []).append(each.row + 1)
    return found


def _calls(said: Iterable[Said], every: dict[tuple[str, int, bool], list[int]]) -> Iterator[str]:
    """Yield a description of each call that computed the token."""
    for call, which in _rows_by_call(said).items():
        method, rows, speculated = call
        name = f"{method} of {rows} rows" if rows > 1 else method
        if method in (TARGET_VERIFY, SPECULATE) and (speculated or which != every[call]):
            name += f" (row {', '.join(map(str, which))})"
        yield f"{name} over speculation's caches" if speculated else name


def _verdict(found: Divergence) -> Iterator[str]:
    if found.near_tie is None:
        yield "the artifact has no logits, so it is not known whether this is a near-tie: export it without --no-logits"
        return
    of = "of their standard deviation"
    yield f"the two best logits there differ by {found.margin:.2g}, {found.relative_margin:.2g} {of}"
    moved, threshold = f"the two tokens' logits had to move by {found.moved:.2g} {of}", f"{found.threshold:.2g}"
    if found.near_tie:
        yield (
            f"a near-tie, not a defect: {moved}, and kernels for different numbers of rows, which add in different "
            f"orders, may move them by {threshold}"
        )
    else:
        yield f"a real difference: {moved}, and rounding may move them by {threshold}: please report it as a bug"
