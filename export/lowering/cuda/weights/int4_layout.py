"""INT4 weights that another tool quantized, in CUDA's layout: codes and zero points as they are, scales as near as it
can.

ExecuTorch's ``CudaCoalescedInt4Tensor`` holds a scale as a code of 8 bits times an fp16 step that 256 weights of a row
share, and a zero point likewise. ExecuTorch takes the step from the largest of the 256 alone; a few steps are tried
here, since fp16 is coarse where steps are (1e-5 and less are subnormal), and a step of 1 makes zero points exact.
"""

import torch
from executorch.backends.cuda.coalesced_int4_tensor import CudaCoalescedInt4Tensor
from executorch.extension.llm.export.int4 import ExportableInt4Tensor
from torch import Tensor

BLOCK = 256  # weights that share a step
GROUPS = (32, 64, 128, 256)
"""What the kernels take; a coarser group is several of 256."""
STEPS = range(255, 223, -1)
"""Codes of the largest scale of a block that are tried."""
ROWS = 1024  # at a time


def exact_layout(name: str, weight: ExportableInt4Tensor) -> tuple[CudaCoalescedInt4Tensor, float]:
    """The weight [N, K], and the largest relative rounding of a scale.

    ``has_whole_zeros`` is what it wants. Raises ValueError for scales that the layout has no code for.
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
    """Scales [N, blocks, groups of a block]: codes uint8 [N, groups], steps fp16 [N, blocks], largest rounding."""
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
    """The largest relative rounding in each block [N, blocks]; a scale of 0 is held exactly."""
    held = codes * step.float().unsqueeze(-1)
    return ((held - scale).abs() / scale.clamp_min(1e-30)).amax(-1)


def has_whole_zeros(weight: ExportableInt4Tensor) -> bool:
    """Whether every zero point is one of the codes, which a step of 1 holds exactly."""
    zero = weight.zero_point
    return bool(((zero == zero.round()) & (zero >= 0) & (zero <= 255)).all())


def _check_range(name: str, scale: Tensor) -> None:
    least, most = scale.amin().item(), scale.amax().item()
    if least < 0 or most > 255 * torch.finfo(torch.float16).max:
        raise ValueError(
            f"{name} has scales of {least:g} to {most:g}, but CUDA's INT4 layout holds 0 to 1.6e7: the checkpoint is "
            "damaged, or another tool's"
        )
