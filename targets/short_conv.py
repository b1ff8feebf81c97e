"""Layers of a gated short convolution (LFM2): transformers' own forward over a ring of the convolution's inputs.

Of a token's three projections B, C and x [channels] each, with weights w of L taps for each channel:

    z_t = B_t * x_t        y_t = C_t * sum over i < L of w_i z_(t-L+1+i)

(LFM2 Technical Report, arXiv 2511.23404). A row reads z of the L - 1 positions before it, and nothing else of the past.
So the state is a ring of z by position, as the KV cache of a sliding window is one: a position that is written again
replaces the rejected row, and there is nothing to roll back.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from eagle3.targets.gated_delta import CONVOLUTION, is_gated_delta
from eagle3.targets.recurrent import Ring


def is_short_conv(layer: nn.Module) -> bool:
    """Return whether a decoder layer of transformers mixes tokens by a short convolution alone."""
    mixer = getattr(layer, "conv", None)
    return hasattr(mixer, "conv_kernel_size") and hasattr(sys.modules[type(mixer).__module__], CONVOLUTION)


def mixer_with_state(layer: Any) -> nn.Module | None:  # noqa: ANN401 - a class of transformers
    """Return the submodule of a decoder layer that keeps a state in place of keys and values, None without one."""
    return layer.linear_attn if is_gated_delta(layer) else layer.conv if is_short_conv(layer) else None


class ShortConvState(nn.Module):
    """The inputs of one layer's convolution at the last positions, in float32: twice the sliding window ``window``, and
    what the first of them reads, or the whole context where that is shorter."""

    def __init__(self, mixer: Any, window: int, max_seq_len: int):  # noqa: ANN401 - a class of transformers
        super().__init__()
        channels, _, taps = mixer.conv.weight.shape
        self.earlier = taps - 1
        self.conv = Ring(max(min(2 * window, max_seq_len), taps) + self.earlier, channels)

    def with_earlier(self, mixed: Tensor, input_pos: Tensor) -> Tensor:
        """Return the convolution's inputs ``mixed`` [1, channels, T] at ``input_pos`` [T] behind those of the positions
        before, and keep them. Inputs before position 0 are zero."""
        positions = input_pos[:1] + torch.arange(-self.earlier, 0, device=input_pos.device)
        earlier = self.conv.read(positions, positions >= 0)
        both = torch.cat((earlier.to(mixed.dtype), mixed[0].T))  # [taps - 1 + T, channels]
        # The rows to write are a slice of the result: a backend might otherwise write in place before it reads.
        self.conv.write(input_pos, both[self.earlier :].float())
        return both.T.unsqueeze(0)
