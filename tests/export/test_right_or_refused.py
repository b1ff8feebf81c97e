"""Every value of a configuration is computed as transformers computes it, or the export is refused in one line.

The cases are families without an entry, and known families with one changed field each.
"""

import pytest
import torch
from eager import eager_session
from family_configs import FAMILIES, YARN_ROPE, family_config
from random_checkpoints import GEMMA4, LLAMA3_ROPE, SIZE, save_random_draft
from transformers import AutoModelForCausalLM, Gemma4TextConfig, LlamaConfig, Qwen3Config

from eagle3.export import ExportConfig, prepare
from eagle3.export.twin.randomize import randomize
from eagle3.runner.loop.generation import complete

PROMPT, NEW = 70, 14  # tokens: past four windows, a chunk and every original rope length
RIGHT, REFUSED, NO_MODEL = "right", "refused", "transformers makes no such model"


def outcome(config, target: str, tmp_path) -> tuple[str, str]:
    """Return the outcome of a configuration, and the line if it is refused. Fails for tokens that are not
    transformers'."""
    torch.manual_seed(5)
    try:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().requires_grad_(False)
        randomize(model, seed=5)
        expected = greedy(model)
    except Exception as error:
        return NO_MODEL, str(error)
    model.generation_config.eos_token_id = model.config.eos_token_id = None  # an id in the published model's vocabulary
    model.save_pretrained(tmp_path / "target")
    layers = model.config.num_hidden_layers
    draft = save_random_draft(tmp_path / "draft", model.config, aux_layers=(0, layers // 2, layers))
    folders = {"checkpoint": tmp_path / "target", "draft": draft}
    try:
        flags = {"output_dir": tmp_path / "out", "backend": "xnnpack", "max_seq_len": 128}
        plan = prepare(ExportConfig(target, **flags, **folders)).plan
    except (ValueError, FileNotFoundError) as error:
        assert "\n" not in str(error)
        return REFUSED, str(error)
    session = eager_session(plan)
    given = expected[:PROMPT]
    assert complete(session, given, max_new_tokens=NEW, stop_ids=[]).token_ids == expected[PROMPT:]
    return RIGHT, ""


@torch.no_grad()
def greedy(model) -> list[int]:
    vocabulary = model.config.vocab_size
    tokens = torch.randint(vocabulary, (PROMPT,), generator=torch.Generator().manual_seed(3)).tolist()
    for _ in range(NEW):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        assert logits.isfinite().all()
        tokens.append(int(logits.argmax()))
    return tokens


@pytest.mark.first(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_of_no_table_gives_transformers_tokens(name, tmp_path):
    what, line = outcome(family_config(name), "auto", tmp_path)
    assert what == RIGHT, line


BASES = {
    "gemma4-31B": lambda **changes: Gemma4TextConfig(**SIZE | GEMMA4 | changes),
    "llama3.1-8B": lambda **changes: LlamaConfig(**SIZE | {"rope_parameters": LLAMA3_ROPE, **changes}),
    "qwen3-4B": lambda **changes: Qwen3Config(**SIZE | {"tie_word_embeddings": True, **changes}),
}
ROPES = [
    {"rope_type": "default", "rope_theta": 300.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
    {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0},
    {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "factor": 8.0},
    {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    | {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8},
    LLAMA3_ROPE,
    YARN_ROPE,
]
OTHERS = {
    "final_logit_softcapping": [None, 3.0],
    "hidden_act": ["gelu", "relu", "gelu_pytorch_tanh"],
    "hidden_activation": ["gelu", "relu", "silu"],
    "layer_types": [["sliding_attention"] * 5 + ["full_attention"], ["full_attention"] * 6],
    "max_window_layers": [0, 3],
    "sliding_window": [None, 16, 24],
    "use_bidirectional_attention": ["all", "vision"],
    "num_key_value_heads": [1, 4],
    "num_global_key_value_heads": [2],
}
BOOKKEEPING = {
    "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label", "label2id",
    "is_encoder_decoder", "max_position_embeddings", "model_type", "output_attentions", "output_hidden_states",
    "pad_token_id", "per_layer_config", "problem_type", "return_dict", "transformers_version", "use_cache",
    "_name_or_path",
}  # fmt: skip


def changes(target: str) -> list[dict]:
    """Return changes of one field at a time: inverted flags, other numbers, other ropes and activations. A field that
    an earlier base has too is changed there alone, but for its layers' kinds, ropes and activations."""
    usual, found = BASES[target]().to_dict(), []
    earlier = {name for base in list(BASES)[: list(BASES).index(target)] for name in BASES[base]().to_dict()}
    for name, value in (usual | {"num_global_key_value_heads": None} if "gemma" in target else usual).items():
        if name in BOOKKEEPING or name in earlier - {*OTHERS, "rope_parameters"}:
            continue
        if name == "rope_parameters":
            nested = "sliding_attention" in value
            found += [{name: value | {kind: value[kind] | rope}} for rope in ROPES for kind in value] if nested else []
            found += [] if nested else [{name: rope} for rope in ROPES]
        elif name in OTHERS:
            found += [{name: other} for other in OTHERS[name] if other != value]
        elif isinstance(value, bool):
            found.append({name: not value})
        elif isinstance(value, float):
            found.append({name: value * 1.7 + 0.3})
        elif isinstance(value, int):
            found.append({name: value * 2 or 2})
    return found


CHANGES = [(target, change) for target in BASES for change in changes(target)]


@pytest.mark.first(1)
@pytest.mark.parametrize(("target", "change"), CHANGES, ids=[f"{target}-{change}"[:120] for target, change in CHANGES])
def test_a_changed_field_is_right_or_refused(target, change, tmp_path):
    try:
        config = BASES[target](**change)
    except Exception:
        return  # transformers rejects the value
    what, line = outcome(config, target, tmp_path)
    expected = next((known for name, value, known in KNOWN if change.get(name) == value), (RIGHT, REFUSED, NO_MODEL))
    assert what in expected, line


KNOWN = [
    ("attention_bias", True, (RIGHT, REFUSED)),
    ("hidden_act", "gelu", (RIGHT,)),
    ("hidden_activation", "gelu", (REFUSED,)),
    ("hidden_activation", "relu", (REFUSED,)),
    ("use_bidirectional_attention", "all", (REFUSED,)),
    ("use_bidirectional_attention", "vision", (RIGHT,)),
    ("attention_dropout", 0.3, (RIGHT,)),
    ("rope_parameters", ROPES[1], (RIGHT,)),
    ("rope_parameters", ROPES[2], (REFUSED,)),
    ("rope_parameters", ROPES[4], (REFUSED,)),
    ("rope_parameters", YARN_ROPE, (RIGHT,)),
]
"""The outcomes that some values must have: a check that refused everything would pass the rest."""
