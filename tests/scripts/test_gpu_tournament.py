"""``scripts/gpu/gpu_tournament.py`` without a GPU: machine code for every launch, correct variants, and the choice
among them."""

import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import gpu_prefill
import gpu_tournament
import gpu_variants
import pytest
import triton.language as tl
from click.testing import CliRunner
from gpu_cubins import MANIFEST, Cubins, key_of
from gpu_tournament import Run
from gpu_variants import VARIANTS, cases
from machine_code.sass import read_codes
from places import HELPERS
from small_tournament import LINEARS
from triton_interpreter import interpreted

from eagle3.export.lowering.cuda.kernels import bf16, large_m, small_m, sums
from eagle3.export.lowering.cuda.kernels.int4.records import kernel as int4_records
from eagle3.export.lowering.cuda.kernels.int4.tiles import kernel as int4
from eagle3.export.lowering.cuda.kernels.int4.tiles import matmul as int4_matmul


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cubins")
    gpu_tournament.compile_all(folder, LINEARS)
    return folder


def test_every_launch_of_the_tournament_has_machine_code_that_the_driver_accepts(compiled):
    """Each is launched over the stand-in: its threads, shared memory and arguments are those it was compiled for."""
    script = HELPERS / "stand_in_tournament.py"
    done = subprocess.run([sys.executable, script, compiled], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    launches = int(done.stdout.split()[0])
    layers = sum(variant.format == "int4" for variant in VARIANTS) * gpu_tournament.LAYERS
    waits = sum(name in gpu_tournament.WAITS for name in LINEARS)
    prefill = len(LINEARS) * len(gpu_prefill.ROWS) * len(gpu_prefill.FORMS)
    assert launches == len(cases(LINEARS)) + layers * (len(LINEARS) + waits) + 2 * gpu_tournament.EMPTY + prefill


def test_only_kernels_that_wait_for_earlier_launches_are_launched_early(compiled):
    manifest = json.loads((compiled / MANIFEST).read_text())
    assert {about["early"] for about in manifest.values()} == {True, False}
    for key, about in manifest.items():
        code = (compiled / f"{key}.cubin").read_bytes()
        assert about["early"] == (about["constants"].get("EARLY") is True)
        assert b"/tmp" not in code and str(Path.home()).encode() not in code


def test_the_kernels_of_a_prefill_are_compiled_with_wgmma_and_without(compiled):
    manifest = json.loads((compiled / MANIFEST).read_text())
    prefill = {key: about["constants"] for key, about in manifest.items() if "int4_matmul" in key}
    assert {(key.endswith("-own"), constants["BLOCK_M"]) for key, constants in prefill.items()} == {
        (True, 128), (False, 64)
    }  # fmt: skip
    codes = read_codes((compiled / f"{key}.cubin").read_bytes() for key in prefill)
    for key in prefill:
        loops = codes[(compiled / f"{key}.cubin").read_bytes()].loops
        assert {loop.warp_group for loop in loops if loop.multiply_adds} == {key.endswith("-own")}


@pytest.mark.parametrize("wrong", [False, True])
def test_a_prefill_is_checked_and_its_share_of_the_peak_printed(wrong, monkeypatch, capsys):
    found, weights = {}, gpu_prefill.laid_out
    linears = {"down": LINEARS["down"], "lm_head": (128, 768, "")}

    def laid_out(*given):
        common, (qdata, *rest) = weights(*given)
        return common, (qdata ^ 1 if wrong else qdata, *rest)

    monkeypatch.setattr(gpu_prefill, "laid_out", laid_out)
    monkeypatch.setattr(gpu_prefill, "ROWS", (130,))
    monkeypatch.setattr(gpu_prefill, "microseconds", lambda calls: 10.0)
    monkeypatch.setattr(gpu_prefill, "Launching", lambda kernel, _, own: int4_matmul._int4_matmul_kernel)
    with interpreted(sums, large_m, int4_matmul):
        gpu_prefill.run_prefill(None, linears, sums.counters(), "cpu", found)
    assert set(found) == {"down, 130 rows, portable", "down, 130 rows, sm_90a"}
    if wrong:
        assert all(of.keys() == {"error"} and of["error"] > gpu_prefill.CLOSE for of in found.values())
    else:
        flops = 2 * 130 * 128 * 768 / 10e-6
        assert all(
            of == pytest.approx({"us": 10, "flops": flops, "share_of_peak": flops / 989e12}) for of in found.values()
        )
        assert "TFLOP/s, 0% of the peak" in capsys.readouterr().out


def test_a_launch_that_was_not_compiled_is_named(compiled):
    with pytest.raises(ValueError, match="make the cubins again with the same sources"):
        Cubins(compiled, None, lambda: 0).function("int4-0")


def test_a_launch_is_named_by_its_kernel_types_and_constants():
    keys = {key_of(*given) for given in (
        ("kernel", (1,), {"N": 1}), ("other", (1,), {"N": 1}), ("kernel", (1, 1), {"N": 1}), ("kernel", (1,), {"N": 2}),
    )}  # fmt: skip
    assert len(keys) == 4
    assert key_of("kernel", (3,), {"N": 1, "K": 2}) == key_of("kernel", (5,), {"K": 2, "N": 1})


class Interpreted(ExitStack):
    """A run on the host, with kernels in Triton's interpreter."""

    def __enter__(self):
        super().__enter__()
        self.enter_context(interpreted(sums, small_m, int4, bf16, int4_records))
        waits = {"gdc_wait": lambda: None, "gdc_launch_dependents": lambda: None}
        self.enter_context(patch.multiple(tl.extra.cuda, **waits))
        self.enter_context(patch.object(int4_records, "ask_l2", lambda *_: None))
        kernels = {
            kernel.__name__: kernel
            for kernel in (
                int4.int4_small_m_kernel, int4_records.int4_records_small_m_kernel, bf16._bf16_small_m_kernel,
                small_m._int8_small_m_kernel,
            )
        }  # fmt: skip
        self.enter_context(patch.object(gpu_tournament, "Launching", lambda kernel, _: kernels[kernel.fn.__name__]))
        return self


def found_right(variants) -> dict[str, str]:
    linears = {name: LINEARS[name] for name in ("gate_up", "down")}
    with (
        patch.multiple(gpu_tournament, VARIANTS=variants), patch.object(gpu_variants, "VARIANTS", variants),
        Interpreted(),
    ):  # fmt: skip
        run = Run(None, linears, "cpu")
        run.right()
    return run.found["right"]


@pytest.mark.whole
def test_every_variant_equals_the_plain_product():
    found = found_right(VARIANTS)
    assert len(found) >= 2 * 8
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
        out[0, 0] = out[0, 0] * (1 + 2**-6) if len(x) > 1 else out[0, 0]
        return out

    found = found_right((
        records, wrong, replace(records, name="leaves", launch=leaves), replace(records, name="shifts", launch=shifts),
    ))  # fmt: skip
    for name, expected in (("wrong", "an error of"), ("leaves", "a counter was left"), ("shifts", "other bits")):
        assert expected in found[f"down, 4 rows, {name}"]
    assert found["down, 4 rows, records"] == ""


def test_the_variant_with_the_best_slower_time_is_chosen():
    run = Run(None, {"down": LINEARS["down"]}, "cpu")
    times = {"tiled": [30.0, 31.0], "records": [20.0, 40.0], "records, 4 blocks ahead in L2": [25.0, 26.0]}
    run.found["alone"] = {f"down, 4 rows, {name}": {"us": us, "bytes": 1} for name, us in times.items()}
    (choice,) = run.choice().values()
    assert choice["choose"] == "records, 4 blocks ahead in L2"
    assert choice["gain"] == pytest.approx(31 / 26)


def test_the_tournament_without_a_gpu_is_refused_in_one_line(tmp_path):
    (tmp_path / "archive").touch()
    done = CliRunner().invoke(gpu_tournament.main, ["run", str(tmp_path / "archive")])
    assert done.exit_code == 1 and "there is no CUDA GPU here" in done.output
