"""Converts INT4 weights that another tool quantized to CUDA's layout. Codes and zero points stay exact, and scales are
as near as possible.

ExecuTorch's ``CudaCoalescedInt4Tensor`` stores a scale as an 8-bit code times an fp16 step, which 256 weights of a row
share, and stores a zero point in the same way. ExecuTorch computes the step only from the largest of the scales that
share it. Here several steps are tried, because fp16 is coarse for such small numbers (1e-5 and less are subnormal). A
step of 1 makes zero points exact.
"""

import torch
from executorch.backends.cuda.coalesced_int4_tensor import CudaCoalescedInt4Tensor
from executorch.extension.llm.export.int4 import ExportableInt4Tensor
from torch import Tensor

BLOCK = 256  # the number of weights that share a step
STEPS = range(255, 223, -1)
"""The codes that are tried for the largest scale of a block."""
ROWS = 1024  # the number of rows that are converted at a time


def exact_layout(name: str, weight: ExportableInt4Tensor) -> tuple[CudaCoalescedInt4Tensor, float]:
    """Return the weight [N, K] in CUDA's layout, and the largest relative rounding of a scale.

    The weight must satisfy ``has_whole_zeros``. Raises ValueError for scales outside the layout's range.
    """
    group, (rows, columns) = weight.group_size, weight.shape
    scale, zero = weight.scale.t(), weight.zero_point.t()  # [N, groups]
    _check_range(name, scale)
    if group > BLOCK:
        scale, zero = (values.repeat_interleave(group // BLOCK, 1) for values in (scale, zero))
        group = BLOCK
    codes, steps, rounding = zip(*map(_encoded, scale.unflatten(1, (-1, BLOCK // group)).split(ROWS)), strict=True)
    ones = torch.ones(rows, columns // BLOCK, dtype=torch.float16)
    packed = CudaCoalescedInt4Tensor(
        weight.qdata,
        torch.cat(codes),
        torch.cat(steps),
        zero.to(torch.uint8).contiguous(),
        ones,
        [1, group],
        weight.shape,
    )
    return packed, max(rounding)


def _encoded(scale: Tensor) -> tuple[Tensor, Tensor, float]:
    """Encode scales [N, blocks, groups of a block] as codes uint8 [N, groups] and steps fp16 [N, blocks]. Also return
    the largest relative rounding."""
    scale = scale.float()
    largest = scale.amax(-1)
    best = torch.full_like(largest, torch.inf)
    step = torch.zeros_like(largest, dtype=torch.float16)
    for code in STEPS:
        tried = (largest / code).to(torch.float16)
        error = _rounding(scale, _codes(scale, tried), tried)
        better = error < best
        best, step = torch.where(better, error, best), torch.where(better, tried, step)
    return _codes(scale, step).to(torch.uint8).flatten(1), step, float(best.max())


def _codes(scale: Tensor, step: Tensor) -> Tensor:
    return (scale / step.float().clamp_min(1e-30).unsqueeze(-1)).round().clamp(0, 255)


def _rounding(scale: Tensor, codes: Tensor, step: Tensor) -> Tensor:
    """Return the largest relative rounding in each block, [N, blocks]. A scale of 0 is stored exactly."""
    held = codes * step.float().unsqueeze(-1)
    return ((held - scale).abs() / scale.clamp_min(1e-30)).amax(-1)


def has_whole_zeros(weight: ExportableInt4Tensor) -> bool:
    """Return True if every zero point is an integer from 0 to 255, which a step of 1 stores exactly."""
    zero = weight.zero_point
    return bool(((zero == zero.round()) & (zero >= 0) & (zero <= 255)).all())


def _check_range(name: str, scale: Tensor) -> None:
    least, most = scale.amin().item(), scale.amax().item()
    if least < 0 or most > 255 * torch.finfo(torch.float16).max:
        raise ValueError(
            f"{name} has scales of {least:g} to {most:g}, but CUDA's INT4 layout holds 0 to 1.6e7: the checkpoint is "
            "damaged, or another tool's"
        )
