"""Compares a checkpoint's tensors with its configuration: names, shapes, dtypes, from headers alone.

A tensor that no module reads is refused, since a model without it computes something else. ``unread`` lists the
exceptions.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.export.checkpoints.gguf_file import BLOCKS
from eagle3.export.checkpoints.source import Source, TensorHeader
from eagle3.export.draft.common.description import DraftDescription
from eagle3.export.planning.unread import is_read, unread
from eagle3.targets.input_order import INPUT_ORDER
from eagle3.targets.spec import Skeleton

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

QUANTIZED = ("Int4Tensor", "ExportableInt4Tensor", "IntxUnpackedToInt8Tensor")
"""The tensor classes of torchao and ExecuTorch that every backend takes, as they are or dequantized."""

FLOATS = ("F32", "F16", "BF16", "F64")
INTEGERS = ("I64", "I32")

_CAUSES = {
    r"lora_|\.adapter": (
        "belongs to an adapter that is not merged: merge it into the weights first (peft's merge_and_unload)"
    ),
    r"qweight|qzeros|g_idx|weight_packed|weight_scale|input_scale|weight_shape|\.scales$|absmax": (
        "belongs to weights that another tool quantized: name the original checkpoint"
    ),
    r"\.bias$": "is a bias that config.json does not imply, or that this target has no place for",
}


def check_target(
    source: Source,
    headers: dict[str, TensorHeader],
    skeleton: Skeleton,
    config: "PreTrainedConfig",
    described: Path | None = None,
) -> dict[str, TensorHeader]:
    """Check that every tensor of the target has the shape that its configuration implies. Returns the headers of the
    tensors that are read, by name. A bias of zeros that the model has no place for is ignored: AutoGPTQ writes one for
    each linear that it packs.

    ``config`` is transformers' text configuration, and ``described`` is the folder of ``config.json``. Raises
    ValueError for the first tensor that does not fit.
    """
    checkpoint, given = source.path, dict[str, TensorHeader]()
    names = {name: skeleton.key_map(name) for name in headers if is_read(name)}
    orders = {name for name in names if headers[name].dtype == INPUT_ORDER}
    expected = skeleton.expected(own for name, own in names.items() if own is not None and name not in orders)
    parts = skeleton.conversion.parts if skeleton.conversion else {}
    without = {name for name, own in names.items() if name not in orders and own not in expected}
    spare = unread(without, headers, skeleton.model, config, described or checkpoint) if without else set()
    spare |= {name for name in without - spare if _adds_nothing(source, name, headers)}
    names = {name: own for name, own in names.items() if name not in spare}
    for name, own in names.items():
        if name in orders:
            continue
        header = headers[name]
        if own not in expected:
            raise ValueError(f"{checkpoint} has {name}, which {_cause(name)}")
        if header.dtype not in (*FLOATS, *((*BLOCKS, *QUANTIZED) if own not in parts else ())):
            raise ValueError(f"{checkpoint}: {name} is {header.dtype}, quantized: name the original checkpoint")
        if header.shape != expected[own]:
            raise ValueError(
                f"{checkpoint}: {own} is {list(header.shape)}, but config.json implies {list(expected[own])}"
            )
        if own in given:
            raise ValueError(f"{checkpoint} has {own} twice, once as {name}: which one is meant?")
        given[own] = header
    tied = {to for source, (to, _) in skeleton.tie_map.items() if source in given}
    for name in expected:
        if name not in given and name not in tied:
            raise ValueError(f"{checkpoint} lacks {name}, which its config.json implies: is a shard missing?")
    return {name: headers[name] for name in names}


def _adds_nothing(source: Source, name: str, headers: dict[str, TensorHeader]) -> bool:
    """Return True for the bias of a packed linear that is all zeros."""
    linear, _, part = name.rpartition(".")
    weight = headers.get(f"{linear}.weight")
    return part == "bias" and weight is not None and weight.quantized and not source.tensor(name).any()


def _cause(name: str) -> str:
    for pattern, cause in _CAUSES.items():
        if re.search(pattern, name):
            return cause
    return "a model of its config.json has no place for"


def check_draft(draft: DraftDescription) -> None:
    """Check that every tensor of the head has the shape that its configuration implies. Raises ValueError for the first
    tensor that does not fit."""
    from eagle3.export.draft.loading import unfilled

    expected = unfilled(draft).state_dict()
    for name, value in expected.items():
        header = draft.headers.get(name)
        if header is None:
            raise ValueError(f"{draft.folder} lacks {name}, which its config.json implies")
        if header.shape != tuple(value.shape):
            raise ValueError(
                f"{draft.folder}: {name} is {list(header.shape)}, but config.json implies {list(value.shape)}"
            )
        fitting, kind = (FLOATS, "floating-point") if value.dtype.is_floating_point else (INTEGERS, "integer")
        if header.dtype not in fitting:
            raise ValueError(
                f"{draft.folder}: {name} is {header.dtype}, but must be {kind} ({', '.join(fitting)}): name the "
                "original checkpoint"
            )
    unread = sorted(set(draft.headers) - set(expected))
    if unread:
        raise ValueError(f"{draft.folder} has {unread[0]}, which a {draft.kind} with its config.json has no place for")
