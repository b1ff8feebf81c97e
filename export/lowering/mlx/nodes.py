"""Computes the nodes of a delegate's program by ``mlx.core``, each as ExecuTorch's runtime for MLX does.

A node is a dictionary with the fields of its table in ``schema.fbs``. A field that refers to a slot has the slot's
number as ``idx``.
"""

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np

Node = dict[str, Any]
DTYPES = {
    0: mx.uint8, 1: mx.int8, 2: mx.int16, 3: mx.int32, 4: mx.int64, 5: mx.float16, 6: mx.float32, 11: mx.bool_,
    15: mx.bfloat16, 27: mx.uint16, 28: mx.uint32, 29: mx.uint64,
}  # fmt: skip
"""MLX's dtypes by ExecuTorch's numbers."""
INT32 = range(-(2**31), 2**31)


class Slots:
    """The slots of one call: ``tensors`` and integer ``values``, by number. With ``exact``, bfloat16 is computed as
    float32: a tensor is converted where a node reads it, and keeps its dtype where it is stored."""

    def __init__(self, tensors: dict[int, mx.array], exact: bool = False):
        self.tensors, self.exact = tensors, exact
        self.values: dict[int, int] = {}

    def run(self, chain: Iterable[Node]) -> None:
        """Compute ``chain``. Raises ValueError for a node that MLX refuses, or of a type that is not known here."""
        for each in chain:
            name, node = each["op_type"], each["op"]
            try:
                if name in NODES:
                    self.put(node["out"], NODES[name](self, node))
                elif name in OTHERS:
                    OTHERS[name](self, node)
                elif name != "NoopNode":
                    raise ValueError("the check does not know this node: export with --no-check")
            except (ValueError, RuntimeError, IndexError, KeyError) as error:
                raise ValueError(f"{name} of the program for MLX fails: {' '.join(str(error).split())}") from error

    def stored(self, slot: Node) -> mx.array:
        return self.tensors[slot["idx"]]

    def read(self, slot: Node) -> mx.array:
        value = self.stored(slot)
        return value.astype(mx.float32) if self.exact and value.dtype == mx.bfloat16 else value

    def read_if(self, node: Node, field: str) -> mx.array | None:
        return self.read(node[field]) if node.get(field) is not None else None

    def put(self, slot: Node, value: mx.array) -> None:
        self.tensors[slot["idx"]] = value

    def dtype(self, number: int) -> mx.Dtype:
        found = DTYPES[number]
        return mx.float32 if self.exact and found == mx.bfloat16 else found

    def number(self, given: Node) -> int:
        """Return a number that a node has itself or that is a value of the program. The runtime limits literals to
        int32."""
        if given["is_vid"]:
            return self.values[given["vid"]["idx"]]
        return max(INT32.start, min(INT32.stop - 1, given["literal"]))

    def numbers(self, given: Iterable[Node]) -> list[int]:
        return [self.number(each) for each in given]


Compute = Callable[[Slots, Node], mx.array]


def _of_one(function: Callable[[mx.array], mx.array]) -> Compute:
    return lambda s, n: function(s.read(n["x"]))


def _of_two(function: Callable[[mx.array, mx.array], mx.array]) -> Compute:
    return lambda s, n: function(s.read(n["a"]), s.read(n["b"]))


def _over_axes(function: Callable[..., mx.array]) -> Compute:
    return lambda s, n: function(s.read(n["x"]), axis=n.get("axes") or None, keepdims=n["keepdims"])


def _of_numbers(function: Callable[[int, int], int]) -> Callable[[Slots, Node], None]:
    def compute(s: Slots, n: Node) -> None:
        result = function(s.number(n["a"]), s.number(n["b"]))
        if result not in INT32:
            raise ValueError(f"{result} is no int32, and the runtime for MLX stops there")
        s.values[n["out"]["idx"]] = result

    return compute


def _take(s: Slots, n: Node) -> mx.array:
    x, index = s.read(n["x"]), n["index"]
    if index["kind"] == 2:
        return mx.take(x, s.stored(index["tid"]), axis=n["axis"])
    at = index["literal"] if index["kind"] == 0 else s.values[index["vid"]["idx"]]
    return mx.take(x, mx.array(at % x.shape[n["axis"]]), axis=n["axis"])


def _slice(s: Slots, n: Node) -> mx.array:
    x, axis = s.read(n["x"]), s.number(n["axis"])
    place = [slice(None)] * x.ndim
    place[axis % x.ndim] = slice(s.number(n["start"]), s.number(n["stop"]), n["step"])
    return x[tuple(place)]


def _index_copy(s: Slots, n: Node) -> mx.array:
    """Write runs of consecutive indices as slices. Raises ValueError for indices that the runtime refuses."""
    kept, indices = s.stored(n["dst"]), s.stored(n["indices"])
    update, axis = s.read(n["update"]).astype(kept.dtype), n["axis"] % kept.ndim
    if indices.dtype != mx.int64 or indices.ndim != 1:
        raise ValueError(f"index_copy has indices {indices.dtype} {indices.shape}, and the runtime takes int64 [T]")
    found = [int(index) for index in np.array(indices)]
    if min(found) < 0 or max(found) >= kept.shape[axis]:
        raise ValueError(f"index_copy writes slots {min(found)} to {max(found)} of {kept.shape[axis]}")
    if update.shape[axis] != len(found):
        raise ValueError(f"index_copy writes {update.shape[axis]} rows at {len(found)} slots")
    ends = [place for place in range(1, len(found)) if found[place] != found[place - 1] + 1] + [len(found)]
    for begin, end in zip([0, *ends], ends, strict=False):
        rows = [slice(None)] * kept.ndim
        rows[axis] = slice(begin, end)
        kept = mx.slice_update(kept, update[tuple(rows)], mx.array([found[begin]]), [axis])
    return kept


def _slice_update(s: Slots, n: Node) -> mx.array:
    kept, axis = s.stored(n["dst"]), s.number(n["axis"])
    length = kept.shape[axis]
    start, stop = (max(0, min(length, at + length if at < 0 else at)) for at in s.numbers((n["start"], n["stop"])))
    if start >= stop:
        return kept
    update = s.read(n["update"]).astype(kept.dtype)
    if n["step"] == 1:
        return mx.slice_update(kept, update, mx.array([start]), [axis])
    place, kept = [slice(None)] * kept.ndim, mx.array(kept)
    place[axis] = slice(start, stop, n["step"])
    kept[tuple(place)] = update
    return kept


def _sdpa(s: Slots, n: Node) -> mx.array:
    query, mask = s.read(n["q"]), s.read_if(n, "mask")
    if mask is not None and mask.dtype not in (mx.bool_, query.dtype):
        mask = mask.astype(query.dtype)
    return mx.fast.scaled_dot_product_attention(
        query, s.read(n["k"]), s.read(n["v"]), scale=n["scale"], mask="causal" if n["causal"] else mask
    )


def _gelu(s: Slots, n: Node) -> mx.array:
    x = s.read(n["x"])
    if n["approximate"] == "tanh":
        return 0.5 * (x * (1 + mx.tanh(0.7978845608 * (x + 0.044715 * (x * (x * x))))))
    return 0.5 * (x * (1 + mx.erf(0.7071067812 * x)))


def _addmm(s: Slots, n: Node) -> mx.array:
    left, right, bias = s.read(n["mat1"]), s.read(n["mat2"]), s.read_if(n, "bias")
    return left @ right if bias is None else mx.addmm(bias, left, right, alpha=n["alpha"], beta=n["beta"])


def _arange(s: Slots, n: Node) -> mx.array:
    kind = n.get("scalar_type")
    start, stop, step = s.numbers((n["start"], n["stop"], n["step"]))
    return mx.arange(start, stop, step, dtype=mx.int32 if kind is None else s.dtype(kind))


def _squeeze(s: Slots, n: Node) -> mx.array:
    x = s.read(n["x"])
    dims = [dim for dim in n.get("dims") or range(x.ndim) if x.shape[dim] == 1]
    return mx.squeeze(x, dims) if dims else x


def _broadcast(s: Slots, n: Node) -> mx.array:
    x, shape = s.read(n["x"]), s.numbers(n["shape"])
    ahead = len(shape) - x.ndim
    return mx.broadcast_to(x, [x.shape[place - ahead] if size == -1 else size for place, size in enumerate(shape)])


def _filled(s: Slots, n: Node, shape: Iterable[int], dtype: mx.Dtype) -> mx.array:
    value = s.values[n["v"]["vid"]["idx"]] if n["v"]["is_vid"] else n["v"]["literal"]
    return mx.full(list(shape), mx.array(value).astype(dtype))  # full ignores a dtype of integers


def _full_like(s: Slots, n: Node) -> mx.array:
    x, kind = s.read(n["x"]), n.get("scalar_type")
    return _filled(s, n, x.shape, x.dtype if kind is None else s.dtype(kind))


def _quantization(n: Node) -> dict[str, Any]:
    return {"group_size": n["group_size"], "bits": n["bits"], "mode": n["mode"]}


def _quantized_matmul(s: Slots, n: Node) -> mx.array:
    weight = s.stored(n["w"]), s.read(n["scales"]), s.read_if(n, "biases")
    return mx.quantized_matmul(s.read(n["x"]), *weight, transpose=n["transpose"], **_quantization(n))


def _dequantize(s: Slots, n: Node) -> mx.array:
    found = mx.dequantize(s.stored(n["w"]), s.read(n["scales"]), s.read_if(n, "biases"), **_quantization(n))
    return found if n.get("dtype") is None else found.astype(s.dtype(n["dtype"]))


def _pad(s: Slots, n: Node) -> mx.array:
    widths = s.numbers(n["pad_width"])
    pairs = list(zip(widths[::2], widths[1::2], strict=True))
    return mx.pad(s.read(n["x"]), pairs, mode=n["mode"], constant_values=n["constant_value"])


def _flip(s: Slots, n: Node) -> mx.array:
    x, place = s.read(n["x"]), {axis % s.read(n["x"]).ndim: slice(None, None, -1) for axis in n["axes"]}
    return x[tuple(place.get(axis, slice(None)) for axis in range(x.ndim))]


def _split(s: Slots, n: Node) -> None:
    x, sizes = s.read(n["x"]), s.numbers(n["sizes"])
    length = x.shape[n["axis"]]
    ends = list(range(sizes[0], length, sizes[0])) if len(sizes) == 1 else list(accumulate(sizes))[:-1]
    for slot, part in zip(n["outs"], mx.split(x, ends, axis=n["axis"]), strict=True):
        s.put(slot, part)


def _size(s: Slots, n: Node) -> None:
    s.values[n["out"]["idx"]] = s.stored(n["a"]).shape[n["dim"]]


def _item(s: Slots, n: Node) -> None:
    value = s.stored(n["x"]).item()
    assert isinstance(value, int), "an index is a whole number"
    s.values[n["out"]["idx"]] = value


def _named(make: Callable[[Callable[..., Any]], Compute], **functions: Callable[..., Any]) -> dict[str, Compute]:
    return {f"{name}Node": make(function) for name, function in functions.items()}


NODES: dict[str, Compute] = {
    **_named(
        _of_one, Abs=mx.abs, BitwiseInvert=mx.bitwise_invert, Ceil=mx.ceil, Contiguous=mx.contiguous, Cos=mx.cos,
        Erf=mx.erf, Exp=mx.exp, Expm1=mx.expm1, Floor=mx.floor, IdCopy=lambda x: x, Log=mx.log, Log1p=mx.log1p,
        LogicalNot=mx.logical_not, Neg=mx.negative, Reciprocal=mx.reciprocal, Round=mx.round, Rsqrt=mx.rsqrt,
        Sigmoid=mx.sigmoid, Sign=mx.sign, Silu=lambda x: x * mx.sigmoid(x), Sin=mx.sin, Sqrt=mx.sqrt, Square=mx.square,
        Tanh=mx.tanh,
    ),
    **_named(
        _of_two, Add=mx.add, BitwiseAnd=mx.bitwise_and, BitwiseOr=mx.bitwise_or, Divide=mx.divide, Equal=mx.equal,
        FloorDivide=mx.floor_divide, Greater=mx.greater, GreaterEqual=mx.greater_equal, Less=mx.less,
        LessEqual=mx.less_equal, LogAddExp=mx.logaddexp, LogicalAnd=mx.logical_and, LogicalOr=mx.logical_or,
        Maximum=mx.maximum, Minimum=mx.minimum, Multiply=mx.multiply, NotEqual=mx.not_equal, Power=mx.power,
        Remainder=mx.remainder, Subtract=mx.subtract,
    ),
    **_named(_over_axes, All=mx.all, Any=mx.any, Max=mx.max, Mean=mx.mean, Min=mx.min, Sum=mx.sum),
    "AddmmNode": _addmm,
    "ARangeNode": _arange,
    "ArgmaxNode": lambda s, n: mx.argmax(s.read(n["x"]), axis=n["axis"], keepdims=n["keepdims"]),
    "ArgPartitionNode": lambda s, n: mx.argpartition(s.read(n["x"]), s.number(n["kth"]), axis=n["axis"]),
    "ArgsortNode": lambda s, n: mx.argsort(s.read(n["x"]), axis=n["axis"]),
    "AsTypeNode": lambda s, n: s.read(n["x"]).astype(s.dtype(n["scalar_type"])),
    "BroadcastToNode": _broadcast,
    "ClipNode": lambda s, n: mx.clip(s.read(n["x"]), s.read_if(n, "a_min"), s.read_if(n, "a_max")),
    "ConcatenateNode": lambda s, n: mx.concatenate([s.read(each) for each in n["tensors"]], axis=n["axis"]),
    "CumsumNode": lambda s, n: mx.cumsum(s.read(n["x"]), n["axis"], reverse=n["reverse"], inclusive=n["inclusive"]),
    "DequantizeNode": _dequantize,
    "ExpandDimsNode": lambda s, n: mx.expand_dims(s.read(n["x"]), n["axis"]),
    "FlipNode": _flip,
    "FullNode": lambda s, n: _filled(s, n, s.numbers(n["shape"]), s.dtype(n["scalar_type"])),
    "FullLikeNode": _full_like,
    "GeluNode": _gelu,
    "IndexCopyNode": _index_copy,
    "LayerNormNode": lambda s, n: mx.fast.layer_norm(
        s.read(n["x"]), s.read_if(n, "weight"), s.read_if(n, "bias"), n["eps"]
    ),
    "PadNode": _pad,
    "PartitionNode": lambda s, n: mx.partition(s.read(n["x"]), s.number(n["kth"]), axis=n["axis"]),
    "QuantizedMatmulNode": _quantized_matmul,
    "RepeatNode": lambda s, n: mx.repeat(s.read(n["x"]), s.number(n["repeats"]), axis=n["axis"]),
    "ReshapeNode": lambda s, n: mx.reshape(s.read(n["x"]), s.numbers(n["shape"])),
    "RMSNormNode": lambda s, n: mx.fast.rms_norm(s.read(n["x"]), s.read_if(n, "weight"), n["eps"]),
    "SdpaNode": _sdpa,
    "SliceNode": _slice,
    "SliceUpdateNode": _slice_update,
    "SoftmaxNode": lambda s, n: mx.softmax(s.read(n["x"]), axis=n["axis"], precise=n["precise"]),
    "SortNode": lambda s, n: mx.sort(s.read(n["x"]), axis=n["axis"]),
    "SqueezeNode": _squeeze,
    "StackNode": lambda s, n: mx.stack([s.read(each) for each in n["tensors"]], axis=n["axis"]),
    "TakeNode": _take,
    "TakeAlongAxisNode": lambda s, n: mx.take_along_axis(s.read(n["x"]), s.stored(n["indices"]), axis=n["axis"]),
    "TileNode": lambda s, n: mx.tile(s.read(n["x"]), s.numbers(n["reps"])),
    "TransposeNode": lambda s, n: mx.transpose(s.read(n["x"]), n["perm"]),
    "WhereNode": lambda s, n: mx.where(s.read(n["condition"]), s.read(n["x"]), s.read(n["y"])),
}  # fmt: skip
"""The nodes that return one tensor."""
OTHERS: dict[str, Callable[[Slots, Node], None]] = {
    "AddIntNode": _of_numbers(lambda a, b: a + b),
    "FloorDivideIntNode": _of_numbers(lambda a, b: a // b),
    "ItemIntNode": _item,
    "ModIntNode": _of_numbers(lambda a, b: a % b),
    "MultiplyIntNode": _of_numbers(lambda a, b: a * b),
    "SplitNode": _split,
    "SubtractIntNode": _of_numbers(lambda a, b: a - b),
    "SymSizeNode": _size,
}
