"""Make the golden fixtures under tests/golden/eagle/: tiny EAGLE 1, 2 and HASS heads and the outputs of speculators.

The numbers are those of speculators 0.3.0's `EagleSpeculator`, the last version that has it, attached to a tiny Llama
whose embedding and lm_head it shares (verifier.safetensors). A case is a folder with the checkpoint as its
`save_pretrained` writes it and golden.safetensors, fp32 or int64 (T = 12):

    tokens   [1, T]     target-vocabulary ids embedded in each draft slot
    states   [1, T, H]  the target's final states after its norm
    logits   [1, T, V]  of one pass over all slots
    next     [1, T, H]  the output of the decoder layer, which is the next step's feature

It needs an environment of its own, because speculators 0.9.0 no longer has this class:

    python -m venv eagle-env
    eagle-env/bin/pip install torch==2.13.0 transformers==4.57.6 safetensors loguru pydantic pydantic-settings
    eagle-env/bin/pip install --no-deps speculators==0.3.0
    ATEN_CPU_CAPABILITY=avx2 HF_HUB_OFFLINE=1 eagle-env/bin/python scripts/golden/make_eagle_golden.py \\
        --out tests/golden/eagle
"""

from copy import deepcopy

import torch
from case import HIDDEN, SIZES, VOCAB, arguments, randomize, save_case, speculators_config, versions
from safetensors.torch import save_file
from speculators.models.eagle import EagleSpeculator, EagleSpeculatorConfig
from transformers import LlamaConfig, LlamaForCausalLM

CASES = {  # EAGLE 1 and 2, HASS, and EAGLE with norms
    "eagle": {"layernorms": False, "fusion_bias": False},
    "hass": {"layernorms": False, "fusion_bias": True},
    "eagle_layernorms": {"layernorms": True, "fusion_bias": False},
}
SLOTS, TABLES = 12, ("embed_tokens.weight",)
LAYER = SIZES | {"num_hidden_layers": 1, "head_dim": 16, "max_position_embeddings": 64}
LAYER |= {"rms_norm_eps": 1e-5, "rope_theta": 10000.0}


@torch.no_grad()
def main() -> None:
    out, made_with = arguments("eagle").out, versions("speculators", "torch", "transformers")
    generator = torch.Generator().manual_seed(704)
    verifier = LlamaForCausalLM(LlamaConfig(**LAYER)).eval()
    randomize(verifier, generator, TABLES)
    out.mkdir(parents=True, exist_ok=True)
    shared = {"embed_tokens": verifier.model.embed_tokens.weight, "lm_head": verifier.lm_head.weight}
    save_file({name: weight.clone() for name, weight in shared.items()}, out / "verifier.safetensors")
    for name, options in CASES.items():
        config = EagleSpeculatorConfig(
            transformer_layer_config=LlamaConfig(**LAYER, attn_implementation="eager"),
            speculators_config=speculators_config("eagle", 3),
            **options,
        )
        model = EagleSpeculator(config, verifier=None, verifier_attachment_mode="detached").eval()
        randomize(model, generator, TABLES)
        alone = deepcopy(model)
        model.embed_tokens, model.rotary_emb = verifier.model.embed_tokens, verifier.model.rotary_emb
        model.lm_head = verifier.lm_head
        seen = []
        hook = model.transformer.register_forward_hook(
            lambda _, _args, output, seen=seen: seen.append(output[0] if isinstance(output, tuple) else output)
        )
        tokens = torch.randint(VOCAB, (1, SLOTS), generator=generator)
        states = torch.randn(1, SLOTS, HIDDEN, generator=generator)
        mask = torch.full((SLOTS, SLOTS), -torch.inf).triu(1)[None, None]
        logits = model(tokens, states, attention_mask=mask, return_dict=False)
        hook.remove()
        (state,) = seen
        numbers = {"tokens": tokens, "states": states, "logits": logits, "next": state.reshape(1, SLOTS, HIDDEN)}
        save_case(out / name, alone.save_pretrained, numbers, made_with, "tokens")


if __name__ == "__main__":
    main()
