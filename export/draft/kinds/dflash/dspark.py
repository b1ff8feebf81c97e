"""DSpark: a bias of the logits by the previous row's token, ``w2(w1[previous token])``, in one of three types. The rows
are computed from left to right, from the anchor on, and each takes its best token. Its confidence head is not used.
Source: speculators' ``MarkovHead``; DeepSpec's and SpecForge's DSpark.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from eagle3.export.checkpoints.json_fields import Fields
from eagle3.export.draft.kinds import DFLASH, DSPARK
from eagle3.export.draft.kinds.dflash.description import Behind, DFlashDescription, Embed, Given, Ids, Variant

RANK, TYPE = "markov_rank", "markov_head_type"
DEFAULT_RANK = 256
TYPES = ("vanilla", "gated", "rnn")
"""Values of ``markov_head_type``: the bias itself (the default), the bias with a gate from it and the state, a bias
from a recurrent state."""


class MarkovHead(Behind):
    """DSpark's bias of the logits: w2(w1[previous token]), with a gate from w1 and the state ("gated"), or from a
    recurrent state ("rnn")."""

    def __init__(self, draft: DFlashDescription, markov: "DSpark"):
        super().__init__()
        size, rank = draft.hidden_size, markov.rank
        self.kind = markov.type
        self.markov_w1 = nn.Embedding(draft.target_vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(size + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + size, 3 * rank)

    def forward(self, logits: Tensor, state: Tensor, given: Tensor, ids: Ids, embed: Embed) -> Tensor:  # noqa: ARG002
        token, walked = given, []
        memory = state.new_zeros(1, 1, self.markov_w2.in_features)
        for row in range(logits.shape[1]):
            before, here = self.markov_w1(token), state[:, row : row + 1]
            if self.kind == "gated":
                before = torch.sigmoid(self.gate_proj(torch.cat((here, before), dim=-1))) * before
            elif self.kind == "rnn":
                joint = self.joint_proj(torch.cat((memory, before, here), dim=-1)).unflatten(-1, (3, -1))
                gate = torch.sigmoid(joint[..., 0, :])
                memory = gate * memory + (1.0 - gate) * torch.tanh(joint[..., 1, :])
                before = torch.tanh(joint[..., 2, :])
            scores = logits[:, row : row + 1] + self.markov_w2(before)
            walked.append(scores)
            token = ids(scores)
        return torch.cat(walked, dim=1)


@dataclass(frozen=True)
class DSpark(Variant):
    """The rank of DSpark's bias, 0 for none, and its type."""

    rank: int
    type: str

    kind = DSPARK
    keys = (RANK, TYPE)
    anchor_proposes = True
    module = "markov_head"

    @classmethod
    def settled(cls, said: Fields, defaults: bool) -> str:
        unbiased = not defaults and not said.count(RANK, least=0)
        return DFLASH if unbiased else DSPARK

    @classmethod
    def read(cls, given: Given) -> Self:
        rank, kind = given.said.count(RANK, DEFAULT_RANK, least=0), given.said.get(TYPE) or TYPES[0]
        if kind not in TYPES or (kind == "rnn" and given.first_row):
            raise ValueError(
                f"{given.said.file}: {TYPE} {kind!r} with sample_from_anchor {str(not given.first_row).lower()}: "
                f"supported are {', '.join(TYPES)}, and rnn only with sample_from_anchor"
            )
        return cls(rank=rank, type=kind)

    @property
    def fixes_first_row(self) -> bool:
        return bool(self.rank)

    def behind(self, draft: DFlashDescription, proposals: int) -> MarkovHead | None:  # noqa: ARG002
        return MarkovHead(draft, self) if self.rank else None
