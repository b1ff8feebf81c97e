"""The replaced parts of Triton's interpreter give the results of the original ones."""

import itertools
import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpretedFunction, TensorHandle
from triton_interpreter import interpreted, mended

pytestmark = pytest.mark.races(())  # one program each


@triton.jit
def _combined(A, B, OUT, KIND: tl.constexpr):
    at = tl.arange(0, 4)
    a, b = tl.load(A + at), tl.load(B + at)
    if KIND == "add":
        tl.store(OUT + at, a + b)
    elif KIND == "sub":
        tl.store(OUT + at, a - b)
    else:
        tl.store(OUT + at, a * b)


CASES = [
    ("add", torch.int32, [2**31 - 1, 0, 0, 0], [1, 0, 0, 0]),
    ("sub", torch.int32, [0, 0, -(2**31), 0], [0, 0, 1, 0]),
    ("mul", torch.int32, [0, 0, 0, 2**16], [0, 0, 0, 2**15]),
    ("add", torch.int8, [100, 0, 0, 0], [100, 0, 0, 0]),
]


@pytest.mark.parametrize(("kind", "dtype", "a", "b"), CASES)
def test_the_interpreter_refuses_integer_overflow_and_computes_the_largest_values(kind, dtype, a, b):
    kernel, first, second = InterpretedFunction(_combined.fn), torch.tensor(a, dtype=dtype), torch.tensor(b)
    second, out = second.to(dtype), torch.empty(4, dtype=dtype)
    with interpreted(), pytest.raises(InterpreterError, match=f"overflow detected for operation {kind}"):
        kernel[(1,)](first, second, out, kind)
    with interpreted():
        kernel[(1,)](first, second * 0 + (kind == "mul"), out, kind)
        assert torch.equal(out, first)
        kernel[(1,)](first.long(), second.long(), wide := torch.empty(4, dtype=torch.int64), kind)
        kernel[(1,)](first.float(), second.float(), torch.empty(4), kind)
    assert not torch.equal(wide, wide.to(dtype).long())


KINDS = tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.float16, tl.bfloat16, tl.float32, tl.float64
NUMBERS = 0, 1, True, -1, 300, 2**40, 0.0, 1.0, 2.5, float("inf")


def operand(kind: tl.dtype, shape: tuple[int, ...]) -> tl.tensor:
    data = np.arange(math.prod(shape)).reshape(shape or 1).astype(interpreter._get_np_dtype(kind))
    return tl.tensor(TensorHandle(data, kind), tl.block_type(kind, list(shape)) if shape else kind)


def operands(pairs) -> list[str]:
    """Return, of each pair, what Triton makes of it as the operands of an operation, or why it refuses it. Values of
    bfloat16 are left out, since their casts are mended."""
    said = []
    for *given, options in pairs:
        mends = any(isinstance(each, tuple) and each[0] == tl.bfloat16 for each in given)
        lhs, rhs = (operand(*each) if isinstance(each, tuple) else each for each in given)
        try:
            made = interpreter.interpreter_semantic.binary_op_type_checking_impl(lhs, rhs, *options)
        except Exception as error:
            said.append(repr(error))
        else:
            values = [None if mends else each.handle.data.tolist() for each in made]
            said.append(str([values, *((str(each.type), str(each.shape), each.handle.data.shape) for each in made)]))
    return said


def test_operands_of_all_types_shapes_and_numbers_are_tritons_own():
    kinds = (*KINDS, tl.pointer_type(tl.float32), tl.pointer_type(tl.int8))
    options = (), (True, True), (False, False, True, True), (False, False, False)
    shapes = (), (4,), (1, 4), (2, 1), (2, 4), (8, 1)
    pairs = [
        ((kind, shape), number, given)
        for kind, shape, number, given in itertools.product(kinds, shapes[::2], NUMBERS, options)
    ]
    pairs += [(number, each, given) for each, number, given in pairs]
    pairs += [((one, (4,)), (other, (4,)), given) for one, other, given in itertools.product(kinds, kinds, options[:3])]
    pairs += [((kind, one), (tl.int32, two), ()) for kind, one, two in itertools.product(kinds, shapes, shapes)]
    scope = interpreter._patch_lang(_combined.fn)
    own = operands(pairs)
    scope.restore()
    with mended():
        interpreter._patch_lang(_combined.fn)
        for _ in range(2):  # the second time, of numbers and shapes that are known
            assert operands(pairs) == own
    assert 100 < sum("Error" in text for text in own) < len(own) / 2


def test_the_replaced_numpy_types_equal_the_interpreters_own_table():
    kinds = [tl.int1, tl.int8, tl.uint8, tl.int16, tl.int32, tl.uint32, tl.int64, tl.bfloat16, tl.float16, tl.float32]
    kinds += [tl.float8e5, tl.float8e4nv, tl.pointer_type(tl.float32)]
    kinds += [tl.block_type(kind, [4, 2]) for kind in kinds]
    own = [interpreter._get_np_dtype(kind) for kind in kinds]
    with mended():
        assert [interpreter._get_np_dtype(kind) for kind in kinds] == own
        assert interpreter._get_np_dtype(tl.bfloat16) == np.uint16
