"""Make the golden fixtures of DeepSeek's DeepSpec, in tests/golden/eagle3 (EAGLE-3) and tests/golden/dflash (DFlash and
DSpark): tiny random heads as it saves them, and the outputs of its own code.

The cases are folders as in make_draft_golden.py and make_dflash_golden.py, with the same tensors. An EAGLE-3 head is
run as ``Qwen3Eagle3Evaluator`` runs it: the slots of a prompt, then a chain over the cache. A DSpark head is run as
``forward_dspark_draft_block`` runs it: the block of each anchor after all taps before the anchor. Its Markov head
samples greedily.

DeepSpec's Gemma 4 reads keys of the configuration that transformers has only up to 5.13, so this needs a venv of its
own:

    git clone https://github.com/deepseek-ai/DeepSpec
    python -m venv golden-env
    golden-env/bin/pip install torch==2.13.0 transformers==5.13.0 safetensors
    ATEN_CPU_CAPABILITY=avx2 golden-env/bin/python scripts/golden/make_deepspec_golden.py --deepspec DeepSpec
"""

from importlib import import_module

import case
import torch
from torch import Tensor
from transformers import DynamicCache, Gemma4Config, PreTrainedModel, Qwen3Config

LAYERS = case.SIZES | {"max_position_embeddings": 64, "num_hidden_layers": 6}
GEMMA4 = {"global_head_dim": 64, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
GEMMA4 |= {"num_kv_shared_layers": 0, "final_logit_softcapping": 4.0, "attention_k_eq_v": True}
SLOTS, CHAIN = 12, 3
MARKOV, PLAIN = {"markov_rank": 8, "markov_head_type": "vanilla"}, {"markov_rank": 0}
VALUES = {"attention_k_eq_v": False}
CASES = {  # folder: family, kind, options of its configuration, seed: the first from 704 on without a near-tie
    "eagle3/qwen3_deepspec": ("qwen3", "eagle3", {}, 736),
    "eagle3/gemma4_deepspec": ("gemma4", "eagle3", {}, 707),
    "eagle3/gemma4_deepspec_values": ("gemma4", "eagle3", VALUES, 713),
    "dflash/dflash_deepspec": ("qwen3", "dspark", PLAIN, 722),
    "dflash/dspark_deepspec": ("qwen3", "dspark", MARKOV, 704),
    "dflash/dspark_deepspec_gemma4": ("gemma4", "dspark", MARKOV, 704),
    "dflash/dflash_deepspec_gemma4_values": ("gemma4", "dspark", PLAIN | VALUES, 704),
    "dflash/dspark_deepspec_rnn": ("qwen3", "dspark", MARKOV | {"markov_head_type": "rnn"}, 710),
}


class Arguments(dict):
    """The case.arguments of a model in the form that DeepSpec reads: by attribute, and by ``in``."""

    __getattr__ = dict.__getitem__


def target_config(family: str, options: dict) -> Qwen3Config | Gemma4Config:
    if family == "qwen3":
        return Qwen3Config(**LAYERS, rms_norm_eps=1e-5)
    own = {key: options[key] for key in GEMMA4.keys() & options.keys()}
    return Gemma4Config(text_config=LAYERS | GEMMA4 | own)


def build_model(family: str, kind: str, options: dict, generator: torch.Generator) -> PreTrainedModel:
    config, modeling = (import_module(f"deepspec.modeling.{kind}.{family}.{name}") for name in ("config", "modeling"))
    given = {"target_layer_ids": case.OUTPUTS, "target_model_name_or_path": "tiny/target"}
    if kind == "eagle3":
        config.validate_eagle3_target_layer_ids = lambda ids, _layers: list(ids)  # it supports only five taps
        given |= {"ttt_length": 7, "step_loss_decay": 0.8, "draft_num_hidden_layers": 1}
        built = config.build_draft_config(target_config=target_config(family, options), model_args=Arguments(given))
    else:
        given |= {"num_draft_layers": 2, "block_size": case.BLOCK, "mask_token_id": case.MASK_TOKEN, "num_anchors": 4}
        confident = bool(options["markov_rank"])
        given |= {"confidence_head_alpha": float(confident), "confidence_head_with_markov": confident}
        built = config.build_draft_config(target_config(family, options), Arguments(given | options))
    built._attn_implementation = "sdpa"
    model = getattr(modeling, f"{family.title()}{'Eagle3' if kind == 'eagle3' else 'DSpark'}Model")(built).eval()
    case.randomize(model, generator, tables=("embed_tokens.weight", "markov_w1.weight"))
    if family == "gemma4":
        model.embed_tokens.weight /= case.HIDDEN**0.5  # the model multiplies embeddings by this root
        for number, layer in enumerate(model.layers):
            layer.layer_scalar.fill_(0.8 - 0.1 * number)
    if kind == "dspark":
        model.embed_tokens.weight[case.MASK_TOKEN] *= 0.05  # a row's token then depends on its attention
    return model


def eagle3(model: PreTrainedModel, generator: torch.Generator) -> dict[str, Tensor]:
    tokens = torch.randint(case.VOCAB, (1, SLOTS), generator=generator)
    taps = (
        torch.randn(1, SLOTS, len(case.OUTPUTS), case.HIDDEN, generator=generator)
        * torch.tensor([0.5, 1.0, 2.0])[:, None]
    )
    taps, cache, positions = taps.flatten(2), DynamicCache(), torch.arange(SLOTS + CHAIN)[None]
    state = model(taps, tokens, position_ids=positions[:, :SLOTS], past_key_values=cache, use_cache=True)
    result = {"tokens": tokens, "taps": taps, "positions": positions[0, :SLOTS], "feature": model.fc(taps)}
    result |= {"logits_0": model.compute_logits(state), "recurrent_0": state}
    ids, logits, states = [], [], []
    for step in range(CHAIN):
        state = state[:, -1:]
        logits.append(model.compute_logits(state)[0, 0])
        states.append(state[0, 0])
        ids.append(case.distinct(logits[-1][None], 0.05))
        at = positions[:, SLOTS + step : SLOTS + step + 1]
        state = model(state, ids[-1][None], position_ids=at, past_key_values=cache, use_cache=True)
    assert len(set(map(int, ids))) == CHAIN, "a repeated proposal would hide mistakes"
    chain = {"chain_ids": torch.cat(ids), "chain_logits": torch.stack(logits), "chain_recurrent": torch.stack(states)}
    return result | chain


def dspark(model: PreTrainedModel, generator: torch.Generator) -> dict[str, Tensor]:
    tokens = torch.randint(case.VOCAB - 1, (1, case.BLOCK_SLOTS), generator=generator)
    taps = torch.randn(1, case.BLOCK_SLOTS, len(case.OUTPUTS) * case.HIDDEN, generator=generator)
    found = {"states": [], "logits": [], "proposals": []}
    for anchor in case.ANCHORS:
        block = torch.full((1, case.BLOCK), case.MASK_TOKEN)
        block[0, 0] = tokens[0, anchor]
        state = model._forward_backbone(
            target_hidden_states=taps[:, :anchor],
            noise_embedding=model.embed_tokens(block),
            position_ids=torch.arange(anchor + case.BLOCK)[None],
            is_causal=False,
        )
        ids, logits = model.sample_draft_tokens(
            model.compute_logits(state), first_prev_token_ids=block[:, 0], hidden_states=state
        )
        assert torch.equal(ids[0], case.distinct(logits[0], 0.003))
        for name, each in (("states", state), ("logits", logits), ("proposals", ids)):
            found[name].append(each[0])
    case.check_varied(torch.stack(found["proposals"]))
    tables = {"embedding": model.embed_tokens.weight.detach(), "lm_head": model.lm_head.weight.detach()}
    given = {"tokens": tokens, "taps": taps, "anchors": torch.tensor(case.ANCHORS)}
    return given | {name: torch.stack(each) for name, each in found.items()} | tables


def make(family: str, kind: str, options: dict, generator: torch.Generator) -> tuple:
    model = build_model(family, kind, options, generator)
    return model, (eagle3 if kind == "eagle3" else dspark)(model, generator)


if __name__ == "__main__":
    out, made_with = case.arguments(".", "deepspec").out, f"DeepSpec afdfa7c, {case.versions('torch', 'transformers')}"
    for kind, shown in (("eagle3", "chain_ids"), ("dspark", "proposals")):
        case.write_cases(
            out, {name: given for name, given in CASES.items() if given[1] == kind}, make, made_with, shown
        )
