"""``scripts/gpu/gpu_tournament.py`` by Triton's interpreter: correct variants, and the choice among them."""

from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import gpu_tournament
import pytest
import triton.language as tl
from gpu_cubins import key_of
from gpu_tournament import Tournament
from gpu_variants import VARIANTS, Variant
from small_tournament import LINEARS
from triton_interpreter import interpreted

from eagle3.export.lowering.cuda.kernels import bf16, k_quants, large_m, small_m, sums
from eagle3.export.lowering.cuda.kernels.int4.records import kernel as int4_records
from eagle3.export.lowering.cuda.kernels.int4.tiles import kernel as int4
from eagle3.export.lowering.cuda.kernels.int4.tiles import matmul as int4_matmul


@pytest.mark.parametrize("wrong", [False, True])
def test_a_prefill_is_checked_and_its_share_of_the_peak_computed(wrong, monkeypatch):
    weights, linears = gpu_tournament.in_tiles, {"down": LINEARS["down"], "lm_head": (128, 768, "")}

    def in_tiles(*given):
        common, (qdata, *rest) = weights(*given)
        return common, (qdata ^ 1 if wrong else qdata, *rest)

    monkeypatch.setattr(gpu_tournament, "in_tiles", in_tiles)
    monkeypatch.setattr(gpu_tournament, "PREFILL_ROWS", (130,))
    monkeypatch.setattr(gpu_tournament, "microseconds", lambda calls: 10.0)
    monkeypatch.setattr(gpu_tournament, "Launching", lambda kernel, _, own: int4_matmul._int4_matmul_kernel)
    with interpreted(sums, large_m, int4_matmul):
        found = Tournament(None, linears, "cpu").prefill()
    assert set(found) == {"down, 130 rows, portable", "down, 130 rows, sm_90a"}
    if wrong:
        assert all(of.keys() == {"error"} and of["error"] > gpu_tournament.CLOSE for of in found.values())
    else:
        flops = 2 * 130 * 128 * 768 / 10e-6
        assert all(
            of == pytest.approx({"us": 10, "flops": flops, "share_of_peak": flops / 989e12}) for of in found.values()
        )


def test_a_launch_is_named_by_its_kernel_types_and_constants():
    keys = {key_of(*given) for given in (
        ("kernel", (1,), {"N": 1}), ("other", (1,), {"N": 1}), ("kernel", (1, 1), {"N": 1}), ("kernel", (1,), {"N": 2}),
    )}  # fmt: skip
    assert len(keys) == 4
    assert key_of("kernel", (3,), {"N": 1, "K": 2}) == key_of("kernel", (5,), {"K": 2, "N": 1})


class AsTriton:
    """A kernel of the interpreter, which also stands for its image by bulk copies."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *given, BULK=False, **constants: self.kernel[grid](*given, **constants)


class Interpreted(ExitStack):
    """A run on the host, with kernels in Triton's interpreter."""

    def __enter__(self):
        super().__enter__()
        self.enter_context(interpreted(sums, small_m, int4, bf16, int4_records, k_quants))
        waits = {"gdc_wait": lambda: None, "gdc_launch_dependents": lambda: None}
        self.enter_context(patch.multiple(tl.extra.cuda, **waits))
        self.enter_context(patch.object(int4_records, "ask_l2", lambda *_: None))
        kernels = {
            kernel.__name__: kernel
            for kernel in (
                int4.int4_small_m_kernel, int4_records.int4_records_small_m_kernel, bf16._bf16_small_m_kernel,
                small_m._int8_small_m_kernel, k_quants._k_quant_small_m_kernel,
            )
        }  # fmt: skip
        launching = patch.object(gpu_tournament, "Launching", lambda kernel, _: AsTriton(kernels[kernel.fn.__name__]))
        self.enter_context(launching)
        return self


def found_right(variants: tuple[Variant, ...], *linears: str) -> dict[str, str]:
    with Interpreted():
        run = Tournament(None, {name: LINEARS[name] for name in linears}, "cpu")
        return {name: fault for variant in variants for name, fault in run.right(variant).items()}


@pytest.mark.whole
def test_every_variant_equals_the_plain_product():
    found = found_right(VARIANTS, "gate_up", "down")
    assert len(found) >= 2 * 8 and {name.rpartition(", ")[2] for name in found} >= {"q4_k", "int8", "bf16"}
    assert {name: fault for name, fault in found.items() if fault} == {}


def test_the_fault_of_a_wrong_variant_is_named():
    records = next(variant for variant in VARIANTS if variant.name == "records")
    wrong = replace(records, name="wrong", lay_out=lambda q, s, ss, z, zs: records.lay_out(q, z, ss, s, zs))

    def leaves(kernel, x, weight, arrived, *rest):
        out = records.launch(kernel, x, weight, arrived, *rest)
        arrived[3] = 1
        return out

    def shifts(kernel, x, *rest):
        out = records.launch(kernel, x, *rest)
        out[0, 1] = out[0, 1] * (1 + 2**-7) if len(x) > 1 else out[0, 1]
        return out

    variants = records, wrong, replace(records, name="leaves", launch=leaves)
    found = found_right((*variants, replace(records, name="shifts", launch=shifts)), "down")
    for name, expected in (("wrong", "an error of"), ("leaves", "a counter was left"), ("shifts", "other bits")):
        assert expected in found[f"down, 4 rows, {name}"]
    assert found["down, 4 rows, records"] == ""


def test_the_variant_with_the_best_slower_time_is_chosen():
    times = {"tiled": [30.0, 31.0], "records": [20.0, 40.0], "records, 4 blocks ahead in L2": [25.0, 26.0]}
    found = gpu_tournament.choice({f"down, 4 rows, {name}": us for name, us in times.items()})
    assert found == {"down, 4 rows, int4": {"choose": "records, 4 blocks ahead in L2", "gain": round(31 / 26, 3)}}
