"""The module of an MLP speculator, which makes all proposals of a round in one call.

    state = the target's final state after its norm;  with scale_input: rms_norm(state) / sqrt(2)
    for each stage:
        state = gelu(ln(proj(state) + ratio * emb(token)));  logits = head(state);  token = argmax(logits)

``ln`` is an RMS norm with a shift. The first token is the anchor. ``ratio`` weights embeddings so that half of the last
state's expected magnitude comes from the target's state.

Source: "Accelerating Production LLMs with Combined Token/Embedding Speculators", https://arxiv.org/abs/2404.19124.
"""

import math
from typing import Any, Self

import torch
from torch import Tensor, nn

from eagle3.export.draft.common import head
from eagle3.export.draft.common.head import Pieces
from eagle3.export.draft.kinds.mlp_speculator.reading import EPSILON, SpeculatorDescription
from eagle3.targets import TapTarget
from eagle3.targets.attention import AttentionFactory


class Head(head.Head):
    """An MLP speculator. A call computes one row."""

    def __init__(self, draft: SpeculatorDescription, max_seq_len: int, proposals: int = 1):  # noqa: ARG002 - no cache
        super().__init__()
        self.proposals, self.scales_input = proposals, draft.scales_input
        self.takes_final_state = draft.takes_final_state
        width, inner, tokens = draft.hidden_size, draft.layer.hidden_size, draft.target_vocab_size
        stages = 1 if draft.tied else draft.stages
        self.stages = nn.ModuleList(Stage(inner, tokens) for _ in range(stages))
        self.proj = nn.ModuleList(
            nn.Linear(inner if index else width, inner, bias=False) for index in range(2 if draft.tied else stages)
        )
        if self.scales_input:
            self.ln0 = nn.RMSNorm(width, eps=EPSILON, elementwise_affine=False)
        kept = 0.5 ** (0.5 / draft.stages)
        self.ratio = math.sqrt((1 - kept**2) * inner / 2) / kept

    def attach(
        self,
        draft: SpeculatorDescription,  # noqa: ARG002 - the checkpoint has all parts
        attention: AttentionFactory,  # noqa: ARG002 - it has none
        dtype: torch.dtype,  # noqa: ARG002
        target: TapTarget,  # noqa: ARG002
    ) -> Self:
        return self

    def forward(
        self,
        tokens: Tensor,
        feature: Tensor,
        input_pos: Tensor,  # noqa: ARG002 - no formula depends on positions
        last: bool = False,  # noqa: ARG002 - one row is the last one
        accepted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the logits and a second result without meaning, since a chain ends with this call. The second result
        is computed, not ``feature`` or a view of it: if a method returns its input, ExecuTorch's runtime gives that
        input new memory before the method has read it."""
        if accepted is not None:
            tokens = tokens.gather(1, accepted[None])
            feature = feature.gather(1, accepted[None, :, None].expand(-1, -1, feature.shape[-1]))
        return self.chain(tokens, feature)[0], -feature

    def chains(
        self,
        tokens: Tensor,
        feature: Tensor,
        input_pos: Tensor,  # noqa: ARG002 - no formula depends on positions
        anchors: Tensor,
        wanted: Tensor,
        pieces: Pieces,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """Propose after every anchor. See ``Head.chains``; K is at most the head's proposals."""
        logits = self.chain(tokens[0, anchors, None], feature[0, anchors, None])[0]
        proposed = self.target_ids(logits)[:, : wanted.shape[1]]
        return (proposed == wanted).cumprod(1).bool(), logits[:, 0]

    def chain(self, token: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the ``proposals`` stages: token [1, 1], state [1, 1, H] -> logits [1, K, V] and states [1, K,
        inner]."""
        if self.scales_input:
            state = self.ln0(state) * 0.5**0.5
        logits, states = [], []
        for index in range(self.proposals):
            stage: Any = self.stages[min(index, len(self.stages) - 1)]
            state = self.proj[min(index, len(self.proj) - 1)](state) + stage.embed_tokens(token) * self.ratio
            state = nn.functional.gelu(stage.norm(state) + stage.shift)
            logits.append(stage.lm_head(state))
            states.append(state)
            token = self.target_ids(logits[-1])
        return torch.cat(logits, dim=1), torch.cat(states, dim=1)


class Stage(nn.Module):
    """The weights of one stage except its projection. Projections are separate, since the first stage's is never
    tied."""

    def __init__(self, width: int, tokens: int):
        super().__init__()
        self.embed_tokens, self.lm_head = nn.Embedding(tokens, width), nn.Linear(width, tokens, bias=False)
        self.norm, self.shift = nn.RMSNorm(width, eps=EPSILON), nn.Parameter(torch.empty(width))
