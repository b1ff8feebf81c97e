"""The base class of the modules of all kinds of draft heads."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from eagle3.export.draft.common.description import DraftDescription
from eagle3.targets import TapTarget
from eagle3.targets.attention import AttentionFactory
from eagle3.targets.loading import load_tensors


class Pieces:
    """Says to the attention of ``eagle3.export.checks.fit`` which rows the next forward of a head has."""

    def __init__(self) -> None:
        self.step = 0
        """The step of a head's chains. The rows of step 0 are those of the text. A later row belongs to one chain."""
        self.anchors: Tensor | None = None
        """int64 [T], in steps 1, 2, ...: the row of the text after which the chain of each row begins."""


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
    checks_positions = True
    """False in a measurement, whose forwards have rows of several chains."""

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

    def joined(self, feature: Tensor, input_pos: Tensor) -> Tensor:  # noqa: ARG002 - a head that copies keys reads both
        """Return the feature [1, T, H] with whatever else the head takes from the target's rows at ``input_pos``."""
        return feature

    def forward(
        self, tokens: Tensor, feature: Tensor, input_pos: Tensor, last: bool = False, accepted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the rows at draft slots ``input_pos``.

        Args:
            tokens: int64 [1, T], target ids; slot p takes token p + 1
            feature: [1, T, H], from ``fuse`` and ``joined``, or a recurrent feature
            input_pos: int64 [T], consecutive
            last: return only the last row's proposals
            accepted: int64 [1], return this row's proposals as if it were the last; later rows are ignored. In a
                measurement there may be many

        Returns:
            draft logits [1, rows, draft_vocab_size], and the recurrent features of the same rows
        """
        raise NotImplementedError

    def chains(
        self, tokens: Tensor, feature: Tensor, input_pos: Tensor, anchors: Tensor, wanted: Tensor, pieces: Pieces
    ) -> tuple[Tensor, Tensor]:
        """Propose a chain after many rows of a text at once, for a measurement. A chain ends with the first proposal
        that differs from ``wanted``. The head's attention is made by ``eagle3.export.checks.fit.chains``.

        Args:
            tokens, feature: as ``forward`` takes them, for the rows of a text
            input_pos: int64 [T], the slot of each row
            anchors: int64 [N], the rows after which chains begin, ascending
            wanted: int64 [N, K], the tokens of the target after each of them, -1 if no token is right
            pieces: says which chain each row belongs to; the head's attention reads it

        Returns:
            bool [N, K], True where a proposal and all before it are as wanted, and the logits of the first proposals
            [N, draft_vocab_size]
        """
        chains = torch.arange(len(anchors))
        hits = torch.zeros(wanted.shape, dtype=torch.bool)
        pieces.step = 0
        if self.has_cache:
            scores, feature = self(tokens, feature, input_pos, accepted=anchors)
        else:
            scores, feature = self(tokens[:, anchors], feature[:, anchors], input_pos[anchors])
        logits = scores[0]
        for step in range(wanted.shape[1]):
            if step:
                rows = anchors[chains]
                pieces.step, pieces.anchors = step, rows
                scores, feature = self(tokens, feature, input_pos[rows] + step * self.has_cache)
            proposed = self.target_ids(scores)[0]
            kept = (proposed == wanted[chains, step]).nonzero()[:, 0]
            chains = chains[kept]
            hits[chains, step] = True
            if not len(chains):
                break
            tokens, feature = self.next_inputs(proposed[None, kept], feature[:, kept])
        return hits, logits

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
        """Raise ValueError for positions that leave a gap or pass ``max_seq_len``, if ``checks_positions``."""
        if not self.checks_positions:
            return
        first, count = int(input_pos[0]), input_pos.numel()
        if not torch.equal(input_pos, torch.arange(first, first + count)):
            raise ValueError(f"draft positions {input_pos.tolist()} are not consecutive")
        if first > self._slots_written:
            raise ValueError(f"draft position {first} leaves a gap: slots 0..{self._slots_written - 1} are written")
        if first + count > self.max_seq_len:
            raise ValueError(f"draft position {first + count - 1} is past max_seq_len {self.max_seq_len}")
        self._slots_written = first + count


def unfilled_head(make: Callable[..., Head], draft: DraftDescription, max_seq_len: int, proposals: int) -> Head:
    """Return a head of the class ``make`` on the meta device, without the parts that no checkpoint holds. Initial
    values are not computed: they would be overwritten, and computing them on the meta device is slow."""
    with no_init_weights(), torch.device("meta"):
        return make(draft, max_seq_len, proposals)


def load_head(
    make: Callable[..., Any],
    draft: DraftDescription,
    max_seq_len: int,
    dtype: torch.dtype,
    attention: AttentionFactory,
    target: TapTarget,
    proposals: int = 1,
) -> Head:
    """Load a head of the class ``make``. It shares ``target``'s embedding and lm_head if it has none of its own."""
    return filled(unfilled_head(make, draft, max_seq_len, proposals), draft, dtype, attention, target)


def filled(
    head: Head, draft: DraftDescription, dtype: torch.dtype, attention: AttentionFactory, target: TapTarget
) -> Head:
    """Load the tensors of an unfilled head and attach the parts that no checkpoint holds."""
    load_tensors(head, draft.source.tensors(), dtype, key_map=draft.tensor_names.get)
    return head.attach(draft, attention, dtype, target).eval().requires_grad_(False)
