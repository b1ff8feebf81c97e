"""The check after an export finds an artifact with wrong tokens, and a head that is never accepted."""

import dataclasses
import json
import shutil
import sys

import pytest
import torch
from click.testing import CliRunner
from eager import eager_session, eager_speculator
from gguf_files import transformers_gguf
from random_checkpoints import random_model, save_random_draft
from safetensors.torch import load_file, save_file

from eagle3.export.checkpoints import open_source
from eagle3.export.checkpoints.finite import check_finite
from eagle3.export.checks import artifact as check
from eagle3.export.checks.artifact import check_artifact, compare_tokens, measured_tie, sample_prompts
from eagle3.export.cli import main as export_main
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.lowering.xnnpack.backend import BACKEND as xnnpack
from eagle3.export.lowering.xnnpack.quantization import Recipe, XnnpackWeights
from eagle3.export.planning.plan import make_plan
from eagle3.export.planning.taps import choose_taps
from eagle3.runner.artifact.near_ties import near_tie
from eagle3.runner.loop.generation import complete
from eagle3.targets import TARGETS

TINY = TARGETS["gemma4-tiny"]


@pytest.fixture(scope="module")
def plan():
    return make_plan(ExportConfig("gemma4-tiny", output_dir=None, backend="xnnpack"))


@pytest.fixture(scope="module")
def speculator(plan):
    return eager_speculator(plan)


@pytest.fixture(scope="module")
def quantized(plan):
    """A function that returns an eager speculator in 8da4w, with the prompts of a check and its replies."""
    skeleton = TINY.module().skeleton(plan.target_config, plan.max_seq_len)
    convert = XnnpackWeights(skeleton.model, Recipe("8da4w", "8w", 32))
    speculator = eager_speculator(plan, convert)
    session = eager_session(plan, speculator)
    prompts = sample_prompts(TINY.checkpoint, plan)
    return speculator, [(prompt, complete(session, prompt, max_new_tokens=32).token_ids) for prompt in prompts]


def test_an_export_records_what_its_check_and_its_twins_found(artifact):
    record = json.loads((artifact / "export.json").read_text())
    assert record["check"]["compared_with_eager"] and record["check"]["mean_acceptance_length"] > 2
    assert record["check"]["new_tokens"] == 4 * 32
    twin = record["manifest"]["twin"]
    assert twin["target"]["logits"] < 1e-4 and twin["draft"] is None


def test_an_artifact_too_large_for_memory_is_not_checked(artifact, monkeypatch):
    assert check.why_not(artifact) is None
    monkeypatch.setattr(check, "COPIES", 10**6)
    assert "beside the export" in check.why_not(artifact)


def test_prompts_take_several_chunks_and_need_no_tokenizer(plan, tmp_path):
    by_text, by_ids = sample_prompts(TINY.checkpoint, plan), sample_prompts(tmp_path, plan)
    for prompts in (by_text, by_ids):
        assert len(prompts) == 4 and max(map(len, prompts)) == 64 + 5
        assert all(0 <= token < 2048 for prompt in prompts for token in prompt)


def test_a_token_that_differs_from_the_eager_modules_is_named(speculator, plan, artifact):
    prompts = sample_prompts(artifact, plan)
    said = check._tried(artifact, prompts)["generations"][0]["token_ids"]
    assert compare_tokens(speculator, prompts[0], said, 64) == 0
    wrong = [*said[:5], (said[5] + 1) % 2048, *said[6:]]
    with pytest.raises(ValueError, match=f"at position {len(prompts[0]) + 5}, the eager module"):
        compare_tokens(speculator, prompts[0], wrong, 64)


@pytest.mark.parametrize("linear", ["self_attn.o_proj", "mlp.gate_proj"])
def test_a_wrong_linear_is_more_than_a_near_tie_of_quantized_activations(quantized, linear):
    """The check finds a linear whose rows are in a wrong order."""
    speculator, pairs = quantized
    for prompt, said in pairs:
        compare_tokens(speculator, prompt, said, 64, near_tie("8da4w"))
    codes = speculator.target.model.layers[3].get_submodule(linear).weight.data.qdata
    right = codes.clone()
    codes.copy_(right.roll(1, 0))
    with pytest.raises(ValueError, match="the lowering changed what the model computes"):
        for prompt, said in pairs:
            compare_tokens(speculator, prompt, said, 64, near_tie("8da4w"))
    codes.copy_(right)


@pytest.fixture(scope="module")
def random_weights(tmp_path_factory):
    """An eager Q4_K_M model with random weights in 8da4w: its plan, its tolerance, a prompt and its reply."""
    folder = tmp_path_factory.mktemp("random")
    model = random_model("qwen3-4B", hidden_size=256, intermediate_size=512, num_hidden_layers=6, head_dim=64)
    model.config.save_pretrained(folder)
    file = transformers_gguf(folder / "m.gguf", model, "qwen3", {"ffn_down.weight": "Q6_K", ".weight": "Q4_K"})
    draft = save_random_draft(folder / "draft", model.config)
    flags = {"backend": "xnnpack", "max_seq_len": 256, "qlinear": "8da4w"}
    plan = make_plan(ExportConfig("qwen3-4B", None, file, draft, **flags))
    speculator = eager_speculator(plan, xnnpack.conversion(plan))
    session = eager_session(plan, speculator)
    prompt = sample_prompts(plan.checkpoint, plan)[2]
    said = complete(session, prompt, max_new_tokens=32, stop_ids=()).token_ids
    return speculator, plan, measured_tie(speculator, plan), prompt, said


def test_the_tolerance_is_the_effect_of_quantized_activations_on_this_models_logits(quantized, random_weights, plan):
    """Chunks are compared with steps, whose rounding differs as much as that of a lowering."""
    speculator, own, tie, *_ = random_weights
    assert near_tie("8da4w") < tie < 0.3
    margins = []
    for prompt in sample_prompts(own.checkpoint, own)[2:]:
        tokens = torch.tensor([prompt[:64]])
        with torch.no_grad():
            chunks, steps = (check._logits(speculator, tokens, rows) for rows in (64, 1))
        behind = chunks.max(-1).values - chunks.gather(1, steps.argmax(-1)[:, None])[:, 0]
        margins.append(float((behind / chunks.std(-1)).max()))
    assert max(margins) < tie
    assert measured_tie(quantized[0], dataclasses.replace(plan, qlinear="8da4w")) == near_tie(
        "8da4w"
    )  # trained weights move less
    assert measured_tie(speculator, dataclasses.replace(own, qlinear="none")) == near_tie("none")


def test_the_tolerance_is_limited_except_for_random_weights_that_an_export_made(random_weights, monkeypatch):
    speculator, own, measured, *_ = random_weights
    monkeypatch.setattr(check, "WIDEST_TIE", 0.0)
    assert measured_tie(speculator, own) == near_tie(own.qlinear) < measured
    made = dataclasses.replace(own, config=dataclasses.replace(own.config, random_weights=True))
    assert measured_tie(speculator, made) == measured


@pytest.mark.parametrize(("layer", "linear"), [(0, "self_attn.v_proj"), (3, "self_attn.o_proj"), (5, "mlp.down_proj")])
def test_a_wrong_linear_is_more_than_the_measured_tolerance(random_weights, layer, linear):
    speculator, _, tie, prompt, said = random_weights
    compare_tokens(speculator, prompt, said, 64, tie)
    codes = speculator.target.causal_lm.model.layers[layer].get_submodule(linear).weight.data.qdata
    right = codes.clone()
    codes.copy_(right.roll(1, 0))
    with pytest.raises(ValueError, match="the lowering changed what the model computes"):
        compare_tokens(speculator, prompt, said, 64, tie)
    codes.copy_(right)


@pytest.mark.whole
def test_a_head_that_is_never_accepted_gets_a_warning_with_what_to_type(plan, artifact, monkeypatch):
    real = check._tried

    def rejected(folder, prompts, _stand_in):
        stats = {"num_drafts": 30, "num_accepted_tokens": 0, "acceptance_rate_per_position": [0.0, 0.0, 0.0]}
        tried = real(folder, prompts[:1])
        return tried | {"generations": [each | {"stats": stats} for each in tried["generations"]]}

    assert check_artifact(artifact, plan, None).warning == ()
    monkeypatch.setattr(check, "_tried", rejected)
    outcome = check_artifact(artifact, plan, None)
    text = "\n".join(outcome.warning)
    assert "--aux-convention output" in text and "norm_before_residual (true)" in text
    assert "trained for gemma4-tiny" in text
    assert outcome.record["mean_acceptance_length"] == 1.0 and not outcome.record["compared_with_eager"]
    taps = choose_taps(plan.draft, plan.target_config, None, "output")
    counting_outputs = dataclasses.replace(plan, chosen_taps=taps)
    assert "--aux-convention input" in "\n".join(check_artifact(artifact, counting_outputs, None).warning)


@pytest.mark.parametrize("fault", ["draft.norm.weight", "draft.layers.0.self_attn.q_proj.weight"])
def test_a_wrongly_lowered_draft_head_is_found_although_every_token_is_right(fault, plan, speculator, artifact):
    compared = check_artifact(artifact, plan, speculator).record["proposals_compared"]
    assert compared == 3 * plan.chain_len  # the last of the prompts takes several chunks
    weight = speculator.get_parameter(fault)
    right = weight.clone()
    with torch.no_grad():
        weight.copy_(right.flip(0))
    with pytest.raises(ValueError, match="the lowering changed what the draft head computes"):
        check_artifact(artifact, plan, speculator)
    with torch.no_grad():
        weight.copy_(right)


def test_an_artifact_that_crashes_or_does_not_run_is_named(plan, artifact, tmp_path, monkeypatch):
    broken = shutil.copytree(artifact, tmp_path / "broken")
    with (broken / "model.pte").open("r+b") as file:
        file.truncate(1_000_000)
    with pytest.raises(ValueError, match="does not run: .*--no-check"):
        check_artifact(broken, plan, None)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(ValueError, match="does not run"):
        check_artifact(artifact, plan, None)
    killed = tmp_path / "killed"
    killed.write_text("#!/bin/sh\nkill -ABRT $$\n")
    killed.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killed))
    with pytest.raises(ValueError, match="SIGABRT"):
        check_artifact(artifact, plan, None)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_nan_or_infinite_weight_is_named(value, tmp_path):
    tensors = {"a": torch.zeros(3, 4).bfloat16(), "b": torch.zeros(4), "n": torch.arange(4)}
    tensors["b"][2] = value
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="b holds 1 values of 4 that are NaN or infinite"):
        check_finite(open_source(tmp_path), lambda name: True)
    check_finite(open_source(tmp_path), lambda name: name != "b")


@pytest.mark.parametrize(("which", "name"), [("checkpoint", "model.norm.weight"), ("draft", "fc.weight")])
def test_an_export_with_nan_weights_fails_before_tracing(which, name, tmp_path):
    folder = shutil.copytree(getattr(TINY, which), tmp_path / "copied")
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[7] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "place" / "out"
    flags = ("--target-model", "gemma4-tiny", "--backend", "xnnpack", f"--{which}", folder, "--output-dir", out)
    result = CliRunner().invoke(export_main, [str(flag) for flag in flags])
    *stages, line = result.stderr.splitlines()
    taps = "hidden_states 1, 3, 5 (1,3,5 of config.json, read as inputs of layers)"
    said = f"EAGLE-3 head of speculators; it takes {taps}"
    assert result.exit_code == 1 and f"{name} holds 1 values" in line
    assert [stage.split("  ")[0] for stage in stages] == ["twin check", said, "checksums"]
    assert not out.exists()


def test_a_random_head_gets_the_warning_after_a_real_export(tmp_path):
    """Export and check a random head on the real target, the case that the warning is for."""
    from transformers import AutoConfig

    from eagle3.runner.loop.generation import complete

    config = AutoConfig.from_pretrained(TINY.checkpoint)
    draft = save_random_draft(tmp_path / "draft", config, aux_layers=(1, 3, 5))
    plan = make_plan(ExportConfig("gemma4-tiny", output_dir=None, backend="xnnpack", draft=draft))

    session = eager_session(plan)
    stats = complete(session, sample_prompts(TINY.checkpoint, plan)[0], max_new_tokens=40).stats
    assert stats.acceptance_rate_per_position[0] < check.HOPELESS


@pytest.mark.parametrize(("base", "named"), [(500000.0, "10000"), (10000.0, "file, if config.json has another")])
def test_the_warning_for_a_head_names_its_rope_and_the_command_that_measures_it(base, named):
    plan = make_plan(ExportConfig("gemma4-tiny", output_dir=None, backend="xnnpack", draft_rope_theta=base))
    lines = check.likely_causes(plan, plan.checkpoint, 0.01)
    (rope,) = [line for line in lines if "RoPE" in line]
    assert f"({base:.10g})" in rope and f"type --draft-rope-theta {named}" in rope
    assert lines[-1] == f"to measure which of them it is: eagle3-fit {plan.checkpoint} {plan.draft.folder}"
    assert lines[:-1] == check.likely_causes(plan, plan.checkpoint, 0.01, verdict="fits")


def test_a_head_that_was_measured_as_no_pair_gets_no_flags_to_try(plan):
    (line,) = check.likely_causes(plan, plan.checkpoint, 0.01, verdict="no pair")
    assert line.endswith("speculation gains nothing: the head is untrained, or of another target")
