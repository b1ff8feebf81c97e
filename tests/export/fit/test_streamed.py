"""A target that does not fit into memory is computed a layer at a time, with the same result."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from check_fit import plan_of
from gguf_files import transformers_gguf
from mtp_heads import own_config
from mxfp4_checkpoints import mxfp4_checkpoint
from packed_checkpoints import save_packed
from random_checkpoints import SCOUT, random_model, save_random_draft
from transformers import AutoModelForCausalLM

from eagle3.export.configuration.config import ExportConfig
from eagle3.export.draft.common.pieces import Pieces
from eagle3.export.fit import cost
from eagle3.export.fit.attention import WholeText
from eagle3.export.fit.fitting import Measured
from eagle3.export.fit.seen import look, texts_at_once
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


def test_a_target_that_is_streamed_says_the_same_of_a_text_bit_for_bit():
    plan = plan_of("draft")
    whole, parts = (Measured(plan, stream=stream) for stream in (False, True))
    for one, other in zip(whole.over.seen, parts.over.seen, strict=True):
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.greedy, other.greedy)
        for state, same in zip((*one.states, one.final), (*other.states, other.final), strict=True):
            assert torch.equal(state, same)
        assert one.kept.keys() == other.kept.keys()
        assert all(map(torch.equal, sum(one.kept.values(), ()), sum(other.kept.values(), ())))
    fit = parts.fit(plan)
    assert fit.verdict == "fits" and fit.facts["streamed"]
    quantized = plan_of("draft", qlinear="8da4w")
    assert parts.quantized(quantized) == whole.quantized(quantized)


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


@pytest.mark.parametrize("name", ["gemma4-31B", "gemma4-E2B", "llama4-scout", "mistral-7B"])
def test_texts_side_by_side_have_the_states_of_each_by_itself(name, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(SCOUT, "floor_scale", 8192)
    plan, pieces = plan_for(tmp_path, random_model(name), name), Pieces(40)
    target = in_memory(plan, 120, torch.float32, lambda shape: WholeText(replace(shape, max_seq_len=120), pieces))
    drawn = torch.Generator().manual_seed(0)
    ids = [torch.randint(90, (length,), generator=drawn).tolist() for length in (40, 25, 33)]
    texts = [Piece("random ids", each) for each in ids]
    together = look(target, 6, texts, ids, pieces)
    for text, own, seen in zip(texts, ids, together, strict=True):
        (alone,) = look(target, 6, [text], [own], pieces)
        for state, same in zip((*seen.states, seen.final), (*alone.states, alone.final), strict=True):
            torch.testing.assert_close(state, same, atol=1e-4, rtol=1e-4)
        for kind, parts in alone.kept.items():
            torch.testing.assert_close(seen.kept[kind], parts, atol=1e-4, rtol=1e-4)


def test_a_target_that_counts_the_rows_of_a_forward_gets_one_text_in_each():
    config = random_model("llama4-scout").config
    assert config.floor_scale == 12 and texts_at_once(config, 129) == 1
    config.floor_scale = 8192
    assert texts_at_once(config, 129) == 7
    assert texts_at_once(own_config("qwen3_next"), 129) == 1 and texts_at_once(own_config("qwen3_next"), 2) == 1


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
