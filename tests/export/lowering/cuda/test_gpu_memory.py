"""The GPU memory of a run is estimated before an export, and read from a finished artifact."""

import json
from types import SimpleNamespace

import pytest
import torch
from commands import run_command
from family_exports import random_family
from torch import nn

from eagle3.export.checks.preflight import check_footprint
from eagle3.export.cli import main as export_main
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.lowering.cuda.backend import BACKEND as backend
from eagle3.export.lowering.cuda.gpu_memory import _more_slots, gpu_memory, suggest_flags
from eagle3.export.lowering.cuda.graph.recurrent import use_cuda_recurrence
from eagle3.export.lowering.cuda.kernels.sums import COUNTERS
from eagle3.export.output.progress import Progress
from eagle3.export.planning.memory import cache_bytes, longest_context
from eagle3.export.planning.plan import make_plan
from eagle3.runner.artifact import gpu_needs
from eagle3.runner.artifact.gpu_needs import workspace_of
from eagle3.runner.commands.inspect import main as inspect_main
from eagle3.runner.contract import EXPORT_RECORD, LAUNCHES, PREFILL, WORKSPACE
from eagle3.targets.state_mixers import form_of


def planned(**flags):
    return make_plan(ExportConfig("gemma4-tiny", output_dir=None, cuda_arch="sm_90", **flags))


@pytest.fixture(scope="module")
def found(cuda_artifact):
    return json.loads(run_command(inspect_main, cuda_artifact, "--json").stdout)["gpu_memory"]


def test_the_estimated_gpu_memory_equals_the_artifacts(found):
    plan = planned()
    takes, counters = gpu_memory(plan), 4 * COUNTERS * len(plan.methods)  # each library has its own
    assert takes.target + takes.draft == pytest.approx(found["weights"] - counters, rel=0.005)
    assert takes.caches == pytest.approx(found["caches"], rel=0.01)
    assert found["workspace"] / 3 < takes.workspace < 3 * found["workspace"]
    assert found["total"] == sum(size for part, size in found.items() if part != "total")


def test_the_workspace_is_that_of_the_largest_launch_and_not_their_sum(cuda_artifact):
    prefill = json.loads((cuda_artifact / EXPORT_RECORD).read_text())[LAUNCHES][PREFILL]
    made = [max(entry["buffer_bytes"], default=0) for entry in prefill["launches"] for _ in range(entry["count"])]
    assert max(made) <= prefill[WORKSPACE] < sum(made)


def test_quantizing_the_draft_reduces_the_estimated_memory(cuda_artifact):
    plain, quantized = gpu_memory(planned()), gpu_memory(planned(draft_qlinear="default"))
    assert quantized.target == plain.target and quantized.draft < 0.5 * plain.draft


def test_8_bit_caches_halve_the_memory_per_token_and_a_dry_run_shows_the_context_that_fits():
    wide, narrow = planned(max_seq_len=1024), planned(max_seq_len=1024, kv_cache="int8")
    of_target = 6  # layers; the seventh is the head's
    full, sliding = (sum(s.bytes for s in wide.caches[:of_target] if bool(s.window) is ring) for ring in (False, True))
    kept = cache_bytes(narrow.caches[:of_target])
    assert sliding and kept == sliding + full * (128 + 4) / (2 * 128)  # a head of 128 codes, and its scale
    assert narrow.caches[of_target:] == wide.caches[of_target:]
    growing = sum(shape.bytes // shape.slots for shape in narrow.caches if not shape.window)
    assert longest_context(narrow.caches, 1024, 2560 * growing, 131072) == 1024 + 2560
    assert longest_context(narrow.caches, 1024, -(10**9), 131072) == 0
    assert longest_context(narrow.caches, 1024, 10**12, 4096) == 4096


@pytest.mark.parametrize("share", [0.999, 0.72, 0.7, 0.66])
def test_flags_suggested_for_too_little_gpu_memory_make_the_export_fit(share):
    """CUDA's own memory is left out, since it exceeds that of such a small model."""
    plan = planned(max_seq_len=1024)
    takes = gpu_memory(plan)
    has = round(takes.context + share * (takes.total - takes.context))
    words = suggest_flags(plan, has).split()
    flags = {flag[2:].replace("-", "_"): value for flag, value in zip(words[::2], words[1::2], strict=True)}
    flags = {flag: int(value) if value.isdigit() else value for flag, value in flags.items()}
    assert gpu_memory(planned(**{"max_seq_len": 1024} | flags)).total <= has


def test_a_local_gpu_too_small_is_refused_and_a_named_one_gets_a_warning(monkeypatch, capsys):
    plan = planned()
    total = gpu_memory(plan).total
    monkeypatch.setattr(backend, "memory", lambda plan: (total, "RTX 0"))
    check_footprint(plan, backend, Progress())
    monkeypatch.setattr(backend, "memory", lambda plan: (total - (1 << 20), "RTX 0"))
    monkeypatch.setattr(backend, "runs_here", lambda: True)
    words = r"a run takes 0.51 GiB of GPU memory \(target 0.00, .*, but RTX 0 has 0.51, 0.00 too few: type --draft-ql"
    with pytest.raises(ValueError, match=words):
        check_footprint(plan, backend, Progress())
    monkeypatch.setattr(backend, "runs_here", lambda: False)
    check_footprint(plan, backend, Progress())
    assert capsys.readouterr().err.startswith("Warning: a run takes 0.51 GiB")
    monkeypatch.setattr(backend, "memory", lambda plan: (1, "RTX 0"))
    check_footprint(plan, backend, Progress())
    assert capsys.readouterr().err.endswith("take a larger GPU\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, whose architecture it would be")
def test_a_dry_run_shows_gpu_memory_only_for_cuda(tmp_path):
    def said(*flags):
        return run_command(
            export_main, "--target-model", "gemma4-tiny", "--dry-run", "--output-dir", tmp_path / "out", *flags
        ).stdout

    assert "memory   a run takes 0.51 GiB of GPU memory (target" in said("--cuda-arch", "sm_90")
    assert "GPU" not in said("--backend", "xnnpack")
    assert "tokens   the longest context, with caches in bfloat16: H100, H200 1,024 tokens" in said(
        "--cuda-arch", "sm_90"
    )
    assert "with caches in 8 bits: H100, H200 1,024 tokens" in said("--cuda-arch", "sm_90", "--kv-cache", "int8")


@pytest.mark.parametrize("record", ["{}", "[]", "no JSON", json.dumps({LAUNCHES: {PREFILL: {}}})])
def test_a_record_without_workspaces_gives_no_workspace(record, tmp_path):
    assert workspace_of(tmp_path / "model.pte") is None
    (tmp_path / EXPORT_RECORD).write_text(record)
    assert workspace_of(tmp_path / "model.pte") is None


@pytest.mark.parametrize("family", ["kimi_linear", "bamba", "lfm2"])
def test_the_longer_rings_of_recurrent_layers_are_counted(family):
    model = random_family(family)
    forms = [(form, layer) for layer in model.modules() if (form := form_of(layer)) is not None]
    states = nn.ModuleList(form.make(form.mixer(layer), 0, 64) for form, layer in forms)

    def kept() -> int:
        return sum(buffer.nbytes for buffer in states.buffers())

    before = kept()
    use_cuda_recurrence(states)
    assert _more_slots(model) == kept() - before and (kept() > before) == (family != "lfm2")


def test_an_artifacts_states_count_as_caches(tmp_path):
    names = (
        "model.embed_tokens.weight",
        "layers.0.self_attn.cache.k_cache",
        "layers.1.self_attn.kept_state.changes.rows",
    )
    kept = {name: SimpleNamespace(name=name, device="cuda", storage_bytes=8) for name in names}
    found = gpu_needs.gpu_memory(tmp_path / "model.pte", [SimpleNamespace(storages=lambda: kept)])
    assert (found["weights"], found["caches"]) == (8, 16)
