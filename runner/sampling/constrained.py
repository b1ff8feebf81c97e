"""Constrained decoding as the loop's choice: a grammar restricts the text, which is the same with and without
speculation.

1. ``Guide`` follows one generation in its grammar. It advances by accepted tokens. It also follows proposals, and rolls
   them back.
2. ``Constrained`` masks each row of the target before a token is chosen, and the draft's rows too, so that proposals
   obey the grammar. If the grammar allows only one continuation, it is proposed without a draft step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import thread_time
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from eagle3.runner.contract import Metadata
from eagle3.runner.hosts.session import Step
from eagle3.runner.loop.choice import Choice
from eagle3.runner.sampling.constraint import Constraint

LONGEST_REASON = 400
"""The most characters of llguidance's reason in an error."""
T = TypeVar("T")
BEFORE, REASONING, GRAMMAR, OVER = "before", "reasoning", "grammar", "over"
"""The states of a generation: it may still open its reasoning; it is in its reasoning; in the constrained text; after
the end."""


class GrammarFailed(RuntimeError):
    """Raised if a grammar is too complex for llguidance's limits, or allows no text."""


@dataclass
class Place:
    """A state of a generation in its grammar: the token that led to it, ``advanced`` if the grammar advanced by it, the
    tokens that must come next with the index of the first, and what the matcher said of it, by the method's name."""

    where: str
    token: int = -1
    advanced: bool = False
    known: tuple[list[int], int] | None = None
    said: dict[str, Any] = field(default_factory=dict)


class Guide:
    """Tracks one generation in its grammar, and the tokens that may come next. Raises GrammarFailed with llguidance's
    reason.

    The same proposals are followed for the draft, the target and the accepted text. So the states after them are kept
    when they are rolled back, and the matcher follows only when it is asked for something new.
    """

    def __init__(self, constraint: Constraint):
        self._constraint, self._matcher = constraint, constraint.matcher.deep_copy()
        where = GRAMMAR
        if constraint.reasoning_end is not None:
            where = REASONING if constraint.reasoning_begin is None else BEFORE
        self._path, self._now = [Place(where)], 0  # the matcher is at the last place
        self._spent, self._settled = 0.0, 0

    @property
    def _place(self) -> Place:
        return self._path[self._now]

    @property
    def free(self) -> bool:
        """True if any token may come next."""
        return self._place.where in (REASONING, OVER)

    def take(self, token: int) -> bool:
        """Advance by one token. Returns False, and does not advance, if the token may not come next."""
        if self._now + 1 < len(self._path) and self._path[self._now + 1].token == token:
            self._now += 1
            return True
        self._rewind()
        step = self._step(token)
        if step is None:
            return False
        where, advanced = step
        known = self._place.known
        if advanced:
            tokens, index = known or ([], 0)
            known = (tokens, index + 1) if tokens[index : index + 1] == [token] else None
        self._path.append(Place(where, token, advanced, known))
        self._now += 1
        return True

    def back(self, count: int) -> None:
        """Roll back the last ``count`` tokens."""
        self._now -= count

    def settle(self) -> None:
        """Forget the places before the present one: nothing is rolled back beyond it."""
        del self._path[: self._now]
        self._settled += self._now
        self._now = 0

    def _rewind(self) -> None:
        """Roll the matcher back to the present place."""
        if count := sum(place.advanced for place in self._path[self._now + 1 :]):
            self._matcher.rollback(count)
        del self._path[self._now + 1 :]

    @contextmanager
    def ahead(self, tokens: Sequence[int]) -> Iterator[bool]:
        """Advance by ``tokens`` within this context. Yields True if all of them may come next."""
        taken = 0
        while taken < len(tokens) and self.take(tokens[taken]):
            taken += 1
        try:
            yield taken == len(tokens)
        finally:
            self.back(taken)

    def allowed(self) -> np.ndarray:
        """Return bool [V]: the tokens that may come next."""
        constraint = self._constraint
        if self.free:
            return np.ones(constraint.vocab_size, bool)
        if forced := self._must(1):
            allowed = np.zeros(constraint.vocab_size, bool)
            allowed[forced] = True
        else:
            allowed = np.unpackbits(self._bits(), count=constraint.vocab_size, bitorder="little").astype(bool)
        allowed[list(constraint.eos_ids)] = self._says("is_accepting")
        if self._place.where == BEFORE:
            allowed[constraint.reasoning_begin] = True
        return allowed

    def allows(self, token: int) -> bool:
        """Return True if ``token`` is one of ``allowed``. ``take`` accepts more tokens: any tokenization of a text,
        while ``allowed`` has only the tokenizer's own for a forced text."""
        constraint = self._constraint
        if self.free or (self._place.where == BEFORE and token == constraint.reasoning_begin):
            return True
        if token in constraint.eos_ids:
            return self._says("is_accepting")
        if forced := self._must(1):
            return token == forced[0]
        return bool(self._bits()[token >> 3] >> (token & 7) & 1)

    def forced(self, count: int) -> list[int]:
        """Return up to ``count`` tokens that must come next, as far as the grammar knows. After the end they are end
        tokens, so that no draft step is spent on tokens that are discarded."""
        if self._place.where in (BEFORE, REASONING):
            return []
        tokens = [] if self._place.where == OVER else self._must(count)
        if len(tokens) == count:
            return tokens
        with self.ahead(tokens) as reached:
            if reached and (self._place.where == OVER or self._says("is_stopped")):
                self._check()
                tokens = tokens + [self._constraint.eos_ids[0]] * (count - len(tokens))
        return tokens

    def _must(self, count: int) -> list[int]:
        """Return up to ``count`` tokens that must come next. llguidance computes all of a forced text at once, so they
        are kept until the last of them was taken. Every row asks, so the tokens are the same with and without
        speculation."""
        tokens, index = self._place.known or ([], 0)
        if self._place.known is None or index and index == len(tokens):
            tokens, index = self._place.known = self._says("compute_ff_tokens"), 0
        return tokens[index : index + count]

    def _bits(self) -> np.ndarray:
        """Return the mask of the next token: uint8, one bit per token."""
        bits = np.frombuffer(self._says("compute_bitmask"), np.uint8)
        self._check()
        return bits

    def _says(self, name: str) -> Any:  # noqa: ANN401
        """Return what the matcher's method says of the present place."""
        said = self._place.said
        if name not in said:
            self._rewind()
            said[name] = self._timed(getattr(self._matcher, name))
        return said[name]

    def _timed(self, work: Callable[..., T], *given: list[int]) -> T:
        """Return ``work(*given)``. Raises GrammarFailed if the grammar has taken more than its time."""
        start = thread_time()
        done = work(*given)
        self._spent += thread_time() - start
        most, count = self._constraint.seconds, self._settled + self._now
        if most is not None and self._spent > most[0] + most[1] * count:
            raise GrammarFailed(
                f"the grammar of structured_outputs took {self._spent:.1f} s of processor time for "
                f"{count} tokens, but {most[0]:g} s and {1000 * most[1]:g} ms a token are the limit"
            )
        return done

    def _step(self, token: int) -> tuple[str, bool] | None:
        """Return the state after ``token``, and True if the grammar advances by it; None if the token may not come
        next."""
        constraint, where = self._constraint, self._place.where
        if where == OVER:
            return OVER, False
        if token in constraint.eos_ids:
            return (OVER, False) if where == REASONING or self._says("is_accepting") else None
        if where == REASONING:
            return GRAMMAR if token == constraint.reasoning_end else REASONING, False
        if where == BEFORE and token == constraint.reasoning_begin:
            return REASONING, False
        moved = self._timed(self._matcher.try_consume_tokens, [token])
        self._check()
        return (GRAMMAR, True) if moved else None

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = " ".join(self._matcher.get_error().split())
            raise GrammarFailed(f"the grammar of structured_outputs failed: {reason[:LONGEST_REASON]}")


class Constrained:
    """A ``Choice`` that restricts another one to the tokens that a grammar allows."""

    greedy = False

    def __init__(self, choice: Choice, guide: Guide, metadata: Metadata):
        self._choice, self._guide = choice, guide
        self._draft_ids = None if metadata.draft_ids is None else metadata.draft_ids.numpy()

    def target(self, step: Step, proposed: list[int]) -> Tensor:
        if self._choice.greedy:
            return self._greedy_rows(step, proposed)
        assert step.logits is not None, "Grammars asks for logits"
        masks, taken = [self._guide.allowed()], 0
        while taken < len(proposed) and self._guide.take(
            proposed[taken]
        ):  # rows after a token that is not allowed do not matter
            taken += 1
            masks.append(self._guide.allowed())
        self._guide.back(taken)
        allowed = np.ones((step.logits.shape[1], len(masks[0])), bool)
        allowed[: len(masks)] = masks
        return self._choice.target(step._replace(logits=_masked(step.logits, allowed)), proposed)

    def _greedy_rows(self, step: Step, proposed: list[int]) -> Tensor:
        """Return the most likely allowed token of each row. A mask is computed only for rows whose most likely token is
        not allowed, which is rare."""
        assert step.logits is not None, "Grammars asks for logits"
        ids: list[int] = step.ids[0].tolist()
        taken = 0
        while True:
            if not self._guide.allows(ids[taken]):
                ids[taken] = int(_masked(step.logits[0, taken], self._guide.allowed()).argmax())
            if taken == len(proposed) or ids[taken] != proposed[taken] or not self._guide.take(ids[taken]):
                break
            taken += 1
        self._guide.back(taken)
        return torch.tensor([ids])

    def draft(self, step: Step, proposed: Sequence[Tensor]) -> Tensor:
        before = _ids(proposed)
        chosen: list[int] = []
        for row in range(step.ids.shape[1]):
            with self._guide.ahead(before + chosen) as reached:
                chosen.append(self._draft_row(step, row, proposed) if reached else int(step.ids[0, row]))
        return torch.tensor([chosen])

    def _draft_row(self, step: Step, row: int, proposed: Sequence[Tensor]) -> int:
        assert step.logits is not None, "Grammars asks for logits"
        guide = self._guide
        if forced := guide.forced(1):
            return forced[0]
        if self._choice.greedy and guide.allows(token := int(step.ids[0, row])):
            return token
        if guide.free:
            return int(self._choice.draft(step, proposed)[0, row])
        allowed = guide.allowed()
        of_draft = allowed if self._draft_ids is None else allowed[self._draft_ids]
        if not of_draft.any():  # the draft's vocabulary has no allowed token
            return int(allowed.argmax())
        rows = np.ones((step.logits.shape[1], len(of_draft)), bool)
        rows[row] = of_draft
        logits = _masked(step.logits, rows)
        if self._choice.greedy:
            column = int(logits[0, row].argmax())
            return column if self._draft_ids is None else int(self._draft_ids[column])
        return int(self._choice.draft(step._replace(logits=logits), proposed)[0, row])

    def forced(self, proposed: Sequence[Tensor], count: int) -> list[int]:
        with self._guide.ahead(_ids(proposed)) as reached:
            return self._guide.forced(count) if reached else []

    def accept(self, tokens: list[int]) -> None:
        for token in tokens:
            if not self._guide.take(token):
                raise RuntimeError(f"token {token} was accepted and is not in the grammar of structured_outputs")
        self._guide.settle()
        self._choice.accept(tokens)


def _ids(proposed: Sequence[Tensor]) -> list[int]:
    return [token for tokens in proposed for token in tokens[0].tolist()]


def _masked(logits: Tensor, allowed: np.ndarray) -> Tensor:
    """Return ``logits`` with -inf where a token is not allowed; ``allowed`` has the shape of their last dimensions."""
    return logits.masked_fill(~torch.from_numpy(allowed).to(logits.device), float("-inf"))
