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

import argparse
import sys
from pathlib import Path
from types import ModuleType

import torch
from case import save_case
from torch import Tensor
from transformers import DynamicCache, Gemma4Config, PreTrainedModel, Qwen3Config
from transformers import __version__ as transformers_version

GOLDEN = Path(__file__).parents[2] / "tests" / "golden"
HIDDEN, VOCAB, TARGET_LAYERS, MASK_TOKEN, BLOCK = 64, 96, 6, 95, 5
IDS = [0, 2, 3]
"""The target's layers whose outputs are the taps."""
SIZES = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "vocab_size": VOCAB, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64, "num_hidden_layers": TARGET_LAYERS}
GEMMA4 = {"global_head_dim": 64, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
GEMMA4 |= {"num_kv_shared_layers": 0, "final_logit_softcapping": 4.0, "attention_k_eq_v": True}
ANCHORS, SLOTS, CHAIN = [2, 5, 6, 9, 14, 21, 26], {"eagle3": 12, "dspark": 32}, 3
MARKOV = {"markov_rank": 8, "markov_head_type": "vanilla"}
CASES = {  # folder: family, kind, options of its configuration, seed: the first from 704 on without a near-tie
    "eagle3/qwen3_deepspec": ("qwen3", "eagle3", {}, 736),
    "eagle3/gemma4_deepspec": ("gemma4", "eagle3", {}, 707),
    "eagle3/gemma4_deepspec_values": ("gemma4", "eagle3", {"attention_k_eq_v": False}, 713),
    "dflash/dflash_deepspec": ("qwen3", "dspark", {"markov_rank": 0}, 722),
    "dflash/dspark_deepspec": ("qwen3", "dspark", MARKOV, 704),
    "dflash/dspark_deepspec_gemma4": ("gemma4", "dspark", MARKOV, 704),
    "dflash/dflash_deepspec_gemma4_values": (
        "gemma4",
        "dspark",
        {"markov_rank": 0, "attention_k_eq_v": False},
        704,
    ),
    "dflash/dspark_deepspec_rnn": ("qwen3", "dspark", MARKOV | {"markov_head_type": "rnn"}, 710),
}


class Arguments(dict):
    """The arguments of a model in the form that DeepSpec reads: by attribute, and by ``in``."""

    __getattr__ = dict.__getitem__


def configuration(modeling: ModuleType) -> ModuleType:
    """Return the module beside ``modeling`` that creates configurations."""
    return sys.modules[modeling.__name__.removesuffix("modeling") + "config"]


def target_config(family: str, options: dict) -> Qwen3Config | Gemma4Config:
    if family == "qwen3":
        return Qwen3Config(**SIZES, rms_norm_eps=1e-5)
    own = {key: options[key] for key in GEMMA4.keys() & options.keys()}
    return Gemma4Config(text_config=SIZES | GEMMA4 | own)


def build_model(
    modeling: ModuleType, family: str, kind: str, options: dict, generator: torch.Generator
) -> PreTrainedModel:
    """Return a head with random weights, none of them at a value that would hide a mistake."""
    config = configuration(modeling)
    given = {"target_layer_ids": IDS, "target_model_name_or_path": "tiny/target"}
    if kind == "eagle3":
        given |= {"ttt_length": 7, "step_loss_decay": 0.8, "draft_num_hidden_layers": 1}
        built = config.build_draft_config(target_config=target_config(family, options), model_args=Arguments(given))
    else:
        given |= {"num_draft_layers": 2, "block_size": BLOCK, "mask_token_id": MASK_TOKEN, "num_anchors": 4}
        confident = bool(options["markov_rank"])
        given |= {"confidence_head_alpha": float(confident), "confidence_head_with_markov": confident}
        built = config.build_draft_config(target_config(family, options), Arguments(given | options))
    built._attn_implementation = "sdpa"
    name = f"{family.title()}{'Eagle3' if kind == 'eagle3' else 'DSpark'}Model"
    model = getattr(modeling, name)(built).eval()
    for parameter, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        table = parameter.endswith(("embed_tokens.weight", "markov_w1.weight"))
        if weight.dim() == 1:
            weight.copy_(0.3 * noise + (0 if parameter.endswith("bias") else 1))
        else:
            weight.copy_(noise * (1.0 if table else weight.shape[-1] ** -0.5))
    if family == "gemma4":
        model.embed_tokens.weight /= HIDDEN**0.5  # the model multiplies embeddings by this root
        for number, layer in enumerate(model.layers):
            layer.layer_scalar.fill_(0.8 - 0.1 * number)
    if kind == "dspark":
        model.embed_tokens.weight[MASK_TOKEN] *= 0.05  # a row's token then depends on its attention
    return model


def distinct(logits: Tensor, margin: float) -> Tensor:
    """Return the greedy tokens [..., rows] of logits [..., rows, V]."""
    best = logits.topk(2)
    assert (best.values[..., 0] - best.values[..., 1]).min() > margin, "too close to a tie to be compared"
    return best.indices[..., 0]


def eagle3(model: PreTrainedModel, generator: torch.Generator) -> dict[str, Tensor]:
    slots = SLOTS["eagle3"]
    tokens = torch.randint(VOCAB, (1, slots), generator=generator)
    taps = torch.randn(1, slots, len(IDS), HIDDEN, generator=generator) * torch.tensor([0.5, 1.0, 2.0])[:, None]
    taps, cache, positions = taps.flatten(2), DynamicCache(), torch.arange(slots + CHAIN)[None]
    state = model(taps, tokens, position_ids=positions[:, :slots], past_key_values=cache, use_cache=True)
    result = {"tokens": tokens, "taps": taps, "positions": positions[0, :slots], "feature": model.fc(taps)}
    result |= {"logits_0": model.compute_logits(state), "recurrent_0": state}
    ids, logits, states = [], [], []
    for step in range(CHAIN):
        state = state[:, -1:]
        logits.append(model.compute_logits(state)[0, 0])
        states.append(state[0, 0])
        ids.append(distinct(logits[-1][None], 0.05))
        at = positions[:, slots + step : slots + step + 1]
        state = model(state, ids[-1][None], position_ids=at, past_key_values=cache, use_cache=True)
    assert len(set(map(int, ids))) == CHAIN, "a repeated proposal would hide mistakes"
    chain = {"chain_ids": torch.cat(ids), "chain_logits": torch.stack(logits), "chain_recurrent": torch.stack(states)}
    return result | chain


def dspark(model: PreTrainedModel, generator: torch.Generator) -> dict[str, Tensor]:
    tokens = torch.randint(VOCAB - 1, (1, SLOTS["dspark"]), generator=generator)
    taps = torch.randn(1, SLOTS["dspark"], len(IDS) * HIDDEN, generator=generator)
    found = {"states": [], "logits": [], "proposals": []}
    for anchor in ANCHORS:
        block = torch.full((1, BLOCK), MASK_TOKEN)
        block[0, 0] = tokens[0, anchor]
        state = model._forward_backbone(
            target_hidden_states=taps[:, :anchor],
            noise_embedding=model.embed_tokens(block),
            position_ids=torch.arange(anchor + BLOCK)[None],
            is_causal=False,
        )
        ids, logits = model.sample_draft_tokens(
            model.compute_logits(state), first_prev_token_ids=block[:, 0], hidden_states=state
        )
        assert torch.equal(ids[0], distinct(logits[0], 0.003)) and len(set(ids[0].tolist())) > 2
        for name, each in (("states", state), ("logits", logits), ("proposals", ids)):
            found[name].append(each[0])
    tables = {"embedding": model.embed_tokens.weight.detach(), "lm_head": model.lm_head.weight.detach()}
    given = {"tokens": tokens, "taps": taps, "anchors": torch.tensor(ANCHORS)}
    return given | {name: torch.stack(each) for name, each in found.items()} | tables


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the golden heads of DeepSpec.")
    parser.add_argument("--deepspec", type=Path, required=True, help="a checkout of deepseek-ai/DeepSpec")
    sys.path.insert(0, str(parser.parse_args().deepspec))
    import deepspec.modeling.dspark.gemma4.modeling as gemma4_dspark
    import deepspec.modeling.dspark.qwen3.modeling as qwen3_dspark
    import deepspec.modeling.eagle3.gemma4.modeling as gemma4_eagle3
    import deepspec.modeling.eagle3.qwen3.modeling as qwen3_eagle3

    for each in (gemma4_eagle3, qwen3_eagle3):  # these classes support only five taps
        configuration(each).validate_eagle3_target_layer_ids = lambda ids, _layers: list(ids)
    modules = {("qwen3", "eagle3"): qwen3_eagle3, ("qwen3", "dspark"): qwen3_dspark}
    modules |= {("gemma4", "eagle3"): gemma4_eagle3, ("gemma4", "dspark"): gemma4_dspark}
    made_with = f"DeepSpec afdfa7c, torch {torch.__version__}, transformers {transformers_version}"
    for name, (family, kind, options, seed) in CASES.items():
        generator = torch.Generator().manual_seed(seed)
        model = build_model(modules[family, kind], family, kind, options, generator)
        tensors = (eagle3 if kind == "eagle3" else dspark)(model, generator)
        shown = "chain_ids" if kind == "eagle3" else "proposals"
        save_case(GOLDEN / name, model.save_pretrained, tensors, made_with, shown)


if __name__ == "__main__":
    with torch.no_grad():
        main()
