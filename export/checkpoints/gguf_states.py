"""Undoes what llama.cpp's converter does to layers that keep a state: the gated delta rule (Qwen3.5), Mamba 2 (Granite
4, Nemotron-H), short convolutions (LFM2).

A layer of the gated delta rule has groups of value heads that share a key head. transformers stores the heads of a
group next to each other; llama.cpp stores the first head of every group, then the second of every group, and so on.
Rows are put back into transformers' order. The columns of ``out_proj`` are not, since a block of quantized weights
spans several heads: an input order (``eagle3.targets.input_order``) permutes its input instead.
"""

import math
import re
from collections.abc import Callable

import torch
from torch import Tensor

from eagle3.export.checkpoints.gguf_joined import Field, with_parts
from eagle3.targets.input_order import INPUT_ORDER
from eagle3.targets.loading import is_plain

_VECTORS = tuple(f".{mixer}.{part}" for mixer in ("mamba", "mixer") for part in ("A_log", "D", "norm.weight"))
_MIXER = re.compile(r"(model\.layers\.\d+\.linear_attn)\.(.+)")


def own_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a model's tensor that the file stores with ``shape``. llama.cpp drops the dimension 1 of a
    convolution's weight [C, 1, taps], adds one to the vectors of Mamba 2, and gives its norm a row for each group."""
    if name.endswith((".conv1d.weight", ".conv.conv.weight")):
        return shape[0], 1, *shape[1:]
    return (math.prod(shape),) if name.endswith(_VECTORS) else shape


def restored(name: str, value: Tensor, number: Field, tiled_heads: bool) -> Tensor:
    """Return a tensor of a layer with a state as transformers stores it.

    Args:
        name: the model's own name
        value: the tensor as the file stores it, dense or quantized in blocks
        number: looks up the metadata
        tiled_heads: the file's value heads are in llama.cpp's order
    """
    shape = own_shape(name, value.shape)
    value = value if shape == value.shape else value.reshape(shape)
    if name.endswith(".A_log"):
        value = value.neg().log()
    found = _MIXER.fullmatch(name)
    if found is None or not tiled_heads:
        return value
    part, (groups, width) = found[2], _groups(number)
    if part in ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight"):
        return by_rows(value, lambda rows: _by_group(rows, groups, 1))
    if part == "in_proj_z.weight":
        return by_rows(value, lambda rows: _by_group(rows, groups, width))
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        keys = 2 * groups[1] * number("ssm.state_size")  # the rows of queries and keys, which come first
        return by_rows(value, lambda rows: torch.cat((rows[:keys], _by_group(rows[keys:], groups, width))))
    return value


def input_order(name: str, number: Field) -> tuple[str, Tensor] | None:
    """Return the name and the input order, int64 [K], that go with the weight ``name`` of the model; None if its
    columns have transformers' order."""
    found = _MIXER.fullmatch(name)
    if found is None or found[2] != "out_proj.weight":
        return None
    groups, width = _groups(number)
    columns = torch.arange(groups[0] * groups[1] * width)
    order = columns.view(groups[1], groups[0], width).transpose(0, 1).flatten()
    return None if torch.equal(order, columns) else (f"{found[1]}.out_proj.{INPUT_ORDER}", order)


def by_rows(value: Tensor, rearranged: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``value`` with its rows rearranged. Blocks of quantized weights run along a row, so they stay whole."""
    return rearranged(value) if is_plain(value) else with_parts(value, lambda part: rearranged(getattr(value, part)))


def _groups(number: Field) -> tuple[tuple[int, int], int]:
    """Return how many value heads share a key head, the number of key heads, and the width of a value head."""
    keys, values = number("ssm.group_count"), number("ssm.time_step_rank")
    return (values // keys, keys), number("ssm.inner_size") // values


def _by_group(rows: Tensor, groups: tuple[int, int], width: int) -> Tensor:
    """Return the rows of all value heads, ``width`` each, with the heads of a group next to each other."""
    return rows.unflatten(0, (*groups, width)).transpose(0, 1).flatten(0, 2)
