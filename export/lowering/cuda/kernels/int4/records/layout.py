"""The layout of INT4 weights in records, which ``kernel.py`` and ``matmul.py`` read.

A record holds all that 32 outputs need of a block of 256 of K, 4,736 bytes: words [group 8][r 8][c 4][mid 4] of 8 codes
each, scales and zero points [group][output][2], steps [output][2]. Output 4 r + mid has word c of a group: the 16 bytes
that a lane loads are exactly what its registers hold as operands of the matrix instruction. A word's codes lie at bits
0, 16, 4, 20, 8, 24, 12, 28 for k = 0 to 7, so that x needs no shuffle.

Records take as many bytes as the parts of a weight that they are packed from, and ``unpacked`` returns these parts bit
for bit.
"""

import torch
from torch import Tensor

from eagle3.export.lowering.cuda.kernels.int4.tiles.kernel import BLOCK

OUTPUTS, GROUP = 32, 32
"""The number of outputs of a record, and of weights that share a scale: records exist for groups of 32 only."""
PAIR = 2 * OUTPUTS
"""Weights must have a multiple of this number of outputs, since a tile takes two records."""
PLACES = (0, 16, 4, 20, 8, 24, 12, 28)
"""The bits of a word at which its codes of k = 0 to 7 begin."""
WORDS, CODES, STEPS = 4096, 512, 128
"""The bytes of a record's words, of its scales and zero points, and of its steps."""
RECORD = WORDS + CODES + STEPS
AT_A_TIME = 4
"""The records along N that are packed at a time, few enough for a cache of the processor."""


def fits(n: int, k: int, group: int) -> bool:
    """Return True if a weight can be packed into records."""
    return n % PAIR == 0 and k % BLOCK == 0 and group == GROUP


def shape(n: int, k: int) -> tuple[int, int, int]:
    """Return the shape of the records of a weight [n, k]."""
    return n // OUTPUTS, k // BLOCK, RECORD


def records(
    qdata: Tensor, scale: Tensor, scale_step: Tensor, zero: Tensor, zero_step: Tensor, out: Tensor | None = None
) -> Tensor:
    """Pack the parts of a ``CudaCoalescedInt4Tensor``: codes uint8 [N, K / 2], scale and zero uint8 [N, K / 32], steps
    float16 [N, K / 256].

    Returns uint8 [N / 32, K / 256, 4736], written to ``out`` if that is given. Raises ValueError for a weight for which
    ``fits`` is False.
    """
    n, k = qdata.shape[0], 2 * qdata.shape[1]
    if not fits(n, k, k // scale.shape[1]):
        raise ValueError(
            f"{n} x {k} in groups of {k // scale.shape[1]}: records are of multiples of {PAIR} x {BLOCK} in "
            f"groups of {GROUP}"
        )
    out = torch.zeros(shape(n, k), dtype=torch.uint8, device=qdata.device) if out is None else out
    if qdata.is_meta:
        return out
    each = AT_A_TIME * OUTPUTS
    parts = zip(*(part.split(each) for part in (qdata, scale, scale_step, zero, zero_step)), strict=True)
    for made, part in zip(out.split(AT_A_TIME), parts, strict=True):
        _pack(made, *part)
    return out


def _pack(out: Tensor, qdata: Tensor, scale: Tensor, scale_step: Tensor, zero: Tensor, zero_step: Tensor) -> None:
    rows, blocks, _ = out.shape
    words = _with_codes_in_place(qdata.contiguous().view(torch.int32)).view(rows, 8, 4, blocks, 8, 4)
    _words_of(out).copy_(words.permute(0, 3, 4, 1, 5, 2))  # rows, block, group, r, c, mid
    for at, codes in enumerate((scale, zero)):
        _codes_of(out)[..., at].copy_(codes.view(rows, OUTPUTS, blocks, 8).permute(0, 2, 3, 1))
    for at, steps in enumerate((scale_step, zero_step)):
        _steps_of(out)[..., at].copy_(steps.view(rows, OUTPUTS, blocks).transpose(1, 2))


def _with_codes_in_place(words: Tensor) -> Tensor:
    """Move code i of each word, int32, from bit 4 i to bit ``PLACES[i]``: the order of eight nibbles 0 to 7 becomes 0,
    2, 4, 6, 1, 3, 5, 7, by two steps that exchange nibbles and bytes."""
    for distance, chosen in ((4, 0x00F000F0), (8, 0x0000FF00)):
        other = (words ^ words >> distance).bitwise_and_(chosen)
        words = words ^ other
        words.bitwise_xor_(other.bitwise_left_shift_(distance))
    return words


def _words_of(packed: Tensor) -> Tensor:
    """View the words of records as int32 [N / 32, K / 256, group 8, r 8, c 4, mid 4]."""
    return packed.view(torch.int32)[..., : WORDS // 4].unflatten(-1, (8, 8, 4, 4))


def _codes_of(packed: Tensor) -> Tensor:
    """View the scales and zero points of records as uint8 [N / 32, K / 256, group 8, 32, 2]."""
    return packed[..., WORDS : WORDS + CODES].unflatten(-1, (8, OUTPUTS, 2))


def _steps_of(packed: Tensor) -> Tensor:
    """View the steps of records as float16 [N / 32, K / 256, 32, 2]."""
    return packed.view(torch.float16)[..., (WORDS + CODES) // 2 :].unflatten(-1, (OUTPUTS, 2))


def unpacked(packed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Invert ``records``."""
    n = packed.shape[0] * OUTPUTS
    words = _words_of(packed).permute(0, 3, 5, 1, 2, 4)  # rows, r, mid, block, group, c
    low, high = (
        torch.stack([words >> place & 0xF for place in PLACES[odd::2]], -1).reshape(n, -1).to(torch.uint8)
        for odd in (0, 1)
    )
    scale, zero = _codes_of(packed).permute(0, 3, 1, 2, 4).reshape(n, -1, 2).unbind(2)
    scale_step, zero_step = _steps_of(packed).transpose(1, 2).reshape(n, -1, 2).unbind(2)
    return low | high << 4, *(part.contiguous() for part in (scale, scale_step, zero, zero_step))


def dequantized(packed: Tensor) -> Tensor:
    """Return the weight that the records hold, float32 [N, K]."""
    qdata, scale, scale_step, zero, zero_step = unpacked(packed)
    q = torch.stack([qdata & 0xF, qdata >> 4], dim=-1).flatten(1).float()
    s, z = (
        (codes.float() * steps.float().repeat_interleave(BLOCK // GROUP, 1)).repeat_interleave(GROUP, 1)
        for codes, steps in ((scale, scale_step), (zero, zero_step))
    )
    return (q - z) * s
