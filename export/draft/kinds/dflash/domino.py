"""Domino: a bias of the logits by a GRU over the block's tokens. A row's scores depend on the tokens that all rows
before it propose.

Its files are in z-lab's or speculators' dialect; SpecForge and NVIDIA's ModelOpt train it. Source: SpecForge's
``DominoDraftModel``, the ``DominoHead`` of speculators' pull request 773; arXiv 2605.29707.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from eagle3.export.checkpoints.json_fields import Fields
from eagle3.export.draft.common.speculators import SPECULATORS
from eagle3.export.draft.kinds import DOMINO
from eagle3.export.draft.kinds.dflash.description import (
    ANCHOR,
    FACTORS,
    SHIFT,
    Z_LAB,
    Behind,
    DFlashDescription,
    Embed,
    Given,
    Ids,
    Variant,
)

PREFIX = "pure_draft_prefix_len"
DEFAULTS = {
    PREFIX: 1,  # the first proposal with a bias
    "gru_hidden_dim": 1024,  # the size of the GRU's state
    "emb_dim": 256,  # the rank of the bias
}
"""The defaults in speculators. Files of other systems have every key."""


class GRU(nn.Module):
    """A GRU of one layer without biases, which computes one step. Its linears have the names of PyTorch's weights."""

    def __init__(self, size: int, state: int):
        super().__init__()
        self.weight_ih_l0 = nn.Linear(size, 3 * state, bias=False)
        self.weight_hh_l0 = nn.Linear(state, 3 * state, bias=False)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """Return the next state [1, 1, state] for an input x [1, 1, H] and the state ``memory`` [1, 1, state]."""
        reset, update, new = self.weight_ih_l0(x).chunk(3, dim=-1)
        kept_reset, kept_update, kept = self.weight_hh_l0(memory).chunk(3, dim=-1)
        update = torch.sigmoid(update + kept_update)
        candidate = torch.tanh(new + torch.sigmoid(reset + kept_reset) * kept)
        return (1.0 - update) * candidate + update * memory


class DominoHead(Behind):
    """Domino's bias of the logits: embed_proj(cat(state, memory)), where ``memory`` is the state of a GRU over the
    anchor and the tokens that earlier rows propose. The GRU starts from zeros in each block. Rows before the row
    ``first`` have no bias."""

    def __init__(self, draft: DFlashDescription, domino: "Domino"):
        super().__init__()
        size, rank = draft.hidden_size, domino.rank
        self.first, self.state = domino.first, domino.size
        self.prefix_gru = GRU(size, self.state)
        self.embed_proj = nn.Sequential(
            nn.Linear(size + self.state, rank, bias=False),
            nn.SiLU(),
            nn.Linear(rank, draft.draft_vocab_size, bias=False),
        )

    def forward(self, logits: Tensor, state: Tensor, given: Tensor, ids: Ids, embed: Embed) -> Tensor:
        token, walked = given, []
        memory = state.new_zeros(1, 1, self.state)
        for row in range(logits.shape[1]):
            scores = logits[:, row : row + 1]
            memory = self.prefix_gru(embed(token), memory)
            if row >= self.first:
                scores = scores + self.embed_proj(torch.cat((state[:, row : row + 1], memory), dim=-1))
            walked.append(scores)
            token = ids(scores)
        return torch.cat(walked, dim=1)


@dataclass(frozen=True)
class Domino(Variant):
    """The sizes of a Domino head: the size of its GRU's state, the rank of its bias, and the first proposal with a
    bias."""

    size: int
    rank: int
    first: int

    kind = DOMINO
    keys = (SHIFT, *DEFAULTS)
    dialects = (SPECULATORS, Z_LAB)
    embeds_as_target = True
    fixes_first_row = True
    module = "domino_head"
    # The names as current and early versions of SpecForge save them, and as speculators does.
    names = {
        r"(?:logit_head\.|domino_head\.)?(prefix_gru\.weight_[ih]h_l0|embed_proj\.[02]\.weight)": r"domino_head.\1",
        r"domino_head\.(prefix_gru\.weight_[ih]h_l0)": r"domino_head.\1.weight",
    }

    @classmethod
    def first_row(cls, said: Fields, anchor: bool, defaults: bool) -> int:  # noqa: ARG003
        """Return 0 if each row, including the anchor's, proposes the token after its own, else 1."""
        file, shifted = said.file, said.boolean(SHIFT, True if defaults else None)
        if shifted is None:
            raise ValueError(f"{file} has no {SHIFT}, which says if the anchor's row of a {DOMINO} proposes: add it")
        if said.boolean(ANCHOR, shifted) != shifted:
            raise ValueError(f"{file}: {SHIFT} is {shifted}, but {ANCHOR} is not: correct one of them")
        if defaults and not shifted:
            raise ValueError(
                f"{file}: {SHIFT} is false: the {DOMINO} of {SPECULATORS} would attend to the tokens that it proposes"
            )
        return 0 if shifted else 1

    @classmethod
    def chain_len(cls, rows: int, first_row: int) -> int:  # noqa: ARG003 - as SGLang serves it
        return rows - 1

    @classmethod
    def read(cls, given: Given) -> Self:
        said, file, proposals = given.said, given.said.file, given.rows - given.first_row
        for key in DEFAULTS:
            if not given.defaults and said.get(key) is None:
                raise ValueError(f"{file} has no {key}, which every {DOMINO} head of this form has: add it")
        first, size, rank = (said.count(key, DEFAULTS[key], least=int(key != PREFIX)) for key in DEFAULTS)
        if first >= proposals:
            raise ValueError(
                f"{file}: {PREFIX} is {first}, but a block proposes {proposals} tokens, and the last must have a bias: "
                "correct it"
            )
        for key in FACTORS:
            if said.get(key) not in (None, 1.0):
                raise ValueError(f"{file}: {key} is {said[key]}, a key that no code for {DOMINO} has: take it out")
        return cls(size=size, rank=rank, first=first)

    def behind(self, draft: DFlashDescription, proposals: int) -> DominoHead:  # noqa: ARG002
        return DominoHead(draft, self)
