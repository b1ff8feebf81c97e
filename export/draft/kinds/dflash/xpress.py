"""xPress: a bias of the logits by the previous row's token, refined in parallel.

    x_k = in_proj(cat(down_h(h_k), down_g(mean of all h), embed(token before row k)))
    x_k = x_k + sum over j <= k of mix[:, k, j] * x_j;  x_k = x_k + mlp(x_k)
    logits_k = the block's own logits + readout(x_k)

A pass computes all rows, with the tokens that the pass before gave them; the first takes the best tokens of the block's
own logits. speculators has no inference code for this head. The inputs of a pass are those of the rounds in its
training (``XPressDraftModel.forward``), where each round takes the best tokens of the round before:

    sample_from_anchor   the token before row 0 is the anchor, that before row k what row k - 1 proposes
    otherwise            row 0 holds the anchor and proposes nothing, but row k mixes it in: the token before it is the
                         one before the anchor in the text, that before row 1 the anchor

Tokens are the target's ids; a reduced vocabulary is mapped after every pass. If no token precedes the anchor in its
document, training takes the anchor itself. vLLM's pull request 54448 always does so, since its drafter does not know
earlier tokens; its passes are the same otherwise. Here the head stores the tokens of its slots. The anchor stands in
only for the first token of a text, which no draft slot holds.

Row k depends on the tokens before rows 0 to k, so each pass makes one more row final. Passes beyond the number of rows
change nothing and are left out.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eagle3.export.draft.common.speculators import SPECULATORS
from eagle3.export.draft.kinds import XPRESS
from eagle3.export.draft.kinds.dflash.description import Behind, DFlashDescription, Embed, Given, Ids, Variant

DEFAULTS = {
    "xpress_rank": 256,
    "xpress_mlp_ratio": 2,  # the width of the MLP, as a multiple of the rank
    "num_jacobi_passes": 6,  # the number of passes
}


class Refiner(Behind):
    """Refines the first ``proposals`` tokens of a block. Source: speculators' ``XPressRefinerHead``."""

    sees_block = True
    mixer: Tensor

    def __init__(self, draft: DFlashDescription, sizes: "XPress", proposals: int):
        super().__init__()
        size, rank, inner = draft.hidden_size, sizes.rank, sizes.rank * sizes.mlp_ratio
        self.first_row, self.rows = draft.first_row, draft.first_row + proposals
        self.takes_token_before = bool(draft.first_row)
        self.passes = min(sizes.passes, proposals)
        self.token_embed = nn.Embedding(draft.target_vocab_size, rank)
        self.down_h = nn.Linear(size, rank, bias=False)
        self.down_g = nn.Linear(size, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.empty(rank, draft.block_rows, draft.block_rows))
        self.mlp_gate = nn.Linear(rank, inner, bias=False)
        self.mlp_up = nn.Linear(rank, inner, bias=False)
        self.mlp_down = nn.Linear(inner, rank, bias=False)
        self.readout = nn.Linear(rank, draft.draft_vocab_size, bias=False)

    def attached(self) -> None:
        """Replace the loaded mixer [rank, B, B] by the part of it that is used, [rows, rows, rank]."""
        causal = self.mix_l.detach().tril()[:, : self.rows, : self.rows]
        self.register_buffer("mixer", causal.permute(1, 2, 0).contiguous(), persistent=False)
        del self.mix_l

    def forward(self, logits: Tensor, state: Tensor, given: Tensor, ids: Ids, embed: Embed) -> Tensor:  # noqa: ARG002
        whole = self.down_g(state.mean(dim=1, keepdim=True)).expand(-1, self.rows, -1)
        states = torch.cat((self.down_h(state[:, : self.rows]), whole), dim=-1)
        refined = logits
        for _ in range(self.passes):
            before = torch.cat((given, ids(refined)[:, :-1]), dim=1)
            x = self.in_proj(torch.cat((states, self.token_embed(before)), dim=-1))
            x = x + (self.mixer * x).sum(dim=1)  # [rows, rows, rank] * [1, rows, rank]
            x = x + self.mlp_down(F.silu(self.mlp_gate(x)) * self.mlp_up(x))
            refined = logits + self.readout(x[:, self.first_row :])
        return refined


@dataclass(frozen=True)
class XPress(Variant):
    """The sizes of xPress's refiner: its rank, the width of its MLP as a multiple of the rank, and the passes over a
    block."""

    rank: int
    mlp_ratio: int
    passes: int

    kind = XPRESS
    keys = tuple(DEFAULTS)
    dialects = (SPECULATORS,)
    fixes_first_row = True
    module = "refiner_head"

    @classmethod
    def read(cls, given: Given) -> Self:
        rank, ratio, passes = (given.said.count(key, default) for key, default in DEFAULTS.items())
        return cls(rank=rank, mlp_ratio=ratio, passes=passes)

    def behind(self, draft: DFlashDescription, proposals: int) -> Refiner:
        return Refiner(draft, self, proposals)
