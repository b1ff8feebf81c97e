"""The reference for an MTP head: norms and projection in plain PyTorch around transformers' own decoder layer with its
eager attention. Each call computes every row again, without a cache. Parts have the names of DeepSeek's checkpoints.
Sources: see ``mtp/__init__.py``.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle3.export.draft.kinds.mtp.own_layer import ZERO_CENTERED


@dataclass(frozen=True)
class Drafter:
    """Computes an MTP head. ``model`` is transformers' model of one layer, which is the head's; ``tensors`` (float32)
    are enorm, hnorm, eh_proj and norm, ``embedding`` and ``lm_head`` [V, H] the target's."""

    model: Any
    tensors: dict[str, Tensor]
    embedding: Tensor
    lm_head: Tensor

    def fuse(self, states: list[Tensor]) -> Tensor:
        """Return the first feature [T, H], which is the target's state."""
        (state,) = states
        return state

    def __call__(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Compute all rows. tokens [T], each one position after its slot, and features [T, H] -> logits [T, V] and the
        features of the next step [T, H]."""
        length = len(tokens)
        joined = torch.cat([self._norm(self.embedding[tokens], "enorm"), self._norm(features, "hnorm")], dim=-1)
        x = (joined @ self.tensors["eh_proj"].T)[None]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        rotary = self.model.model.rotary_emb(x, torch.arange(length)[None])
        x = self.model.model.layers[0](x, attention_mask=mask, position_embeddings=rotary)
        state = self._norm(x[0], "norm")
        return F.linear(state, self.lm_head), state

    def _norm(self, x: Tensor, name: str) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        factor = self.tensors[name] + (self.model.config.model_type in ZERO_CENTERED)
        return x * torch.rsqrt(variance + self.model.config.rms_norm_eps) * factor
