"""Splits 4-bit linears into sums over ranges of K (split-K), so that a verify window costs little more than one row.

XNNPACK's kernel computes 16 outputs of up to 8 rows at a time, and reads the rows again for the next 16 outputs, while
weights stream through the same first-level cache. Rows of more than about 6 KiB (in a cache of 48 KiB on an AMD Zen 5)
are evicted by then. For 8-bit and float32 weights there is nothing to gain (``scripts/bench/bench_cpu_kernels.py``).
The inputs of each range are quantized separately, which is closer to the unquantized inputs.

Splitting helps if the kernel waits for its rows. On processors where it does not, splitting costs time, and an export
there does not split. Without AVX-512 the kernel takes 3 rows and 1.4 times as long when split; on a Zen 4 it takes 1.1
times as long for four rows. Measured on a Zen 4: 2 to 8 rows take about the same time, four rows 2.4 times that of one
with weights from memory and 3.5 times with weights that fit the second-level cache, and narrower ranges are slower
still. These times suggest that arithmetic is the limit there; no hardware counter was read. The two processors are
distinguished by the size of the first-level cache: 32 KiB on a Zen 4 and 48 on a Zen 5. Older Intel servers also have
32 KiB, and none was measured.
"""

from collections import defaultdict
from itertools import pairwise

import torch
from torch import Tensor, nn

from eagle3.export.lowering.xnnpack.quantization import DynamicWeight
from eagle3.export.speculator.tensor_files import contiguous_beside
from eagle3.runner.system.cpu_features import first_level_cache, lacks_avx512

CACHED = 6 << 10
"""The size in bytes of 8-bit rows that stay in the first-level cache."""
KERNEL_ROWS = 8
SMALL_CACHE = 32 << 10
"""No linear is split if the first-level cache has at most this many bytes. Splitting cost time on a Zen 4; Intel's
servers were not measured."""


class SplitLinear(nn.Module):
    """A linear computed as the sum of ``parts``, each over the next range of its inputs: [..., K] -> [..., N]."""

    def __init__(self, parts: list[nn.Linear]):
        super().__init__()
        self.parts, self.widths = nn.ModuleList(parts), [part.in_features for part in parts]

    def forward(self, x: Tensor) -> Tensor:
        start = 0
        out: Tensor | None = None
        for part, width in zip(self.parts, self.widths, strict=True):
            product = part(x[..., start : start + width])
            start, out = start + width, product if out is None else out + product
        assert out is not None, "a linear has inputs"
        return out


def splits() -> bool:
    """Return True if an export on this processor splits. If the size of the cache is unknown, it splits."""
    return not lacks_avx512() and not 0 < first_level_cache() <= SMALL_CACHE


def split_wide_linears(model: nn.Module, rows: int) -> None:
    """Replace in place the 4-bit linears of ``model`` whose inputs do not stay cached for a verify window of ``rows``.
    A weight that several linears share is split once."""
    widest = CACHED // min(rows, KERNEL_ROWS)
    holders = defaultdict(list)
    for parent in model.modules():
        for name, linear in parent.named_children():
            if type(linear) is nn.Linear and len(_ends(linear.weight, widest)) > 2:
                holders[id(linear.weight)].append((parent, name))
    for places in holders.values():
        weight = getattr(*places[0]).weight
        ranges = [_columns(weight, *ends) for ends in pairwise(_ends(weight, widest))]
        for parent, name in places:
            biases = [getattr(parent, name).bias] + [None] * (len(ranges) - 1)
            setattr(parent, name, SplitLinear(list(map(_linear, ranges, biases))))


def _ends(weight: Tensor, widest: int) -> list[int]:
    """Return the ends of the ranges of K: as few ranges as possible, of whole groups and nearly equal sizes. Returns []
    for a weight that is not 4-bit."""
    if not isinstance(weight, DynamicWeight) or weight.target_dtype != torch.int4:  # type: ignore[attr-defined]
        return []
    width, group = weight.shape[1], weight.block_size[1]
    count = -(-width // max(widest // group * group, group))
    return [width // group * index // count * group for index in range(count + 1)]


def _columns(weight: DynamicWeight, start: int, end: int) -> nn.Parameter:
    def cut(values: Tensor) -> Tensor:
        """Return the columns of one range, for codes (one per input) as well as scales (one per group)."""
        inputs = weight.shape[1] // values.shape[1]
        return contiguous_beside(values[:, start // inputs : end // inputs])

    data = (cut(getattr(weight, name)) for name in weight.tensor_data_names)
    attributes = (getattr(weight, name) for name in weight.tensor_attribute_names)
    return nn.Parameter(type(weight)(*data, *attributes), requires_grad=False)


def _linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = weight
    made.register_parameter("bias", bias)
    return made
