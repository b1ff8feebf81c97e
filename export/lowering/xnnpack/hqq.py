"""Runs torchao's search for the scales of symmetric weights (HQQ without zero points) in less than half of the time.

Codes and scales are the same, bit for bit. The search alternates between codes ``Q = round(W / s)`` and the scales ``s
= <W, Q> / <Q, Q>`` that fit them best, at most 20 times. torchao's ``_choose_qparams_and_quantize_scale_only_hqq``
computes all groups in each iteration, with a new tensor for each operation. A group whose scale did not change will not
change again, so it is left out here, and the steps write into two small tensors that stay cached.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from eagle3.export.patching.patches import replaced

SEARCH = (
    "torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor."
    "_choose_qparams_and_quantize_scale_only_hqq"
)
CACHED = 1 << 18
"""The number of float32 weights that are computed at once: two such tensors stay in the caches of a core and its
neighbours. With a quarter of that number the search took a quarter more time, because of PyTorch's overhead per
operation."""
STILL_CHANGING = 0.8
"""If a smaller share of the groups still changes, they are copied and the search goes on without the others. Copying a
larger share costs more than it saves."""
ITERATIONS = 20
TOLERANCE = 1e-5
LEAST_SCALE = torch.finfo(torch.float32).eps


@torch.no_grad()
def search_scales(weight: Tensor, block_size: Sequence[int], qmin: int, qmax: int) -> tuple[Tensor, Tensor]:
    """Return codes and scales of ``weight`` [N, K] in groups of ``block_size`` [1, G].

    Returns:
        codes [N, K] of int8 (torchao's function returns int32, which its caller converts), and scales [N, K / G] in the
        dtype of ``weight``
    """
    (rows, width), group = weight.shape, block_size[1]
    groups = weight.float().contiguous().view(-1, group)
    at_once = max(1, CACHED // group)
    buffers = torch.empty(2, min(at_once, len(groups)), group)
    largest = max(abs(qmin), abs(qmax))
    scales = (groups.abs().amax(1) / largest).clamp_min_(LEAST_SCALE)

    active, changing, before = groups, None, scales.clone()
    for _ in range(ITERATIONS):
        after = _fitted(active, before, qmin, qmax, at_once, buffers)
        if changing is None:
            scales = after
        else:
            scales[changing] = after
        if (after - before).abs_().div_(before.clamp_min(LEAST_SCALE)).max() < TOLERANCE:
            break
        changed = (after != before).nonzero()[:, 0]
        if len(changed) < STILL_CHANGING * len(active):
            active, after = active[changed], after[changed]
            changing = changed if changing is None else changing[changed]
        before = after

    codes = torch.empty(groups.shape, dtype=torch.int8)
    for start in range(0, len(groups), at_once):
        part = slice(start, start + at_once)
        codes[part] = _codes(groups[part], scales[part], qmin, qmax, buffers[0])
    return codes.view(rows, width), scales.view(rows, -1).to(weight.dtype)


def _fitted(groups: Tensor, scales: Tensor, qmin: int, qmax: int, at_once: int, buffers: Tensor) -> Tensor:
    """Compute the codes for ``scales``, and return the scales that fit these codes best. A group whose codes are all 0
    keeps its scale."""
    weighted, squared = torch.empty_like(scales), torch.empty_like(scales)
    for start in range(0, len(groups), at_once):
        part = slice(start, start + at_once)
        codes = _codes(groups[part], scales[part], qmin, qmax, buffers[0])
        torch.sum(torch.mul(groups[part], codes, out=buffers[1, : len(codes)]), 1, out=weighted[part])
        torch.sum(codes.mul_(codes), 1, out=squared[part])
    return torch.where(squared > 0, weighted.div_(squared), scales).clamp_min_(LEAST_SCALE)


def _codes(groups: Tensor, scales: Tensor, qmin: int, qmax: int, buffer: Tensor) -> Tensor:
    """Write the codes of ``groups`` into ``buffer``, in float32, and return them."""
    return torch.div(groups, scales[:, None], out=buffer[: len(groups)]).round_().clamp_(qmin, qmax)


@contextmanager
def faster_search() -> Iterator[None]:
    """Make torchao search scales with ``search_scales``."""
    with replaced(SEARCH, search_scales):
        yield
