"""The target over texts: one text at a time, with any kind of state, as transformers computes it; and a layer at a time
where it does not fit into memory, with the same result."""

from pathlib import Path

import pytest
import torch
from check_fit import plan_of, played
from gguf_files import transformers_gguf
from mtp_heads import own_config
from mxfp4_checkpoints import mxfp4_checkpoint
from packed_checkpoints import save_packed
from random_checkpoints import random_model, save_random_draft
from recurrent_pairs import CONFIGS, recurrent_plan, trained
from transformers import AutoModelForCausalLM

from eagle3.export.checks.fit import target as fit_target
from eagle3.export.checks.fit import texts
from eagle3.export.checks.fit.measure import measure_head
from eagle3.export.checks.fit.target import Measured, in_memory, is_absent, layers_of, look, names_by_layer, streamed
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.planning.plan import Plan, make_plan
from eagle3.export.twin.randomize import randomize
from eagle3.targets.attention import EagerAttention
from eagle3.targets.state_mixers import token_by_token

PLAYED = ("lfm2", "qwen3_5_text")
"""Short convolutions, and a recurrent state."""
FAMILIES = ("qwen3_next", "gptq", "gguf", "mxfp4", "gemma4-26B-A4B", "gemma4-E2B", "llama4-scout", "phi4")


def plan_for(folder: Path, model, target: str = "auto", checkpoint: str = "target") -> Plan:
    if not (folder / "target").exists():
        model.to(torch.bfloat16).save_pretrained(folder / "target")
    draft = save_random_draft(folder / "draft", model.config, aux_layers=(0, 1, 2))
    flags = {"draft": draft, "max_seq_len": 64, "backend": "xnnpack"}
    return make_plan(ExportConfig(target, checkpoint=folder / checkpoint, **flags))


def plan_of_family(name: str, folder: Path) -> Plan:
    """Return the plan of a random target: a family, one with a recurrent state, or a format of quantized weights."""
    if name == "qwen3_next":
        model = AutoModelForCausalLM.from_config(own_config(name)).eval().requires_grad_(False)
        return plan_for(folder, randomize(model, 0) or model)
    if name == "gptq":
        model = save_packed(folder / "target", "gptq desc_act", 4, 128, False, hidden_size=128, head_dim=32)
        return plan_for(folder, model)
    if name == "gguf":
        model = random_model("qwen3-4B", hidden_size=256, intermediate_size=256, head_dim=64)
        (folder / "target").mkdir()
        model.config.save_pretrained(folder / "target")
        kinds = {"ffn_down.weight": "Q6_K", ".weight": "Q4_K"}
        file = transformers_gguf(folder / "target" / "model.gguf", model, "qwen3", kinds)
        return plan_for(folder, model, checkpoint=str(file.relative_to(folder)))
    if name == "mxfp4":
        mxfp4_checkpoint(folder / "target")
        return plan_for(folder, random_model("gpt-oss-20b"))
    return plan_for(folder, random_model(name), name)


def states(target) -> list[torch.Tensor]:
    tokens = torch.randint(90, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        final, taps = target(tokens, torch.arange(40), tuple(range(len(layers_of(target)) + 1)))
        return [final, *taps, target.logits(final)]


def test_a_target_that_is_streamed_computes_all_texts_in_one_pass_with_the_states_of_the_loaded_one():
    plan = plan_of("draft")
    parts, whole = Measured(plan, stream=True), in_memory(plan, 385)
    (seen,) = parts.seen
    assert parts.text() == "380 tokens of code, prose, dialogue" and len(seen.tokens) == 384
    same = look(whole, plan.target_config.num_hidden_layers, seen.tokens.tolist())
    assert torch.equal(same.greedy, seen.greedy) and same.kept.keys() == seen.kept.keys()
    for state, other in zip((*same.states, same.final), (*seen.states, seen.final), strict=True):
        assert torch.equal(state, other)
    assert all(map(torch.equal, sum(same.kept.values(), ()), sum(seen.kept.values(), ())))
    fit = measure_head(parts, plan)
    assert fit.verdict == "fits" and fit.facts["streamed"]


@pytest.mark.first(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_and_format_gives_the_same_states_a_layer_at_a_time(name, tmp_path: Path):
    plan = plan_of_family(name, tmp_path)
    found = states(in_memory(plan, 64))
    assert all(map(torch.equal, found, states(streamed(plan, 64))))
    assert not any(state.isnan().any() for state in found) and found[0].abs().max() > 0.1


def test_only_the_layer_that_runs_has_its_tensors_in_memory(tmp_path: Path, monkeypatch):
    plan = plan_for(tmp_path, random_model("qwen3-30B-A3B"), "qwen3-30B-A3B")
    target = streamed(plan, 64)
    layers, present = layers_of(target), []
    for layer in layers.values():
        layer.register_forward_pre_hook(
            lambda *_: present.append([i for i, each in layers.items() if not any(map(is_absent, each.parameters()))])
        )
    states(target)
    assert present == [[index] for index in range(6)]
    assert all(is_absent(value) for layer in layers.values() for value in layer.parameters())
    names = names_by_layer(plan)
    names[3].add(moved := sorted(names[2])[0])  # a checkpoint that has a layer's tensor with another layer
    names[2].remove(moved)
    monkeypatch.setattr(fit_target, "names_by_layer", lambda _plan: names)
    with pytest.raises(ValueError, match="weight is not with its other tensors.* type --no-fit"):
        states(streamed(plan, 64))


def test_a_target_is_streamed_where_it_does_not_fit_and_the_line_says_what_it_takes(monkeypatch):
    plan = plan_of("draft")
    streamed, whole, _ = fit_target.cost(plan)
    assert not streamed
    monkeypatch.setattr(fit_target, "free_memory", lambda: whole - 1)
    streamed, part, _ = fit_target.cost(plan)
    assert streamed and part < whole and fit_target.why_not_measured(plan, asked=False) is None
    monkeypatch.setattr(fit_target, "MOST_SECONDS", 0.0)
    takes = f"about 1 minute and {part / 1e9:.1f} GB, the target a layer at a time"
    assert fit_target.why_not_measured(plan, asked=False) == f"it would take {takes}: type --fit"
    assert fit_target.why_not_measured(plan, asked=True) is None
    monkeypatch.setattr(fit_target, "free_memory", lambda: part - 1)
    assert fit_target.why_not_measured(plan, asked=True).endswith(" GB are free")


def test_a_whole_text_at_once_gives_the_states_of_its_chunks():
    plan, tokens = plan_of("draft"), torch.randint(2048, (1, 150), generator=torch.Generator().manual_seed(0))
    chunked = plan.spec.module().load(
        plan.target_source.tensors(), plan.target_config, 200, torch.float32, EagerAttention
    )
    _, states = in_memory(plan, 200)(tokens, torch.arange(150), (0, 3, 6))
    parts = [chunked(tokens[:, at : at + 50], torch.arange(at, at + 50), (0, 3, 6))[1] for at in (0, 50, 100)]
    for place, state in enumerate(states):
        torch.testing.assert_close(state, torch.cat([part[place] for part in parts], 1), atol=1e-4, rtol=1e-4)


@pytest.mark.first(2)
@pytest.mark.parametrize("name", list(CONFIGS))
def test_each_text_of_a_target_with_states_is_transformers_own(name, tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "SEGMENTS", 2)
    monkeypatch.setattr(texts, "WRITTEN", 20)
    plan, model = recurrent_plan(name, tmp_path)
    measured = Measured(plan)
    assert measured.written and len(measured.seen) == 2
    for seen in measured.seen:
        with token_by_token(model):
            wanted = model(seen.tokens[None], use_cache=False).logits[0]
        found = measured.target.logits(seen.final)[0]
        torch.testing.assert_close(found, wanted, atol=1e-3 * float(wanted.std()), rtol=1e-3)
        assert torch.equal(seen.greedy, found.argmax(-1)) and torch.equal(seen.tokens[32:], seen.greedy[31:-1])


@pytest.mark.first(1)
@pytest.mark.parametrize("name", PLAYED)
def test_the_runners_loop_gives_the_expected_tokens_for_a_target_with_states(name, tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "SEGMENTS", 4)
    plan, _ = recurrent_plan(name, tmp_path)
    measured = Measured(plan)
    plan = trained(plan, measured)
    fit = measure_head(measured, plan)
    low, high = fit.file.expected.interval
    assert fit.verdict == "fits" and 1.5 < low < played(plan, measured) < high < 3.99
