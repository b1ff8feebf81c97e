"""The base class of the modules of all kinds of draft heads."""

from typing import Any, Self

import torch
from torch import Tensor, nn

from eagle3.targets import TapTarget
from eagle3.targets.attention import AttentionFactory


class Head(nn.Module):
    """A draft head. It is made from its description on the meta device, then its weights are loaded, then ``attach``
    adds the remaining parts. Draft slot p pairs the target's feature at p with token p + 1."""

    proposals: int = 1
    """The number of tokens that one forward proposes."""
    tap_order: tuple[int, ...] = ()
    """The order of the taps, as in ``DraftDescription``."""
    takes_final_state: bool = True
    """True if the feature is the target's final state after its norm, and no tap."""
    has_cache: bool = False
    """False if the head keeps no keys and values. Then a call has one row, or ``accepted`` selects one of its rows, and
    all steps of a round use the slot of the first step."""

    def attach(
        self,
        draft: Any,  # noqa: ANN401 - the description of its kind
        attention: AttentionFactory,
        dtype: torch.dtype,
        target: TapTarget,
    ) -> Self:
        """Add the parts that no checkpoint holds: KV caches, rotary tables, and modules of the target."""
        raise NotImplementedError

    def in_order(self, taps: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the taps, given in ascending order, in the order in which the head takes them."""
        return tuple(taps[place] for place in self.tap_order) if self.tap_order else taps

    def fuse(self, taps: tuple[Tensor, ...]) -> Tensor:
        """Fuse the target's states, each [1, T, H_target], into the feature [1, T, H]."""
        (state,) = taps
        return state

    def forward(
        self, tokens: Tensor, feature: Tensor, input_pos: Tensor, last: bool = False, accepted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the rows at draft slots ``input_pos``.

        Args:
            tokens: int64 [1, T], target ids; slot p takes token p + 1
            feature: [1, T, H], from ``fuse`` or a recurrent feature
            input_pos: int64 [T], consecutive
            last: return only the last row's proposals
            accepted: int64 [1], return this row's proposals as if it were the last; later rows are ignored

        Returns:
            draft logits [1, rows, draft_vocab_size], and the recurrent features of the same rows
        """
        raise NotImplementedError

    def chains(self, tokens: Tensor, feature: Tensor, length: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """Propose a chain after every row of a text at once, for a measurement. ``eagle3.export.fit.attention`` makes
        the head's attention for it.

        Args:
            tokens, feature: as ``forward`` takes them, for slots 0, 1, 2, ...
            length: the number of proposals in a chain
            first: the first row whose chain is wanted

        Returns:
            int64 [T - first, length], ids of the target, and the logits of the first proposals
            [T - first, draft_vocab_size]
        """
        positions, ids, logits = torch.arange(tokens.shape[1], device=tokens.device), [], []
        for step in range(length):
            scores, feature = self(tokens, feature, positions + step * self.has_cache)
            tokens = self.target_ids(scores)
            ids.append(tokens[0, first:])
            logits.append(scores[0, first:])
            tokens, feature = self.next_inputs(tokens, feature)
        return torch.stack(ids, dim=1), logits[0]

    def next_inputs(self, tokens: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs of a chain's next step: the proposed tokens and their recurrent features."""
        return tokens, feature

    def target_ids(self, logits: Tensor) -> Tensor:
        """Return greedy proposals as ids of the target's vocabulary: [..., draft_vocab_size] -> int64 [...]."""
        return logits.argmax(-1)

    def ids_in_target(self) -> Tensor | None:
        """Return int64 [draft_vocab_size], the target's id of each draft id; None if they are the same."""
        return None


class CachedHead(Head):
    """A head with KV caches of its own. It may have a reduced vocabulary, which ``d2t`` maps to the target's."""

    has_cache = True
    d2t: Tensor | None
    max_seq_len: int
    _slots_written = 0  # eager mode only: callers of exported programs check positions themselves

    def keep_offsets(self, holds_ids: bool) -> None:
        """Convert ``d2t`` to int64 offsets. ``holds_ids`` is True if the file has the target's ids."""
        if self.d2t is not None:
            self.d2t = self.d2t.long() - (torch.arange(len(self.d2t)) if holds_ids else 0)

    def target_ids(self, logits: Tensor) -> Tensor:
        """Return greedy proposals as ids of the target's vocabulary: [..., draft_vocab_size] -> int64 [...]."""
        ids = logits.argmax(-1)
        return ids if self.d2t is None else ids + self.d2t[ids]

    def ids_in_target(self) -> Tensor | None:
        """Return int64 [draft_vocab_size], the target's id of each draft id; None if they are the same."""
        return None if self.d2t is None else torch.arange(len(self.d2t)) + self.d2t

    def check_positions(self, input_pos: Tensor) -> None:
        """Raise ValueError for positions that leave a gap or pass ``max_seq_len``."""
        first, count = int(input_pos[0]), input_pos.numel()
        if not torch.equal(input_pos, torch.arange(first, first + count)):
            raise ValueError(f"draft positions {input_pos.tolist()} are not consecutive")
        if first > self._slots_written:
            raise ValueError(f"draft position {first} leaves a gap: slots 0..{self._slots_written - 1} are written")
        if first + count > self.max_seq_len:
            raise ValueError(f"draft position {first + count - 1} is past max_seq_len {self.max_seq_len}")
        self._slots_written = first + count
