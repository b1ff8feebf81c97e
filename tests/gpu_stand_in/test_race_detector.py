"""The race detector finds the fault in minimal faulty kernels, and reports nothing in correct ones."""

import pytest
import torch
import triton
import triton.language as tl
from race_detector import Detector
from race_hooks import watching
from triton_interpreter import interpreted

pytestmark = pytest.mark.races(())  # each test starts a detector of its own
N = 16


@triton.jit
def _handed_over(X, DATA, FLAG, OUT, SEM: tl.constexpr, SCOPE: tl.constexpr, BEFORE: tl.constexpr, USED: tl.constexpr):
    # each program stores its numbers, and the last one adds them all
    at, me = tl.arange(0, 16), tl.program_id(0)
    tl.store(DATA + me * 16 + at, tl.load(X + me * 16 + at))
    if BEFORE:
        tl.debug_barrier()
    number = tl.atomic_add(FLAG, 1, sem=SEM, scope=SCOPE)
    last = me == tl.num_programs(0) - 1
    if USED:
        last = number == tl.num_programs(0) - 1
    if last:
        total = tl.load(DATA + at)
        for other in range(1, 3):
            total += tl.load(DATA + other * 16 + at)
        tl.store(OUT + at, total)
        tl.store(FLAG, 0)


def handed_over(sem: str = "acq_rel", scope: str = "gpu", before: bool = True, used: bool = True, orders=("forward",)):
    x, out, flag = torch.arange(3.0 * N), torch.zeros(N), torch.zeros(1, dtype=torch.int32)
    with watching(Detector(orders), of_arguments=True) as detector, interpreted():
        kernel = _interpreted(_handed_over)
        kernel[(3,)](x, torch.empty(3 * N), flag, out, sem, scope, before, used)
    return out, {each.what for each in detector.findings}


def _interpreted(kernel):
    from triton.runtime.interpreter import InterpretedFunction

    return InterpretedFunction(kernel.fn)


def test_a_release_after_a_barrier_and_an_acquire_order_two_programs():
    out, findings = handed_over(orders=("forward", "reversed", "shuffled", "delayed"))
    assert torch.equal(out, torch.arange(3.0 * N).view(3, N).sum(0)) and not findings


@pytest.mark.parametrize(
    "given",
    [{"sem": "relaxed"}, {"sem": "acquire"}, {"sem": "release"}, {"scope": "cta"}, {"before": False}, {"used": False}],
    ids=str,
)
def test_what_orders_less_than_two_whole_programs_is_a_race(given):
    """Without a barrier before a release, and with an acquire whose result is unused, one thread alone is ordered: the
    compiler inserts a barrier to pass the result to the other threads, if there are any."""
    assert "a load and a store of two programs meet and nothing orders them" in handed_over(**given)[1]


def test_another_programs_stores_are_invisible_when_delayed_until_acquired():
    """The wrong memory order changes the results of the launch, and nothing else would show it."""
    for sem, seen in (("acq_rel", True), ("relaxed", False)):
        out, _ = handed_over(sem, orders=("delayed",))
        assert torch.equal(out, torch.arange(3.0 * N).view(3, N).sum(0)) == seen


@triton.jit
def _one_program(X, Y, KIND: tl.constexpr):
    at = tl.arange(0, 16)
    if KIND == "reversed":
        tl.store(Y + at, tl.load(X + at))
        tl.store(X + at, tl.load(Y + 15 - at))
    elif KIND == "barrier":
        tl.store(Y + at, tl.load(X + at))
        tl.debug_barrier()
        tl.store(X + 16 + at, tl.load(Y + 15 - at))
    elif KIND == "twice":
        tl.store(Y + at, 1.0)
        tl.store(Y + at, 2.0)
    elif KIND == "lanes":
        tl.store(Y + at // 2, at.to(tl.float32))
    elif KIND == "equal lanes":
        tl.store(Y + at // 2, tl.full((16,), 1.0, tl.float32))
    elif KIND == "behind":
        tl.store(Y + at, tl.load(X + 32 + at))
    elif KIND == "outside":
        tl.store(Y + 16 + at, 1.0)
    elif KIND == "fresh":
        tl.store(X + at, tl.load(Y + at))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("reversed", "a load and a store of one program meet without a barrier between them"),
        ("barrier", ""),
        ("twice", "stores of different bits of one program meet without a barrier between them"),
        ("lanes", "lanes of one store write different bits to one place"),
        ("equal lanes", "lanes of one store write the same bits to one place"),
        ("behind", "a load from memory that the launch was not given"),
        ("outside", "a store to memory that the launch was not given"),
        ("fresh", "a load of bytes of torch.empty of (16,) that nobody has written"),
    ],
)
def test_a_fault_within_one_program_is_found_at_its_line(kind, expected):
    with watching(Detector(("forward",)), of_arguments=True) as detector, interpreted():
        _interpreted(_one_program)[(1,)](torch.zeros(32), torch.empty(16), kind)
    assert {each.what for each in detector.findings} == ({expected} if expected else set())
    for each in detector.findings:
        assert each.site.file == __file__ and each.site.text.startswith("tl.store")


@triton.jit
def _many_programs(X, Y, KIND: tl.constexpr):
    at, me = tl.arange(0, 16), tl.program_id(0)
    if KIND == "apart":
        tl.store(Y + me * 16 + at, tl.load(X + at))
    elif KIND == "same bits":
        tl.store(Y + at, tl.load(X + at))
    elif KIND == "other bits":
        tl.store(Y + at, tl.load(X + at) + me)
    elif KIND == "neighbours":
        tl.store(Y + me * 8 + at, tl.load(X + at) + me)
    elif KIND == "read":
        tl.store(Y + me * 16 + at, tl.load(Y + (1 - me) * 16 + at) + 1)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("apart", ()),
        ("same bits", ("stores of the same bits",)),
        ("other bits", ("stores of different bits", "what it leaves in the order reversed")),
        ("neighbours", ("stores of different bits", "what it leaves in the order reversed")),
        ("read", ("a load and a store", "what it leaves in the order reversed", "what it leaves in the order delayed")),
    ],
)
def test_a_race_between_two_programs_is_found(kind, expected):
    given = torch.arange(32.0), torch.zeros(32)
    with watching(Detector(("forward", "reversed", "delayed")), of_arguments=True) as detector, interpreted():
        _interpreted(_many_programs)[(2,)](*given, kind)
    kinds = {each.what for each in detector.findings}
    assert all(any(kind.startswith(each) for kind in kinds) for each in expected)
    assert all(any(kind.startswith(each) for each in (*expected, "what it leaves")) for kind in kinds)
