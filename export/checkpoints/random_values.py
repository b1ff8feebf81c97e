"""Makes random values for a tensor of which only the header is known. The values depend on the tensor's name alone, so
that they are the same each time."""

import math
from functools import cache
from zlib import crc32

import torch
from torch import Tensor

DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
}
BLOCK = 1_048_573
"""The number of values that are drawn once and then repeated. It is a prime number, so that no two rows of a matrix are
equal."""
SPREAD = 0.02
"""The standard deviation of weights, as in the initialization of most models."""
SCALE, EXPONENT = 0.005, 120
"""The scale of quantized weights, and the biased exponent of a scale that is stored as an exponent alone (2 ** -7)."""


def random_tensor(name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Return values like an untrained model's: weights with the standard deviation ``SPREAD``, norms around 1, uniform
    codes.

    Raises ValueError for a dtype that is not in ``DTYPES``.
    """
    if dtype not in DTYPES:
        raise ValueError(f"{name} is {dtype}, for which there are no random values: leave --random-weights out")
    kind, part = DTYPES[dtype], name.rpartition(".")[2]
    if "zero" in part:
        return torch.zeros(shape, dtype=kind)
    if "scale" in part and len(shape) > 1:
        if dtype in ("U8", "F8_E8M0"):
            return torch.full(shape, EXPONENT, dtype=torch.uint8).view(kind)
        return torch.full(shape, SCALE).to(kind)
    if not kind.is_floating_point:
        return _repeated(name, _codes(), shape, kind)
    values = _repeated(name, _normal(), shape, torch.float32 if kind.itemsize == 1 else kind)
    return (values + 1 if len(shape) < 2 and part != "bias" else values).to(kind)


def _repeated(name: str, block: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor filled with repetitions of ``block``, which starts at an offset that depends on the name."""
    count = math.prod(shape)
    begun = block.roll(crc32(name.encode()) % BLOCK).to(dtype)
    return begun.repeat(-(-count // BLOCK))[:count].view(shape)


@cache
def _normal() -> Tensor:
    return torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)) * SPREAD


@cache
def _codes() -> Tensor:
    return torch.randint(-(2**31), 2**31, (BLOCK,), generator=torch.Generator().manual_seed(0))
