"""Records in one Triton launch what recurrent layers have committed (``RecurrentPositions.advance``).

A kernel that Inductor made of it would load the committed position and store another one without a barrier. A thread
that was late would take the new position for the old one, and the call for one that could not be computed.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from eagle3.targets.spec import ROLLBACK_ROWS


@triton.jit
def _advance_kernel(INPUT_POS, COMMITTED, SAVED, FROM_SAVED, VALID, rows, CHUNK: tl.constexpr, ROLLBACK: tl.constexpr):
    # FROM_SAVED is read, and SAVED written, only with CHUNK.
    first = tl.load(INPUT_POS)
    committed = tl.load(COMMITTED)
    valid = (first == 0) | ((first >= committed) & (first <= committed + ROLLBACK))
    end = first
    if CHUNK:
        valid = valid | (tl.load(FROM_SAVED) != 0)
        end = tl.load(INPUT_POS + rows - 1) + 1 - ROLLBACK
        saved = tl.load(SAVED)
    tl.debug_barrier()
    tl.store(COMMITTED, tl.where(valid, end, committed))
    if CHUNK:
        tl.store(SAVED, tl.where(valid, end, saved))
    tl.store(VALID, valid.to(tl.int64))


def launch(
    kernel: Any, input_pos: Tensor, committed: Tensor, saved: Tensor, from_saved: Tensor | None, valid: Tensor
) -> None:
    """Run ``_advance_kernel``; ``committed``, ``saved`` and ``valid`` (int64 [1]) are written."""
    given = input_pos, committed, saved, valid if from_saved is None else from_saved, valid, input_pos.shape[0]
    kernel[(1,)](*given, CHUNK=from_saved is not None, ROLLBACK=ROLLBACK_ROWS, num_warps=1)


@triton_op("eagle3::advance", mutates_args={})
def advance(input_pos: Tensor, committed: Tensor, saved: Tensor, from_saved: Tensor | None) -> list[Tensor]:
    """Return whether the first position of a call could be computed, and the new positions. A lowered program writes
    the positions over the old ones.

    Args:
        input_pos: int64 [T], consecutive
        committed, saved: int64 [1]
        from_saved: bool [1] of a chunk; None for rows that can all be rejected, which save nothing

    Returns:
        int64 [1], 1 or 0; ``committed``, ``saved``: int64 [1] each
    """
    committed, saved, valid = committed.clone(), saved.clone(), torch.empty_like(committed)
    launch(wrap_triton(_advance_kernel), input_pos, committed, saved, from_saved, valid)
    return [valid, committed, saved]


@advance.register_kernel("cpu")
def advance_reference(input_pos: Tensor, committed: Tensor, saved: Tensor, from_saved: Tensor | None) -> list[Tensor]:
    """``advance`` in plain PyTorch."""
    first = input_pos[:1]
    valid = (first == 0) | ((first >= committed) & (first <= committed + ROLLBACK_ROWS))
    if from_saved is None:
        return [valid.long(), torch.where(valid, first, committed), saved.clone()]
    valid, end = valid | from_saved, input_pos[-1:] + (1 - ROLLBACK_ROWS)
    return [valid.long(), torch.where(valid, end, committed), torch.where(valid, end, saved)]
