"""Trains gemma4-tiny's Gemma 4 assistant, unrolled over its own states as in inference.

Step j at slot p embeds token p + 1 + j, takes step j - 1's state (step 0 the target's final state at p), has position p
+ 1, and attends to the target's keys up to p. All slots of a piece are computed at once. The assistant learns the
target's own distribution. The modules and the format of the written folder are transformers' own. The pieces are those
of ``tiny_draft.py``.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from tiny_training import STEP_WEIGHT, Pieces, frozen, train
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig

from eagle3.export.draft.kinds.gemma4_assistant.twin import states_are_shared

WIDTH, INNER, LAYER_TYPES, UNROLLED, CHAIN_LEN = 128, 384, ["sliding_attention", "full_attention"], 5, 3


def initial_assistant(target: Gemma4ForCausalLM, seed: int) -> Gemma4AssistantForCausalLM:
    torch.manual_seed(seed)
    config = target.config
    full = config.per_layer_config[config.layer_types.index("full_attention")]
    keys = {"head_dim": full.head_dim, "num_key_value_heads": full.num_key_value_heads}
    changed = {"hidden_size": WIDTH, "intermediate_size": INNER, "layer_types": LAYER_TYPES}
    changed |= dict.fromkeys(("num_hidden_layers", "num_kv_shared_layers"), len(LAYER_TYPES))
    changed |= {"vocab_size_per_layer_input": 0, "final_logit_softcapping": None}
    changed |= {"per_layer_config": {LAYER_TYPES.index("full_attention"): keys}}
    usual = {key: value for key, value in config.to_dict().items() if key != "_name_or_path"}
    text = Gemma4TextConfig.from_dict(usual | changed)
    whole = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=config.hidden_size)
    assistant = Gemma4AssistantForCausalLM(whole).float()
    assistant.generation_config.num_assistant_tokens = CHAIN_LEN
    return assistant


def masks(length: int, window: int) -> dict[str, torch.Tensor]:
    """Return the attention masks that transformers' eager attention adds: float [1, 1, T, T] by kind of layer."""
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    seen = {"full_attention": distance >= 0, "sliding_attention": (distance >= 0) & (distance < window)}
    return {kind: torch.zeros(1, 1, length, length).masked_fill(~mask, float("-inf")) for kind, mask in seen.items()}


def unrolled(
    assistant: Gemma4AssistantForCausalLM, target: Gemma4ForCausalLM, piece: torch.Tensor, steps: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return each step's logits [B, T - steps, V] of all slots of a piece [B, T], and the target's logits [B, T, V]."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        seen = target.model(piece, use_cache=False, return_shared_kv_states=True)
        cap = target.config.final_logit_softcapping
        wanted = torch.tanh(target.lm_head(seen.last_hidden_state) / cap) * cap
        embedded = target.get_input_embeddings()(piece)
    length = piece.shape[1] - steps
    keys = {kind: tuple(each[:, :, :length] for each in pair) for kind, pair in seen.shared_kv_states.items()}
    positions = torch.arange(1, length + 1)[None]
    state, logits = seen.last_hidden_state[:, :length], []
    for step in range(steps):
        inputs = torch.cat((embedded[:, 1 + step : 1 + step + length], state), dim=-1)
        out = assistant.model(
            inputs_embeds=assistant.pre_projection(inputs),
            attention_mask=masks(length, target.config.sliding_window),
            position_ids=positions,
            shared_kv_states=keys,
            use_cache=False,
            output_hidden_states=True,  # otherwise only the last row passes through layers that share keys
        ).last_hidden_state
        logits.append(assistant.lm_head(out))
        state = assistant.post_projection(out)
    return logits, wanted


def unrolled_loss(
    assistant: Gemma4AssistantForCausalLM, target: Gemma4ForCausalLM, piece: torch.Tensor
) -> torch.Tensor:
    """Return the cross entropy against the target's own distribution, weighted by 0.8^step."""
    logits, wanted = unrolled(assistant, target, piece, UNROLLED)
    total = torch.zeros(())
    for step, given in enumerate(logits):
        aim = wanted[:, 1 + step : 1 + step + given.shape[1]].float().softmax(-1)
        total = total - STEP_WEIGHT**step * (aim * given.float().log_softmax(-1)).sum(-1).mean()
    return total / sum(STEP_WEIGHT**step for step in range(UNROLLED))


def train_assistant(folder: Path, target_folder: Path, pieces: Pieces, steps: int, seed: int, log: Callable) -> dict:
    """Train the assistant, and write a folder in transformers' format at intervals."""
    torch.manual_seed(seed)
    with states_are_shared(Gemma4TextConfig):
        target = frozen(target_folder, attn_implementation="eager")
        assistant = initial_assistant(target, seed)
    assistant.set_attn_implementation("eager")
    save = partial(save_assistant, assistant, folder)
    return train("assistant", assistant, partial(unrolled_loss, assistant, target), pieces, steps, save, log)


def save_assistant(assistant: Gemma4AssistantForCausalLM, folder: Path) -> None:
    """Write the folder in bfloat16, as Google publishes its assistants."""
    tensors = {name: value.detach().to(torch.bfloat16) for name, value in assistant.state_dict().items()}
    assistant.save_pretrained(folder, state_dict=tensors)
    assistant.config.dtype = torch.bfloat16
    assistant.config.save_pretrained(folder)
