"""The twin check finds every kind of fault of a target, with the sizes and lengths of published models."""

import copy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from family_configs import SIZE, family_config
from transformers import AutoConfig

from eagle3.export.twin.comparison import TOLERANCE
from eagle3.export.twin.lengths import cut_lengths, passed_lengths
from eagle3.export.twin.shrink import shrink
from eagle3.export.twin.target import check_target, compare, make_twin
from eagle3.targets import spec_for
from eagle3.targets.attention import ring_mask

WIDE = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4}
WIDE |= {"num_hidden_layers": 12, "head_dim": 64, "vocab_size": 32000, "max_position_embeddings": 131072}
ORIGINAL = "original_max_position_embeddings"
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, ORIGINAL: 8192}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, ORIGINAL: 4096}
PHIMOE = SIZE | {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2, ORIGINAL: 48}
MSCALES = {"rope_theta": 10000.0, "factor": 4.0, "short_mscale": 1.1, "long_mscale": 1.4, ORIGINAL: 48}

MODELS = {
    "llama": lambda: AutoConfig.for_model("llama", **WIDE, rope_parameters=LLAMA3 | {"high_freq_factor": 4.0}),
    "llama with yarn": lambda: AutoConfig.for_model("llama", **WIDE, rope_parameters=YARN),
    "mistral": lambda: AutoConfig.for_model("mistral", **WIDE, sliding_window=4096),
    "qwen3": lambda: AutoConfig.for_model("qwen3", **WIDE),
    "qwen3_moe": lambda: AutoConfig.for_model(
        "qwen3_moe", **WIDE | {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True}
    ),
    "gemma2": lambda: AutoConfig.for_model("gemma2", **WIDE, query_pre_attn_scalar=96),
    "gemma3_text": lambda: AutoConfig.for_model("gemma3_text", **WIDE, query_pre_attn_scalar=96, sliding_window=1024),
    "granite": lambda: AutoConfig.for_model(
        "granite",
        **WIDE,
        embedding_multiplier=12.0,
        logits_scaling=8.0,
        residual_multiplier=0.22,
        attention_multiplier=0.0078125,
    ),
    "gpt_oss": lambda: AutoConfig.for_model(
        "gpt_oss", **WIDE, num_local_experts=32, num_experts_per_tok=4, sliding_window=128
    ),
    "llama4_text": lambda: AutoConfig.for_model(
        "llama4_text", **WIDE, num_local_experts=16, intermediate_size_mlp=5632, attn_temperature_tuning=True
    ),
    "phi": lambda: AutoConfig.for_model("phi", **WIDE | {"num_key_value_heads": 16}, partial_rotary_factor=0.5),
    "smollm3": lambda: AutoConfig.for_model("smollm3", **WIDE, no_rope_layers=[1, 1, 1, 0] * 3),
}


def rope(**values) -> dict[str, Any]:
    return {"rope_parameters": lambda given: {**given, **values}}


def one_kind(name: str, value: Any) -> Any:
    """Return a function that changes one field for only one kind of layer."""
    return lambda given: given | {"full_attention": given["full_attention"] | {name: value}}


def one_head_more(target) -> None:
    """Give the first head of each group the next group's keys, like a wrong repetition of keys."""
    for layer in target.layers:
        attend = layer.self_attn.kv_attention.forward
        layer.self_attn.kv_attention.forward = lambda q, k, *rest, attend=attend, **extras: attend(
            q, k.roll(1, dims=2), *rest, **extras
        )


def no_sinks(target) -> None:
    for layer in target.layers:
        layer.self_attn.sinks.fill_(-100.0)


def untied(target) -> None:
    target.causal_lm.lm_head.weight = torch.nn.Parameter(target.causal_lm.lm_head.weight.flip(0), requires_grad=False)


def wider_window(target) -> None:
    """Widen the sliding window by one, so that the row just before it is attended to."""
    for layer in target.layers:
        attention = layer.self_attn.kv_attention
        window = attention.shape.window

        def rows(positions, window=window):
            return positions, ring_mask(positions, window) | ring_mask(positions - 1, window)

        attention.rows = rows


def never_replaced(target) -> None:
    """Never overwrite a position, so that rejected rows stay."""
    for layer in target.layers:
        cache = layer.self_attn.kv_attention.kv_cache
        update = cache.update
        seen: set[int] = set()

        def keep(positions, keys, values, update=update, cache=cache, seen=seen):
            new = [at for at, position in enumerate(positions.tolist()) if position not in seen]
            seen |= set(positions.tolist())
            return update(positions[new], keys[:, :, new], values[:, :, new])

        cache.update = keep


def one_layer_early(target) -> None:
    """Read taps as outputs, each one layer too late."""
    forward = target.forward
    target.forward = lambda tokens, at, taps: forward(tokens, at, tuple(min(tap + 1, taps[-1]) for tap in taps))


def late_scale(target) -> None:
    """Scale queries more from position 16 on, in forwards that reach that far."""
    for layer in target.layers:
        attend = layer.self_attn.kv_attention.forward
        layer.self_attn.kv_attention.forward = lambda q, k, v, rows, scale, *rest, attend=attend, **extras: attend(
            q, k, v, rows, scale * (1.01 if int(rows[0].max()) >= 16 else 1.0), *rest, **extras
        )


@dataclass(frozen=True)
class Broken:
    """A target with changed fields, or with a fault put in after loading."""

    spec: Any
    fields: dict[str, Any]
    change: Any = None

    def max_forward_len(self, config: Any) -> int:
        return self.spec.max_forward_len(config)

    def module(self) -> Any:
        return SimpleNamespace(load=self.load)

    def load(self, weights, config, *rest):
        fields = config.to_dict()
        for name, value in self.fields.items():
            assert name in fields
            fields[name] = value(fields[name]) if callable(value) else value
            assert fields[name] != config.to_dict()[name]
        config = type(config).from_dict(fields) if self.fields else config
        target = self.spec.module().load(weights, config, *rest)
        if self.change:
            self.change(target)
        return target


FAULTS = {
    "rope theta": ("llama", rope(rope_theta=10000.0)),
    "original length of llama 3's scaling": ("llama", rope(**{ORIGINAL: 33})),
    "yarn beta_fast": ("llama with yarn", rope(beta_fast=16.0)),
    "yarn original length": ("llama with yarn", rope(**{ORIGINAL: 160})),
    "rope of one kind of layer": ("gemma3_text", {"rope_parameters": one_kind("rope_theta", 10000.0)}),
    "partial rotary factor": ("phi", rope(partial_rotary_factor=0.25)),
    "layers without rope": ("smollm3", {"no_rope_layers": lambda given: [1] * len(given)}),
    "window by one": ("mistral", wider_window),
    "layer kinds": ("gemma3_text", {"layer_types": lambda given: given[1:] + given[:1]}),
    "chunk": ("llama4_text", {"attention_chunk_size": lambda given: given - 1}),
    "temperature's length": ("llama4_text", {"floor_scale": lambda given: given + 1}),
    "softcap of logits": ("gemma2", {"final_logit_softcapping": None}),
    "scale of attention": ("gemma2", {"query_pre_attn_scalar": 64}),
    "multiplier of attention": ("granite", {"attention_multiplier": 0.125}),
    "heads that share keys": ("llama", one_head_more),
    "tie": ("gemma2", untied),
    "sinks": ("gpt_oss", no_sinks),
    "norm of chosen experts": ("qwen3_moe", {"norm_topk_prob": False}),
    "rejected rows in a ring": ("mistral", never_replaced),
    "tap": ("qwen3", one_layer_early),
    "something that the largest position of a forward decides": ("llama", late_scale),
}


@pytest.mark.first(2)
@pytest.mark.parametrize("name", MODELS)
def test_a_correct_target_passes_the_twin_check(name):
    config = MODELS[name]()
    found = check_target(spec_for("auto", config.model_type), "auto", Path("folder"), config)
    assert found["logits"] <= TOLERANCE and found["states"] <= TOLERANCE


@pytest.mark.first(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_target_fails_the_twin_check(fault):
    name, broken = FAULTS[fault]
    config = MODELS[name]()
    fields, change = (broken, None) if isinstance(broken, dict) else ({}, broken)
    spec = Broken(spec_for("auto", config.model_type), fields, change)
    try:
        difference = compare(spec, make_twin(config), seed=0).difference
    except (RuntimeError, ValueError, KeyError, IndexError) as error:
        pytest.fail(f"it stopped instead: {error}")
    assert difference > TOLERANCE


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_a_rope_factor_that_depends_on_the_largest_position_is_refused(kind):
    rope = MSCALES | {"rope_type": kind, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = AutoConfig.for_model("phimoe", **PHIMOE, rope_parameters=rope)
    with pytest.raises(ValueError, match="phimoe.*rope_parameters"):
        check_target(spec_for("auto", "phimoe"), "auto", Path("folder"), config)


def test_an_activation_that_transformers_keeps_in_bfloat16_is_refused():
    """The activation is xIELU outside Apertus, the only class that gives it the model's dtype."""
    config = AutoConfig.for_model("arcee", **SIZE, hidden_act="xielu", rope_parameters={"rope_type": "default"})
    with pytest.raises(ValueError, match="hidden_act = 'xielu': this value is not supported"):
        check_target(spec_for("auto", "arcee"), "auto", Path("folder"), config)


def test_different_lengths_of_a_configuration_stay_different_and_ordered_in_the_twin():
    fields = {"max_position_embeddings": 65536, "sliding_window": 128, "attention_chunk_size": 512}
    fields |= {"floor_scale": 1024, "index_topk": 2048, "rope_parameters": {"rope_type": "linear", ORIGINAL: 32768}}
    cut_lengths(fields)
    named = [fields[name] for name in ("sliding_window", "attention_chunk_size", "floor_scale", "index_topk")]
    named.append(fields["rope_parameters"][ORIGINAL])
    assert named == sorted(set(named)) and named[0] >= 16 and named[-1] <= 40
    assert list(passed_lengths(fields)) == named


def test_a_twin_ends_in_a_layer_of_the_models_last_kind():
    config = MODELS["gpt_oss"]()
    config.layer_types = ["full_attention"] + ["sliding_attention", "full_attention"] * 5 + ["sliding_attention"]
    assert shrink(config).layer_types[-1] == "sliding_attention"
    config.layer_types = ["sliding_attention", "full_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert shrink(config).layer_types[-1] == "sliding_attention"
    assert set(shrink(config).layer_types) == {"sliding_attention", "full_attention"}


def test_the_twin_shrinks_a_length_field_of_unknown_name(monkeypatch):
    """transformers' own model limits attention by a field of unknown name."""
    from transformers.models.llama import modeling_llama

    from eagle3.export.twin import target

    original = modeling_llama.create_causal_mask

    def with_reach(config, inputs_embeds, attention_mask, **given):
        mask = original(config=config, inputs_embeds=inputs_embeds, attention_mask=attention_mask, **given)
        if mask is None:
            return None
        at = torch.arange(mask.shape[-1])
        return mask.masked_fill(at[:, None] - at[None, :] >= config.the_reach, torch.finfo(mask.dtype).min)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", with_reach)
    config = family_config("llama with yarn")
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    config.the_reach = 100
    twin = target.make_twin(config)
    assert twin.config.the_reach in twin.lengths and twin.tokens > 2 * twin.config.the_reach
    with pytest.raises(ValueError, match="would not compute"):
        check_target(spec_for("auto", "llama"), "auto", Path("folder"), copy.deepcopy(config))
