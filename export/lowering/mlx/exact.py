"""Compares the methods of an artifact's program with the eager module, both computed in float32.

In bfloat16 two right computations differ by rounding, which hides small faults, such as the scale of one group. MLX's
CPU device even adds the products of quantized weights in bfloat16: a 4-bit matmul of 1,024 inputs was off by 3.6%, one
of bfloat16 weights by 0.4%. So both sides read each bfloat16 value as float32. Their outputs then differ by less than
1e-4 of a standard deviation.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torchao.quantization import IntxUnpackedToInt8Tensor

from eagle3.export.lowering.mlx.program import MlxMethod, as_array
from eagle3.export.speculator.speculator import Eagle3Speculator
from eagle3.runner.artifact.near_ties import NEAR_TIE
from eagle3.runner.contract import DRAFT_DECODE, TARGET_ROWS, Metadata
from eagle3.targets.recurrent import RecurrentPositions, RecurrentState, Ring
from eagle3.targets.spec import ROLLBACK_ROWS

STATES = Ring, RecurrentState, RecurrentPositions
FAR = NEAR_TIE
"""The difference that is a fault, in standard deviations of an output's values."""


class InFloat32(TorchFunctionMode):
    """A mode in which bfloat16 is computed as float32: tensors are converted where a function reads them. What is
    written into a bfloat16 tensor, such as a cache, is rounded."""

    def __torch_function__(
        self, func: Callable[..., Any], _types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        name = getattr(func, "__name__", "")
        if name == "__set__" or name.startswith("__get__"):
            return func(*args, **(kwargs or {}))
        in_place = name.endswith("_") and not name.endswith("__") and args and isinstance(args[0], Tensor)
        given = (args[1:] if in_place else args), kwargs or {}
        read, named = tree_map(_in_float32, given)
        if not in_place:
            return func(*read, **named)
        read, named = tree_map(lambda value: _rounded(value, args[0].dtype), (read, named))
        return func(args[0], *read, **named)


def _in_float32(value: object) -> object:
    if isinstance(value, IntxUnpackedToInt8Tensor):
        return value.to(dtype=torch.float32).dequantize()
    if isinstance(value, Tensor) and value.dtype == torch.bfloat16:
        return value.float()
    return torch.float32 if value is torch.bfloat16 else value


def _rounded(value: object, dtype: torch.dtype) -> object:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def calls(metadata: Metadata) -> Iterator[tuple[int, int]]:
    """Yield the first position and the rows of calls that together reach each form of a method: chunks, windows and
    single rows, positions written again, the end of a ring, and the last slots of the context."""
    longest, window, slots = metadata.max_prefill, metadata.window, metadata.max_seq_len
    chunk = min(longest, 40)
    yield 0, chunk
    yield chunk, min(window, longest)
    yield chunk + 1, min(window, longest)
    yield chunk + 2, 1
    for window in filter(None, (metadata.sliding_window, metadata.draft_sliding_window)):
        ring = 2 * window
        yield max(0, min(ring - chunk // 2, slots - chunk)), chunk
    yield max(0, slots - chunk), min(chunk, slots)


@torch.no_grad()
def compare(methods: dict[str, MlxMethod], speculator: Eagle3Speculator, metadata: Metadata) -> float:
    """Return the largest difference of any output, in standard deviations. Raises ValueError if it is ``FAR`` or more,
    and if the last call in bfloat16 returns NaN or an infinity. The caches of ``methods`` are empty afterwards."""
    dice, worst, draft = torch.Generator().manual_seed(0), 0.0, speculator.draft
    of_draft = draft.ids_in_target()
    vocabularies = {
        TARGET_ROWS: torch.arange(metadata.vocab_size),
        DRAFT_DECODE: torch.arange(metadata.draft_vocab_size) if of_draft is None else of_draft,
    }
    known = vocabularies if metadata.has_logits else {}
    for method in methods.values():
        method.clear(exact=True)
    checked, draft.checks_positions = draft.checks_positions, False  # the calls leave gaps
    try:
        with wide_caches(speculator):
            for start, rows in calls(metadata):
                tokens = torch.randint(metadata.vocab_size, (1, rows), generator=dice)
                positions = torch.arange(start, start + rows)
                _continue_at(start, methods[TARGET_ROWS], speculator)
                with InFloat32():
                    wanted = speculator.target_rows(tokens, positions)
                found = methods[TARGET_ROWS](tokens, positions)
                worst = max(worst, _difference(TARGET_ROWS, start, found, wanted, known.get(TARGET_ROWS)))
                if DRAFT_DECODE not in methods:
                    continue
                last = rows if metadata.has_draft_cache else 1
                given = tokens[:, -last:], wanted[1][:, -last:], positions[-last:]
                for _ in range(2 if metadata.proposals == 1 else 1):  # the second one is a chain's next step
                    with InFloat32():
                        wanted = speculator.draft_decode(*given)
                    found = methods[DRAFT_DECODE](*given)
                    worst = max(worst, _difference(DRAFT_DECODE, start, found, wanted, known.get(DRAFT_DECODE)))
                    following = given[2][-1:] + metadata.has_draft_cache
                    if following >= metadata.max_seq_len:
                        break
                    given = wanted[0], wanted[1], following
        methods[TARGET_ROWS].clear()
        if not all(value.isfinite().all() for value in methods[TARGET_ROWS](tokens, torch.arange(rows))):
            raise ValueError(f"{TARGET_ROWS} returns NaN or an infinity in bfloat16")
    finally:
        draft.checks_positions = checked
        for method in methods.values():
            method.clear()
    return worst


def _continue_at(start: int, method: MlxMethod, speculator: Eagle3Speculator) -> None:
    """Let the states of recurrent layers, whatever they hold, be valid a few positions before ``start`` on both sides,
    if a call cannot begin there."""
    recurrent = speculator.target.recurrent
    if recurrent is None:
        return
    committed = recurrent.get_buffer("committed")
    if not 0 <= start - int(committed) <= ROLLBACK_ROWS:
        committed.fill_(start - 3)
        method.caches[method.slot("recurrent.committed")] = as_array(committed)


@contextmanager
def wide_caches(model: nn.Module) -> Iterator[None]:
    """Give ``model`` empty states and caches while the context lasts, those of bfloat16 in float32."""
    kept = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("cache") or isinstance(module, STATES)
    ]
    for module, name, buffer in kept:
        setattr(module, name, torch.zeros_like(buffer, dtype=torch.float32 if buffer.is_floating_point() else None))
    try:
        yield
    finally:
        for module, name, buffer in kept:
            setattr(module, name, buffer)


def _difference(name: str, start: int, found: list[Tensor], wanted: tuple[Tensor, ...], known: Tensor | None) -> float:
    """Return the largest difference of a call's outputs. Ids may differ where the logits are as good as equal;
    ``known`` [V] has the id of each logit, None if there are no logits."""
    worst = 0.0
    for value, other in zip(found, wanted, strict=True):
        if value.shape != other.shape:
            raise ValueError(f"{name} returns {list(value.shape)}, and the eager module {list(other.shape)}")
        if other.is_floating_point():
            worst = max(worst, float(((value.float() - other).abs().max() / other.std()).nan_to_num(nan=torch.inf)))
    if worst >= FAR:
        raise ValueError(
            f"{name} at position {start} differs from the eager module by {worst:.2g} of its outputs' spread: the "
            "lowering changed what the model computes"
        )
    if not torch.equal(found[0], wanted[0]) and (known is None or not _tied(found[0], wanted[-1], known)):
        raise ValueError(f"{name} at position {start} gives other ids than the eager module: the lowering changed them")
    return worst


def _tied(ids: Tensor, logits: Tensor, known: Tensor) -> bool:
    """Return True if the logits of ``ids`` [1,R] are no further than ``FAR`` below the best of ``logits`` [1,R,V]."""
    said = logits.where(ids.unsqueeze(-1) == known, -torch.inf).amax(-1)
    return bool((logits.amax(-1) - said <= FAR * logits.std()).all())
