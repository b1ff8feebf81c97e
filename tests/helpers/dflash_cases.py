"""Loads a golden head of the DFlash family, and the numbers that its trainer's code computed."""

from types import SimpleNamespace

import torch
from dflash_heads import GOLDEN
from safetensors.torch import load_file
from torch import nn

from eagle3.export.draft.loading import load_draft
from eagle3.export.draft.reading import read_draft
from eagle3.targets.attention import EagerAttention

CLOSE = {"atol": 1e-4, "rtol": 1e-4}


class Case:
    """A golden head with its target's embedding and lm_head, and its golden numbers."""

    def __init__(self, name: str, chain_len: int | None = None):
        self.draft, self.golden = read_draft(GOLDEN / name), load_file(GOLDEN / name / "golden.safetensors")
        embedding, lm_head = nn.Embedding(96, 64), nn.Linear(64, 96, bias=False)
        embedding.weight = nn.Parameter(self.golden["embedding"])
        if self.draft.shares_lm_head:
            lm_head.weight = nn.Parameter(self.golden["lm_head"])
        target = SimpleNamespace(embed_tokens=embedding, embed=embedding, lm_head=lm_head)
        self.chain_len = chain_len or self.draft.longest_chain
        self.head = load_draft(self.draft, 40, torch.float32, EagerAttention, target, self.chain_len)
        self.features = self.head.fuse(self.golden["taps"].chunk(3, dim=-1))

    def draft_behind(self, start: int, anchor: int, features=None):
        """Write the slots from ``start`` on, and draft the block of the anchor at position ``anchor``. With other
        ``features``, other tokens are written too."""
        rows = slice(start, anchor)
        tokens = self.golden["tokens"][:, start + 1 : anchor + 1]
        given = self.features if features is None else features
        tokens = tokens if features is None else (tokens + 17) % 96
        with torch.no_grad():
            return self.head(tokens, given[:, rows], torch.arange(start, anchor))

    def check(self, number: int, logits, state) -> None:
        """Compare with the golden block of anchor ``number``."""
        rows = slice(self.draft.first_row, self.draft.first_row + self.chain_len)
        torch.testing.assert_close(logits[0], self.golden["logits"][number, rows], **CLOSE)
        torch.testing.assert_close(state[0], self.golden["states"][number, rows], **CLOSE)
        proposed = self.head.target_ids(logits)[0].tolist()
        assert proposed == self.golden["proposals"][number, : self.chain_len].tolist()
