"""The part of an xPress behind the block: a bias of the logits by the token before each row, refined in parallel.

    x_k = in_proj(cat(down_h(h_k), down_g(mean of all h), embed(token before row k)))
    x_k = x_k + sum over j <= k of mix[:, k, j] * x_j;  x_k = x_k + mlp(x_k)
    logits_k = the block's own logits + readout(x_k)

A pass computes all rows, with the tokens that the pass before gave them; the first takes the best tokens of the block's
own logits. The head has no inference code in speculators. What a pass takes is that of the rounds in its training
(``XPressDraftModel.forward``), where each is given the best tokens of the round before:

    sample_from_anchor   the token before row 0 is the anchor, that before row k what row k - 1 proposes
    otherwise            row 0 holds the anchor and proposes nothing, but row k mixes it in: the token before it is the
                         one before the anchor in the text, that before row 1 the anchor

Tokens are the target's ids; a reduced vocabulary is mapped after every pass. Training takes the anchor itself where no
token is before it in its document. vLLM's pull request 54448 always does, since its drafter knows no earlier token; its
passes are these otherwise. Here the head keeps the tokens of its slots, and the anchor stands in for the first token of
a text alone, which no draft slot holds.

Row k depends on tokens before rows 0 to k, so each pass settles one more row, and passes beyond the last row change
nothing. So many are left out.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eagle3.export.draft.kinds.dflash.description import DFlashDescription
from eagle3.export.draft.kinds.dflash.walks import Ids


class Refiner(nn.Module):
    """Refines the first ``proposals`` tokens of a block. Source: speculators' ``XPressRefinerHead``."""

    mixer: Tensor

    def __init__(self, draft: DFlashDescription, proposals: int):
        super().__init__()
        size, rank, inner = draft.hidden_size, draft.refiner_rank, draft.refiner_rank * draft.refiner_mlp_ratio
        self.first_row, self.rows = draft.first_row, draft.first_row + proposals
        self.passes = min(draft.refiner_passes, proposals)
        self.token_embed = nn.Embedding(draft.target_vocab_size, rank)
        self.down_h = nn.Linear(size, rank, bias=False)
        self.down_g = nn.Linear(size, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.empty(rank, draft.block_rows, draft.block_rows))
        self.mlp_gate = nn.Linear(rank, inner, bias=False)
        self.mlp_up = nn.Linear(rank, inner, bias=False)
        self.mlp_down = nn.Linear(inner, rank, bias=False)
        self.readout = nn.Linear(rank, draft.draft_vocab_size, bias=False)

    def keep_causal_part(self) -> None:
        """Replace the loaded mixer [rank, B, B] by the part of it that is read, [rows, rows, rank]."""
        causal = self.mix_l.detach().tril()[:, : self.rows, : self.rows]
        self.register_buffer("mixer", causal.permute(1, 2, 0).contiguous(), persistent=False)
        del self.mix_l

    def forward(self, logits: Tensor, block: Tensor, given: Tensor, ids: Ids) -> Tensor:
        """Refine logits.

        Args:
            logits: [1, K, draft_vocab_size], the block's own, of the rows that propose
            block: [1, B, H], the states of all rows
            given: int64 [1, 1], the anchor; or [1, 2], the token before it and the anchor
            ids: see ``Ids``

        Returns:
            logits of the same shape, of the last pass
        """
        whole = self.down_g(block.mean(dim=1, keepdim=True)).expand(-1, self.rows, -1)
        states = torch.cat((self.down_h(block[:, : self.rows]), whole), dim=-1)
        refined = logits
        for _ in range(self.passes):
            before = torch.cat((given, ids(refined)[:, :-1]), dim=1)
            x = self.in_proj(torch.cat((states, self.token_embed(before)), dim=-1))
            x = x + (self.mixer * x).sum(dim=1)  # [rows, rows, rank] * [1, rows, rank]
            x = x + self.mlp_down(F.silu(self.mlp_gate(x)) * self.mlp_up(x))
            refined = logits + self.readout(x[:, self.first_row :])
        return refined
