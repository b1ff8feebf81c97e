"""The base class of the modules of all kinds of draft heads."""

from typing import Any, Self

import torch
from torch import Tensor, nn

from eagle3.targets import TapTarget
from eagle3.targets.attention import AttentionFactory


class Head(nn.Module):
    """A draft head, made from its description on the meta device, then loaded and attached. Draft slot p pairs the
    target's feature at p with token p + 1."""

    proposals: int = 1
    """The tokens that one forward proposes."""
    takes_final_state: bool = True
    """The feature is the target's final state after its norm, and no tap."""
    has_cache: bool = False
    """False if the head keeps no keys and values. Then a call has one row, or picks one by ``accepted``, and all steps
    of a round are at the first step's slot."""

    def attach(
        self,
        draft: Any,  # noqa: ANN401 - the description of its kind
        attention: AttentionFactory,
        dtype: torch.dtype,
        target: TapTarget,
    ) -> Self:
        """Add the parts that no checkpoint holds: KV caches, tables, modules of the target."""
        raise NotImplementedError

    def fuse(self, taps: tuple[Tensor, ...]) -> Tensor:
        """Return the feature [1, T, H] of the target's states, each [1, T, H_target]."""
        (state,) = taps
        return state

    def forward(
        self, tokens: Tensor, feature: Tensor, input_pos: Tensor, last: bool = False, accepted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run draft slots ``input_pos``.

        Args:
            tokens: int64 [1, T], target ids; slot p takes token p + 1
            feature: [1, T, H], from ``fuse`` or a recurrent feature
            input_pos: int64 [T], consecutive
            last: return only the last row's proposals
            accepted: int64 [1], return this row's as if it were the last; the rows after it are ignored

        Returns:
            draft logits [1, rows, draft_vocab_size], and the recurrent features of the same rows
        """
        raise NotImplementedError

    def target_ids(self, logits: Tensor) -> Tensor:
        """Return greedy proposals as ids of the target's vocabulary: [..., draft_vocab_size] -> int64 [...]."""
        return logits.argmax(-1)

    def ids_in_target(self) -> Tensor | None:
        """Return int64 [draft_vocab_size], the target's id of each draft id; None if they are the same."""
        return None
