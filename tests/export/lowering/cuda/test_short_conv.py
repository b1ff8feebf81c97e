"""A layer of a short convolution, lowered to CUDA, writes its ring in place."""

from types import SimpleNamespace

import torch
from cuda_lowered import lowered
from torch import Tensor, nn

from eagle3.export.lowering.cuda.graph.recurrent import use_cuda_recurrence
from eagle3.targets.short_conv import ShortConvState, causal_convolution

CHANNELS, TAPS, SLOTS = 32, 3, 64


class Lowered(nn.Module):
    """A convolution over its ring, without the linears around it."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(CHANNELS, CHANNELS, TAPS, groups=CHANNELS, bias=False).requires_grad_(False)
        self.kept = ShortConvState(SimpleNamespace(conv=self.conv), window=SLOTS // 2, max_seq_len=1024)
        use_cuda_recurrence(self)

    def forward(self, mixed: Tensor, input_pos: Tensor) -> Tensor:
        rows = self.kept.with_earlier(mixed, input_pos)
        return causal_convolution(rows, self.conv.weight.squeeze(1))[:, :, TAPS - 1 :]


def test_a_lowered_convolution_writes_its_ring_in_place():
    with torch.no_grad():
        called, graph = lowered(Lowered(), (torch.randn(1, CHANNELS, 4), torch.arange(4)))
    written = [name for name, given in called if "kept_conv_rows" in given]
    assert len(written) >= 1  # the buffer itself
    ring = 4 * CHANNELS * (SLOTS + TAPS - 1)
    sizes = [size for entry in graph.launches for size in entry["buffer_bytes"]]
    assert sizes and max(sizes) < ring
