"""The cost of quantization is measured on both backends, for every kind of head, and a dry run says it."""

import json
from dataclasses import replace

import pytest
import torch
from check_fit import HEADS, plan_of
from click.testing import CliRunner

from eagle3.export.cli import main as export
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.fit import cost, dry_run
from eagle3.export.fit.dry_run import quantization_of
from eagle3.export.fit.fitting import Measured
from eagle3.export.fit.quantized import quantized_target
from eagle3.export.lowering.backend import load_backend
from eagle3.export.lowering.cuda.kernels.int4.tiles.kernel import int4_reference
from eagle3.export.planning.plan import make_plan


@pytest.fixture(scope="module")
def measured():
    return Measured(plan_of("draft"))


def plan_for_cuda(head: str, **flags):
    return make_plan(ExportConfig("gemma4-tiny", backend="cuda", draft=HEADS[head], **flags))


@pytest.mark.first(2)
@pytest.mark.parametrize("head", HEADS)
def test_quantization_costs_few_tokens_in_8_bits_and_more_in_4(measured, head):
    fine, coarse = (measured.quantized(plan_of(head, qlinear=recipe)) for recipe in ("8da8w", "8da4w"))
    assert fine.changed < 0.02 < coarse.changed < 0.15
    low, high = fine.before.interval
    assert fine.before == coarse.before and high - low < 0.4
    assert all(low < each.after.length < high for each in (fine, coarse)) and fine.after != coarse.after
    assert "--qlinear 8da8w" in fine.line() and "bfloat16" not in fine.line()


def test_nothing_is_measured_if_nothing_is_quantized(measured):
    assert measured.quantized(plan_of("draft", draft_qlinear="none")) is None
    assert measured.quantized(plan_for_cuda("draft", qlinear="none")) is None


def test_a_target_that_is_not_quantized_is_not_computed_again(measured):
    plan = plan_of("draft", draft_qlinear="8da8w")
    assert quantized_target(plan, measured.over, load_backend("xnnpack")) is measured.over
    assert measured.quantized(plan).changed == 0


@pytest.mark.first(1)
@pytest.mark.parametrize("head", HEADS)
def test_weights_for_cuda_are_measured_by_their_values_on_the_cpu(measured, head):
    share = measured.quantized(plan_for_cuda(head))
    assert 0.01 < share.changed < 0.15 and "bfloat16" in share.line()
    assert share.before.interval[0] < share.after.length < share.before.interval[1]


def test_the_values_of_weights_for_cuda_are_those_that_its_kernel_multiplies():
    cuda, plan = load_backend("cuda"), plan_for_cuda("draft")
    tensors = dict(plan.target_source.tensors())
    name = next(each for each in tensors if each.endswith("layers.0.mlp.gate_proj.weight"))
    own = plan.skeleton.key_map(name)
    dense = cuda.measured_conversion(plan)(own, tensors[name])
    laid_out = cuda.conversion(plan)(own, tensors[name])
    columns = int4_reference(torch.eye(dense.shape[1], dtype=torch.bfloat16)[:8], *laid_out.parts)
    assert dense.dtype == torch.float32
    torch.testing.assert_close(columns.float(), dense[:, :8].T, rtol=0.005, atol=1e-5)  # its outputs are bfloat16
    far = (dense - tensors[name].float()).abs().max() / tensors[name].float().std()
    assert 0.05 < far < 1  # it is rounded, and near


def test_int8_caches_are_measured_apart_from_weights(measured):
    plan = plan_for_cuda("assistant", qlinear="none", kv_cache="int8")
    again = quantized_target(plan, measured.over, load_backend("cuda"))
    codes = [part.dtype for seen in again.seen for part in seen.kept["full_attention"]]
    assert codes == [torch.int8, torch.int8, torch.float32, torch.float32] * len(again.seen)
    share = measured.quantized(plan)
    assert share.recipes == "--kv-cache int8" and share.changed < 0.02 and share.after != share.before


def test_the_share_is_that_of_the_quantized_target(measured):
    """A target whose last layer is damaged changes most tokens."""
    backend, plan = load_backend("xnnpack"), plan_of("draft", qlinear="8da8w")
    convert = backend.measured_conversion(plan)

    class Damaged(type(backend)):
        def measured_conversion(self, _plan):
            return lambda name, value: convert(name, -value if "layers.5.mlp.down" in name else value)

    again = quantized_target(plan, measured.over, Damaged())
    pairs = zip(measured.over.seen, again.seen, strict=True)
    assert sum(float((one.greedy != other.greedy).float().mean()) for one, other in pairs) / len(again.seen) > 0.3


def test_a_dry_run_says_what_typed_recipes_cost(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    typed = ["--target-model", "gemma4-tiny", "--backend", "xnnpack", "--qlinear", "8da4w", "--dry-run", "--json"]
    done = CliRunner().invoke(export, typed)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["quantization"]
    assert found["recipes"] == "--qlinear 8da4w, --draft-qlinear 8da8w" and 0.01 < found["changed_tokens"] < 0.15


def test_a_dry_run_says_why_it_did_not_measure(monkeypatch):
    plan = plan_of("draft", qlinear="8da4w", dry_run=True)
    line, entry = quantization_of(plan, weights_here=False)
    assert line.startswith("cost     what --qlinear 8da4w, --draft-qlinear 8da8w costs was not measured: ")
    assert entry["not_measured"] == "the weights are not on this machine"
    monkeypatch.setattr(dry_run, "MOST_SECONDS", 0.0)
    assert quantization_of(plan, weights_here=True)[1]["not_measured"].endswith("type --fit-only in place of --dry-run")
    monkeypatch.setattr(cost, "free_memory", lambda: 0)
    assert quantization_of(plan, weights_here=True)[1]["not_measured"].endswith("0.0 GB are free")


def test_a_dry_run_without_a_typed_recipe_measures_nothing():
    assert quantization_of(plan_of("draft", dry_run=True), weights_here=True) is None
    whole = plan_of("draft", qlinear="8da4w", dry_run=True)
    assert quantization_of(replace(whole, config=replace(whole.config, random_weights=True)), True) is None
