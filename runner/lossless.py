"""Whether a generation lost nothing to speculation here: the same tokens chosen again, one at a time.

1. ``replay`` decodes the prompt anew, by the same weights and the same choice, up to the first token that differs.
2. There every method computes the position again, and speculation is run again to its round: ``divergence.py``.
3. ``lines`` says it to a person.

Lossless means the tokens of decoding by the same weights in the same kernels. Kernels of one row and of a whole window
add in different orders, so that logits which are nearly tied may come out either way; nothing else may differ.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from eagle3.runner.artifact.near_ties import near_tie_of
from eagle3.runner.chain import ChainLength
from eagle3.runner.choice import Greedy
from eagle3.runner.contract import DECODE, SPECULATE, TARGET_VERIFY
from eagle3.runner.divergence import Divergence, MakeChoice, Place, Said, Watched
from eagle3.runner.hosts.session import Session
from eagle3.runner.loop import generate


@dataclass(frozen=True)
class Replay:
    compared: int
    """Tokens, the one that differs included."""
    method: str
    """What gave each token after the first: ``decode``, or ``target_verify`` with one new token a window."""
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
) -> Replay:
    """Generate ``token_ids`` again without speculation and compare, up to the first that differs.

    It overwrites the session's caches from the first position on: forget what they held (``CachedTokens.clear``) before
    the call. The session can be used on.

    Args:
        prompt, token_ids: of the generation that is to be checked
        make_choice: called for every choice anew; the same as of that generation
        chain: as of that generation, for its windows; of one that learns, they may be others than they were
        near_tie: how far rounding moves logits, in their standard deviations; None: what the recipe says

    Raises:
        ValueError: no tokens, more than the context takes, or a prompt that ``generate`` does not take
    """
    room = session.metadata.max_seq_len - len(prompt)
    if not 0 < len(token_ids) <= room:
        raise ValueError(f"{len(token_ids)} generated tokens to compare, but must be 1 to {room}: give a generation's")
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
    assert watched.step is not None  # that of the token that differs
    tie = near_tie_of(session.metadata, None) if near_tie is None else near_tie
    place = Place(session, prompt, token_ids[: agreed + 1], replayed, watched.step, make_choice, tie)
    return Replay(agreed + 1, method, place.divergence(chain))


def lines(replay: Replay, decode_token: Callable[[int], str] | None = None) -> list[str]:
    """For a person; ``decode_token``: the text of a token, where there is a tokenizer."""
    found = replay.divergence
    by = replay.method if replay.method == DECODE else f"{replay.method}, one new token a window"
    if found is None:
        return [f"identical: {replay.compared} tokens, replayed by {by}"]

    def told(token: int) -> str:
        return str(token) if decode_token is None else f"{token} {decode_token(token)!r}"

    said: dict[int, list[Said]] = {found.token: [], found.replayed: []}
    for each in found.said:
        said.setdefault(each.token, []).append(each)
    every = _rows_by_call(found.said)
    return [
        f"parts at token {found.index + 1} (position {found.position}): {told(found.token)} with speculation, "
        f"{told(found.replayed)} replayed by {by}",
        *(f"  {told(token)}: {', '.join(_told_ways(who, every)) or 'no method'}" for token, who in said.items()),
        *([] if found.reproduced else [f"  {_NOT_REPRODUCED}"]),
        *(f"  {line}" for line in _verdict(found)),
    ]


_NOT_REPRODUCED = (
    "speculation, run again over empty caches, says otherwise: it had taken up what was cached before, it chose its "
    "chain lengths by what it had learned, or this machine does not compute the same twice"
)


def _rows_by_call(said: Iterable[Said]) -> dict[tuple[str, int, bool], list[int]]:
    """(method, rows, speculated) to the rows in question, from 1."""
    found: dict[tuple[str, int, bool], list[int]] = {}
    for each in said:
        found.setdefault((each.method, each.rows, each.speculated), []).append(each.row + 1)
    return found


def _told_ways(said: Iterable[Said], every: dict[tuple[str, int, bool], list[int]]) -> Iterator[str]:
    for call, which in _rows_by_call(said).items():
        method, rows, speculated = call
        told = f"{method} of {rows} rows" if rows > 1 else method
        if method in (TARGET_VERIFY, SPECULATE) and (speculated or which != every[call]):
            told += f" (row {', '.join(map(str, which))})"
        yield f"{told} over speculation's caches" if speculated else told


def _verdict(found: Divergence) -> Iterator[str]:
    if found.near_tie is None:
        yield "the artifact gives no logits, so whether it is a near-tie is not known: export it without --no-logits"
        return
    of = "of their standard deviation"
    yield f"the two best logits there differ by {found.margin:.2g}, {found.relative_margin:.2g} {of}"
    moved, threshold = f"the two tokens' logits had to move by {found.moved:.2g} {of}", f"{found.threshold:.2g}"
    if found.near_tie:
        yield (
            f"a near-tie, no defect: {moved}, and kernels of different numbers of rows, which add in different orders, "
            f"may move them by {threshold}"
        )
    else:
        yield f"a real difference: {moved}, and rounding may move them by {threshold}: please report it as a bug"
