"""The parts of DSpark, DFlash2 and Domino behind the block: a row's scores depend on the token that the row before
proposes, in Domino on all before it.

All walk the rows from left to right, from the anchor on, and take the best token of each. Source: speculators'
``MarkovHead`` and ``CandidateSelector``, z-lab's ``CandidateSelector``, SpecForge's ``DominoDraftModel``.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from eagle3.export.draft.kinds.dflash.description import DFlashDescription

Ids = Callable[[Tensor], Tensor]
"""Returns the best tokens of logits, as ids of the target: [1, 1, draft_vocab_size] -> [1, 1]."""
Embed = Callable[[Tensor], Tensor]
"""Returns the embedding of tokens, as the block has it: [1, 1] -> [1, 1, H]."""


class MarkovHead(nn.Module):
    """DSpark's bias of the logits: w2(w1[token before]), or a gate of that and the state ("gated"), or a recurrent
    state ("rnn")."""

    def __init__(self, draft: DFlashDescription):
        super().__init__()
        size, rank = draft.hidden_size, draft.markov_rank
        self.kind = draft.markov_type
        self.markov_w1 = nn.Embedding(draft.target_vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(size + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + size, 3 * rank)

    def forward(self, logits: Tensor, state: Tensor, anchor: Tensor, ids: Ids) -> Tensor:
        """logits [1, K, draft_vocab_size], state [1, K, H], anchor [1, 1] -> the logits with their biases."""
        token, walked = anchor, []
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


class GRU(nn.Module):
    """A GRU of one layer without biases, a step at a time. Its linears have the names of PyTorch's weights."""

    def __init__(self, size: int, state: int):
        super().__init__()
        self.weight_ih_l0 = nn.Linear(size, 3 * state, bias=False)
        self.weight_hh_l0 = nn.Linear(state, 3 * state, bias=False)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """x [1, 1, H], memory [1, 1, state] -> the next state"""
        reset, update, new = self.weight_ih_l0(x).chunk(3, dim=-1)
        kept_reset, kept_update, kept = self.weight_hh_l0(memory).chunk(3, dim=-1)
        update = torch.sigmoid(update + kept_update)
        candidate = torch.tanh(new + torch.sigmoid(reset + kept_reset) * kept)
        return (1.0 - update) * candidate + update * memory


class DominoHead(nn.Module):
    """Domino's bias of the logits: embed_proj(cat(state, memory)), where a GRU made the memory of the anchor and of all
    tokens that the rows before propose. It begins anew in each block. The first ``gru_first`` rows have no bias."""

    def __init__(self, draft: DFlashDescription):
        super().__init__()
        size, rank = draft.hidden_size, draft.gru_rank
        self.first, self.state = draft.gru_first, draft.gru_size
        self.prefix_gru = GRU(size, self.state)
        self.embed_proj = nn.Sequential(
            nn.Linear(size + self.state, rank, bias=False),
            nn.SiLU(),
            nn.Linear(rank, draft.draft_vocab_size, bias=False),
        )

    def forward(self, logits: Tensor, state: Tensor, anchor: Tensor, ids: Ids, embed: Embed) -> Tensor:
        """logits [1, K, draft_vocab_size], state [1, K, H], anchor [1, 1] -> the logits with their biases."""
        token, walked = anchor, []
        memory = state.new_zeros(1, 1, self.state)
        for row in range(logits.shape[1]):
            scores = logits[:, row : row + 1]
            memory = self.prefix_gru(embed(token), memory)
            if row >= self.first:
                scores = scores + self.embed_proj(torch.cat((state[:, row : row + 1], memory), dim=-1))
            walked.append(scores)
            token = ids(scores)
        return torch.cat(walked, dim=1)


class CandidateSelector(nn.Module):
    """DFlash2's choice among the best tokens of each row: logit + sum(predecessor * projected state * successor). All
    other tokens get one less than the least of them."""

    def __init__(self, draft: DFlashDescription):
        super().__init__()
        tokens, rank = draft.target_vocab_size, draft.selector_rank
        self.top_k = draft.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(tokens, rank))
        self.successor_codebook = nn.Parameter(torch.empty(tokens, rank))
        self.hidden_projection = nn.Linear(draft.hidden_size, rank, bias=False)

    def forward(self, logits: Tensor, state: Tensor, anchor: Tensor, ids: Ids) -> Tensor:
        """logits [1, K, vocab_size], state [1, K, H], anchor [1, 1] -> logits of the same shape."""
        best = logits.topk(self.top_k, dim=-1)
        projected, successors = self.hidden_projection(state), self.successor_codebook[best.indices]
        token, walked = anchor, []
        for row in range(logits.shape[1]):
            context = self.predecessor_codebook[token] * projected[:, row : row + 1]  # [1, 1, rank]
            scores = best.values[:, row : row + 1] + (context.unsqueeze(2) * successors[:, row : row + 1]).sum(-1)
            others = (scores.amin(-1, keepdim=True) - 1.0).expand(-1, -1, logits.shape[-1])
            walked.append(others.scatter(-1, best.indices[:, row : row + 1], scores))
            token = ids(walked[-1])
        return torch.cat(walked, dim=1)


class Convolution(nn.Module):
    """DFlash2's two causal convolutions within a block, of the input and of the output of attention or an MLP. Channels
    in a group share what the state adds to their kernels. Source: speculators' ``GroupedDynamicCausalConv``."""

    def __init__(self, draft: DFlashDescription):
        super().__init__()
        self.taps, self.groups = draft.conv_taps, draft.hidden_size // draft.conv_group
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, draft.hidden_size))
        self.kernel_projection = nn.Linear(draft.hidden_size, 2 * self.taps * self.groups, bias=False)

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [1, B, H] -> the convolved input of the same shape, and what ``finish`` takes."""
        added = self.kernel_projection(x).unflatten(-1, (2, self.taps, self.groups))
        return self._convolved(x, added[:, :, 0], self.base_kernel[0]), added[:, :, 1]

    def finish(self, x: Tensor, added: Tensor) -> Tensor:
        return self._convolved(x, added, self.base_kernel[1])

    def _convolved(self, x: Tensor, added: Tensor, base: Tensor) -> Tensor:
        grouped, out = x.unflatten(-1, (self.groups, -1)), torch.zeros_like(x)
        for tap in range(self.taps):
            kernel = base[tap].unflatten(-1, (self.groups, -1)) + added[:, :, tap, :, None]
            before = nn.functional.pad(grouped[:, : grouped.shape[1] - tap], (0, 0, 0, 0, tap, 0))
            out = out + (before * kernel).flatten(2)
        return out
