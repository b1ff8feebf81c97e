"""Constrained decoding as the loop's choice: the text that a grammar allows, the same with speculation and without.

1. ``Guide`` follows one generation in its grammar. It advances by accepted tokens alone; proposals are walked and
   taken back.
2. ``Constrained`` masks each row of the target before anything is chosen of it, and the draft's rows likewise, so that
   what is proposed is what the grammar takes. Where the grammar leaves one way on, that is proposed without the draft.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from eagle3.runner.contract import Metadata
from eagle3.runner.hosts.session import Step
from eagle3.runner.rounds.choice import Choice
from eagle3.runner.sampling.constraint import Constraint

LONGEST_REASON = 400
"""Characters of llguidance's reasons."""
BEFORE, REASONING, GRAMMAR, OVER = "before", "reasoning", "grammar", "over"
"""The state of a generation: it may still open its reasoning; within that; in the constrained text; behind its end."""


class GrammarFailed(RuntimeError):
    """A grammar turned out to be too complex for llguidance's limits, or to allow no text."""


class Guide:
    """One generation in its grammar: which tokens may come next. Raises GrammarFailed, in llguidance's words."""

    def __init__(self, constraint: Constraint):
        self._constraint, self._matcher = constraint, constraint.matcher.deep_copy()
        self._where = GRAMMAR
        self._steps: list[tuple[str, bool]] = []  # of each token taken: where that was, and whether the grammar moved
        if constraint.reasoning_end is not None:
            self._where = REASONING if constraint.reasoning_begin is None else BEFORE

    @property
    def free(self) -> bool:
        """Return whether any token may come next."""
        return self._where in (REASONING, OVER)

    def take(self, token: int) -> bool:
        """Go one token on. Returns False, and stays, where the token may not come next."""
        step = self._step(token)
        if step is None:
            return False
        where, moves = step
        self._steps.append((self._where, moves))
        self._where = where
        return True

    def back(self, count: int) -> None:
        """Take back the last ``count`` tokens."""
        if not count:
            return
        self._matcher.rollback(sum(moves for _, moves in self._steps[-count:]))
        self._where = self._steps[-count][0]
        del self._steps[-count:]

    @contextmanager
    def ahead(self, tokens: Sequence[int]) -> Iterator[bool]:
        """Stands behind ``tokens`` for as long as this lasts; gives whether all of them may come."""
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
        allowed = np.unpackbits(self._bits(), count=constraint.vocab_size, bitorder="little").astype(bool)
        allowed[list(constraint.eos_ids)] = self._matcher.is_accepting()
        if self._where == BEFORE:
            allowed[constraint.reasoning_begin] = True
        return allowed

    def allows(self, token: int) -> bool:
        """Return whether ``token`` is one of ``allowed``. ``take`` takes more: any cut of a text into tokens, where
        ``allowed`` has only the tokenizer's own cut of a text that is forced."""
        constraint = self._constraint
        if self.free or (self._where == BEFORE and token == constraint.reasoning_begin):
            return True
        if token in constraint.eos_ids:
            return self._matcher.is_accepting()
        return bool(self._bits()[token >> 3] >> (token & 7) & 1)

    def forced(self, count: int) -> list[int]:
        """Return the tokens that must come next, as far as the grammar knows, ``count`` at most. Behind the end it is
        the end token again: no draft is to be asked for what nobody will read."""
        if self._where in (BEFORE, REASONING):
            return []
        tokens = [] if self._where == OVER else self._matcher.compute_ff_tokens()[:count]
        with self.ahead(tokens) as reached:
            if reached and (self._where == OVER or self._matcher.is_stopped()):
                self._check()
                tokens = tokens + [self._constraint.eos_ids[0]] * (count - len(tokens))
        return tokens

    def _bits(self) -> np.ndarray:
        """Return the mask of the next token: uint8, a bit a token."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return bits

    def _step(self, token: int) -> tuple[str, bool] | None:
        """Return the state behind ``token``, and whether the grammar moves by it; None where it may not come next."""
        constraint = self._constraint
        if self._where == OVER:
            return OVER, False
        if token in constraint.eos_ids:
            return (OVER, False) if self._where == REASONING or self._matcher.is_accepting() else None
        if self._where == REASONING:
            return GRAMMAR if token == constraint.reasoning_end else REASONING, False
        if self._where == BEFORE and token == constraint.reasoning_begin:
            return REASONING, False
        moved = self._matcher.try_consume_tokens([token])
        self._check()
        return (GRAMMAR, True) if moved else None

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = " ".join(self._matcher.get_error().split())
            raise GrammarFailed(f"the grammar of structured_outputs failed: {reason[:LONGEST_REASON]}")


class Constrained:
    """A ``Choice`` that is another's, among the tokens that a grammar allows."""

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
        ):  # behind one that may not come no row matters
            taken += 1
            masks.append(self._guide.allowed())
        self._guide.back(taken)
        allowed = np.ones((step.logits.shape[1], len(masks[0])), bool)
        allowed[: len(masks)] = masks
        return self._choice.target(step._replace(logits=_masked(step.logits, allowed)), proposed)

    def _greedy_rows(self, step: Step, proposed: list[int]) -> Tensor:
        """Return the most likely token wherever it is allowed, which it mostly is; only elsewhere is a mask made."""
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
        if not of_draft.any():  # the draft has no word for it
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
        self._choice.accept(tokens)


def _ids(proposed: Sequence[Tensor]) -> list[int]:
    return [token for tokens in proposed for token in tokens[0].tolist()]


def _masked(logits: Tensor, allowed: np.ndarray) -> Tensor:
    """Return ``logits`` with -inf where a token is not allowed; ``allowed`` has their last dimensions."""
    return logits.masked_fill(~torch.from_numpy(allowed).to(logits.device), float("-inf"))
