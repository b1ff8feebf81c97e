"""DFlash2: convolutions around attention and MLP of every layer, and a choice among the best tokens of each row by the
previous row's token. The rows are computed from left to right, from the anchor on, and each takes its best token.
Source: speculators' ``GroupedDynamicCausalConv`` and ``CandidateSelector``, z-lab's ``CandidateSelector``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from eagle3.export.draft.kinds import DFLASH2
from eagle3.export.draft.kinds.dflash.description import Behind, DFlashDescription, Embed, Given, Ids, Variant
from eagle3.export.draft.kinds.dflash.layers import DraftLayer, Place

DEFAULTS = {
    "conv_kernel_size": 2,  # the taps of a convolution
    "conv_group_size": 16,  # the channels of a group
    "selector_rank": 256,
    "selector_top_k": 16,  # the tokens of a row that the selector chooses from
}


class ConvolvedLayer(DraftLayer):
    """A layer with a convolution before and after both attention and MLP."""

    def __init__(self, draft: DFlashDescription, index: int, sizes: "DFlash2"):
        super().__init__(draft, index)
        self.attention_conv, self.mlp_conv = Convolution(draft, sizes), Convolution(draft, sizes)

    def forward(self, x: Tensor, place: Place) -> Tensor:
        inner, added = self.attention_conv.prepare(self.input_layernorm(x))
        x = x + self.attention_conv.finish(self.self_attn(inner, place), added)
        inner, added = self.mlp_conv.prepare(self.post_attention_layernorm(x))
        return x + self.mlp_conv.finish(self.mlp(inner), added)


class Convolution(nn.Module):
    """DFlash2's two causal convolutions within a block, of the input and of the output of attention or an MLP. Channels
    in a group share the part of their kernels that depends on the state. Source: speculators'
    ``GroupedDynamicCausalConv``."""

    def __init__(self, draft: DFlashDescription, sizes: "DFlash2"):
        super().__init__()
        self.taps, self.groups = sizes.conv_taps, draft.hidden_size // sizes.conv_group
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, draft.hidden_size))
        self.kernel_projection = nn.Linear(draft.hidden_size, 2 * self.taps * self.groups, bias=False)

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve the input x [1, B, H] and compute the state's part of the kernels; return both. The second is an
        argument of ``finish``."""
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


class CandidateSelector(Behind):
    """DFlash2's choice among the best tokens of each row: logit + sum(predecessor * projected state * successor). All
    other tokens get the smallest of these scores, less one."""

    def __init__(self, draft: DFlashDescription, sizes: "DFlash2"):
        super().__init__()
        tokens, rank = draft.target_vocab_size, sizes.selector_rank
        self.top_k = sizes.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(tokens, rank))
        self.successor_codebook = nn.Parameter(torch.empty(tokens, rank))
        self.hidden_projection = nn.Linear(draft.hidden_size, rank, bias=False)

    def forward(self, logits: Tensor, state: Tensor, given: Tensor, ids: Ids, embed: Embed) -> Tensor:  # noqa: ARG002
        best = logits.topk(self.top_k, dim=-1)
        projected, successors = self.hidden_projection(state), self.successor_codebook[best.indices]
        token, walked = given, []
        for row in range(logits.shape[1]):
            context = self.predecessor_codebook[token] * projected[:, row : row + 1]  # [1, 1, rank]
            scores = best.values[:, row : row + 1] + (context.unsqueeze(2) * successors[:, row : row + 1]).sum(-1)
            others = (scores.amin(-1, keepdim=True) - 1.0).expand(-1, -1, logits.shape[-1])
            walked.append(others.scatter(-1, best.indices[:, row : row + 1], scores))
            token = ids(walked[-1])
        return torch.cat(walked, dim=1)


@dataclass(frozen=True)
class DFlash2(Variant):
    """The sizes of DFlash2's convolutions (their length, the channels of a group) and of its selector (its rank, the
    tokens of a row that it chooses from)."""

    conv_taps: int
    conv_group: int
    selector_rank: int
    selector_top_k: int

    kind = DFLASH2
    keys = tuple(DEFAULTS)
    sliding_non_causal = True
    module = "candidate_selector"

    @classmethod
    def read(cls, given: Given) -> Self:
        said, layer, file = given.said, given.layer, given.said.file
        taps, group, rank, chosen = (said.count(key, default) for key, default in DEFAULTS.items())
        if layer.hidden_size % group or chosen > layer.vocab_size or taps > said["block_size"]:
            raise ValueError(
                f"{file}: conv_group_size {group} must divide hidden_size {layer.hidden_size}, selector_top_k {chosen} "
                f"be at most the vocabulary's {layer.vocab_size}, conv_kernel_size {taps} at most block_size "
                f"{said['block_size']}: correct it"
            )
        if "d2t" in given.tensors:
            raise ValueError(f"{file.parent} has a d2t, but a {DFLASH2} head uses the target's whole vocabulary")
        return cls(conv_taps=taps, conv_group=group, selector_rank=rank, selector_top_k=chosen)

    def layer(self, plain: type[DraftLayer]) -> Callable[[DFlashDescription, int], nn.Module]:  # noqa: ARG002
        return lambda draft, index: ConvolvedLayer(draft, index, self)

    def behind(self, draft: DFlashDescription, proposals: int) -> CandidateSelector:  # noqa: ARG002
        return CandidateSelector(draft, self)
