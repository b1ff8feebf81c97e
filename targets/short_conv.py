"""Layers of a gated short convolution (LFM2): transformers' own forward over a ring of the convolution's inputs.

Of a token's three projections B, C and x [channels] each, with weights w of L taps for each channel:

    z_t = B_t * x_t        y_t = C_t * sum over i < L of w_i z_(t-L+1+i)

(LFM2 Technical Report, arXiv 2511.23404). A row reads z of the L - 1 positions before it, and nothing else of the past.
So the state is a ring of z by position, as the KV cache of a sliding window is one: a position that is written again
replaces the rejected row, and there is nothing to roll back.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eagle3.targets.recurrent import Ring


class ShortConvState(nn.Module):
    """The inputs of one layer's convolution at the last positions, in float32: twice the sliding window ``window``, and
    what the first of them reads, or the whole context where that is shorter."""

    def __init__(self, mixer: Any, window: int, max_seq_len: int):  # noqa: ANN401 - a class of transformers
        super().__init__()
        channels, _, taps = mixer.conv.weight.shape
        self.earlier = taps - 1
        self.conv = Ring(max(min(2 * window, max_seq_len), taps) + self.earlier, channels)

    def with_earlier(self, mixed: Tensor, input_pos: Tensor) -> Tensor:
        """Return the convolution's inputs ``mixed`` [1, channels, T] at ``input_pos`` [T] after those of the positions
        before, and keep them. Inputs before position 0 are zero."""
        positions = input_pos[:1] + torch.arange(-self.earlier, 0, device=input_pos.device)
        earlier = self.conv.read(positions, positions >= 0)
        both = torch.cat((earlier.to(mixed.dtype), mixed[0].T))  # [taps - 1 + T, channels]
        # The rows to write are a slice of the result: a backend might otherwise write in place before it reads.
        self.conv.write(input_pos, both[self.earlier :].float())
        return both.T.unsqueeze(0)


def causal_convolution(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_given: object
) -> Tensor:
    """Replaces transformers' causal convolution of [1, channels, T] by ``weight`` [channels, taps] with products of
    shifted rows, since a grouped convolution of a few taps is slow on the CPU. Products and sums are in float32.
    Raises ValueError for an activation other than silu."""
    if activation not in (None, "silu"):
        raise ValueError(f"its convolution is followed by {activation}, ours by silu")
    taps, rows, weight = weight.shape[-1], hidden_states[0].T.float(), weight.float()  # [T, channels]
    padded = F.pad(rows, (0, 0, taps - 1, 0))
    length = rows.shape[0]
    out = padded[:length] * weight[:, 0]
    for tap in range(1, taps):
        out = out + padded[tap : tap + length] * weight[:, tap]
    out = out if bias is None else out + bias
    return (F.silu(out) if activation else out).to(hidden_states.dtype).T.unsqueeze(0)
