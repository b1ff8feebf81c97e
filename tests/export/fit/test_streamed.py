"""A target that does not fit into memory is computed a layer at a time, with the same result."""

from pathlib import Path

import pytest
import torch
from check_fit import plan_of
from gguf_files import transformers_gguf
from mtp_heads import own_config
from mxfp4_checkpoints import mxfp4_checkpoint
from packed_checkpoints import save_packed
from random_checkpoints import random_model, save_random_draft
from transformers import AutoModelForCausalLM

from eagle3.export.configuration.config import ExportConfig
from eagle3.export.fit import cost
from eagle3.export.fit.attention import WholeText
from eagle3.export.fit.fitting import Measured
from eagle3.export.fit.seen import look
from eagle3.export.fit.streamed import in_memory, is_absent, layers_of, streamed
from eagle3.export.fit.texts import Piece
from eagle3.export.planning.plan import Plan, make_plan
from eagle3.export.twin.randomize import randomize


def plan_for(folder: Path, model, target: str = "auto") -> Plan:
    if not (folder / "target").exists():
        model.to(torch.bfloat16).save_pretrained(folder / "target")
    draft = save_random_draft(folder / "draft", model.config, aux_layers=(0, 1, 2))
    return make_plan(ExportConfig(target, checkpoint=folder / "target", draft=draft, max_seq_len=64, backend="xnnpack"))


def states(target) -> list[torch.Tensor]:
    tokens = torch.randint(90, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        final, taps = target(tokens, torch.arange(40), tuple(range(len(layers_of(target)) + 1)))
        return [final, *taps, target.logits(final)]


def test_a_target_that_is_streamed_computes_all_texts_in_one_pass_with_the_states_of_the_loaded_one():
    plan = plan_of("draft")
    parts, whole = Measured(plan, stream=True), in_memory(plan, 385, torch.float32, WholeText)
    (seen,) = parts.over.seen
    assert seen.kind == "code, prose, dialogue" and len(seen.tokens) == 384 and not parts.writes
    same = look(whole, plan.target_config.num_hidden_layers, Piece(seen.kind, seen.tokens.tolist()))
    assert torch.equal(same.greedy, seen.greedy) and same.kept.keys() == seen.kept.keys()
    for state, other in zip((*same.states, same.final), (*seen.states, seen.final), strict=True):
        assert torch.equal(state, other)
    assert all(map(torch.equal, sum(same.kept.values(), ()), sum(seen.kept.values(), ())))
    fit = parts.fit(plan)
    assert fit.verdict == "fits" and fit.facts["streamed"] and parts.quantized(plan_of("draft", qlinear="8da4w"))


@pytest.mark.parametrize(
    "name", ["gemma4-31B", "gemma4-E2B", "gemma4-26B-A4B", "qwen3-30B-A3B", "llama4-scout", "qwen3-4B", "phi4"]
)
def test_every_family_gives_the_same_states_a_layer_at_a_time(name, tmp_path: Path):
    plan = plan_for(tmp_path, random_model(name), name)
    expected = states(in_memory(plan, 64, torch.float32, WholeText))
    assert all(map(torch.equal, expected, states(streamed(plan, 64, torch.float32, WholeText))))
    assert not any(state.isnan().any() for state in expected) and expected[0].abs().max() > 0.1


def test_layers_with_a_recurrent_state_are_streamed_too(tmp_path: Path):
    config = own_config("qwen3_next")
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    plan = plan_for(tmp_path, randomize(model, 0) or model)
    whole = states(in_memory(plan, 64, torch.float32, WholeText))
    assert all(map(torch.equal, whole, states(streamed(plan, 64, torch.float32, WholeText))))


def test_only_the_layer_that_runs_has_its_tensors_in_memory(tmp_path: Path):
    plan = plan_for(tmp_path, random_model("qwen3-30B-A3B"), "qwen3-30B-A3B")
    target = streamed(plan, 64, torch.float32, WholeText)
    layers, present = layers_of(target), []

    def look(*_call: object) -> None:
        present.append([i for i, each in layers.items() if not any(map(is_absent, each.parameters()))])

    for layer in layers.values():
        layer.register_forward_pre_hook(look)
    states(target)
    assert present == [[index] for index in range(6)]
    assert all(is_absent(value) for layer in layers.values() for value in layer.parameters())


def test_weights_that_are_quantized_already_are_measured_as_what_they_stand_for(tmp_path: Path):
    model = save_packed(tmp_path / "target", "gptq desc_act", 4, 128, False, hidden_size=128, head_dim=32)
    plan = plan_for(tmp_path, model)
    whole = states(in_memory(plan, 64, torch.float32, WholeText))
    assert all(map(torch.equal, whole, states(streamed(plan, 64, torch.float32, WholeText))))
    tokens = torch.randint(90, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(whole[-1], model.float()(tokens).logits, atol=1e-3, rtol=1e-3)


def test_quantized_weights_of_a_gguf_file_are_read_with_their_layer(tmp_path: Path):
    model = random_model("qwen3-4B", hidden_size=256, intermediate_size=256, head_dim=64)
    (tmp_path / "target").mkdir()
    model.config.save_pretrained(tmp_path / "target")
    kinds = {"ffn_down.weight": "Q6_K", ".weight": "Q4_K"}
    file = transformers_gguf(tmp_path / "target" / "model.gguf", model, "qwen3", kinds)
    draft = save_random_draft(tmp_path / "draft", model.config, aux_layers=(0, 1, 2))
    plan = make_plan(ExportConfig("auto", checkpoint=file, draft=draft, max_seq_len=64, backend="xnnpack"))
    whole = states(in_memory(plan, 64, torch.float32, WholeText))
    assert plan.quantized_headers
    assert all(map(torch.equal, whole, states(streamed(plan, 64, torch.float32, WholeText))))


def test_expert_blocks_of_mxfp4_are_read_with_their_layer(tmp_path: Path):
    mxfp4_checkpoint(tmp_path / "target")
    plan = plan_for(tmp_path, random_model("gpt-oss-20b"))
    whole = states(in_memory(plan, 64, torch.float32, WholeText))
    assert all(map(torch.equal, whole, states(streamed(plan, 64, torch.float32, WholeText))))


def test_a_checkpoint_that_has_a_layers_tensor_elsewhere_is_refused(tmp_path: Path):
    plan = plan_for(tmp_path, random_model("qwen3-4B"), "qwen3-4B")
    target = streamed(plan, 64, torch.float32, WholeText)
    hooks = next(iter(layers_of(target)[2]._forward_pre_hooks.values()))
    hooks.__self__.names.discard("model.layers.2.mlp.up_proj.weight")
    with pytest.raises(ValueError, match="weight is not with the tensors of its layer.* type --no-fit"):
        states(target)


def test_a_target_is_streamed_where_it_does_not_fit_and_the_line_says_what_it_takes(monkeypatch):
    plan = plan_of("draft")
    assert not cost.cost(plan).streamed
    whole = cost.cost(plan).bytes
    monkeypatch.setattr(cost, "free_memory", lambda: whole - 1)
    part = cost.cost(plan)
    assert part.streamed and part.bytes < whole and cost.why_not_measured(plan, asked=False) is None
    monkeypatch.setattr(cost, "MOST_SECONDS", 0.0)
    reason = cost.why_not_measured(plan, asked=False)
    assert (
        reason
        == f"it would take about 1 minute and {part.bytes / 1e9:.1f} GB, the target a layer at a time: type --fit"
    )
    assert cost.why_not_measured(plan, asked=True) is None
    monkeypatch.setattr(cost, "free_memory", lambda: part.bytes - 1)
    assert cost.why_not_measured(plan, asked=True).endswith(" GB are free")
