"""Make the golden fixtures under tests/golden/mtp/: tiny random MTP heads and the outputs of speculators.

The numbers are those of speculators 0.9.0's `MTPDraftModel`. Its forward is for training: a later step computes all
slots again, each with the next token at its old position, which is not how a head drafts. Therefore only the first step
is from the public forward. A chain is one pass of the model's own layer over all slots, followed by the slots of the
chain, as vLLM's rounds write them. The pass is compared with the forward in the first slots. A case is a folder as in
make_draft_golden.py, and this script needs the same environment:

    ATEN_CPU_CAPABILITY=avx2 HF_HUB_OFFLINE=1 golden-env/bin/python scripts/golden/make_mtp_golden.py \\
        --out tests/golden/mtp

    tokens             [1, T]     the token after each slot
    states             [1, T, H]  the target's last states, before its norm
    logits             [1, T, V]  of the first step, every slot
    recurrent          [1, T, H]  the feature that the first step passes to the next one
    chain_ids          [K]        a greedy chain from the last slot
    chain_logits       [K, V]     its logits; row 0 is the last row of ``logits``
    chain_recurrent    [K, H]     its features
    embedding, lm_head [V, H]     the target's, which the checkpoint lacks
"""

import torch
from case import HIDDEN, VOCAB, arguments, distinct, randomize, speculators_config, versions, write_cases
from make_draft_golden import LAYER
from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
from transformers import Qwen3Config

SLOTS, CHAIN = 24, 3
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
CASES = {  # options of the layers, seed: the first from 704 on whose chain has no repeated token and no near-tie
    "qwen3": ({}, 704),
    "qwen3_biases_yarn": ({"attention_bias": True, "rope_parameters": YARN}, 704),
}


def one_pass(model: MTPDraftModel, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Return the features [1, T, H] of all slots by one pass of the model's own layer."""
    length = tokens.shape[1]
    mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
    rotary = model.rotary_emb(features, torch.arange(length)[None])
    return model.mtp_layers[0](
        hidden_states=features,
        token_embeddings=model.embed_tokens(tokens),
        attention_mask=mask,
        position_embeddings=rotary,
    )


def make(layer: dict, generator: torch.Generator) -> tuple:
    config = MTPSpeculatorConfig(
        transformer_layer_config=Qwen3Config(**LAYER | {"num_hidden_layers": 4} | layer),
        speculators_config=speculators_config("mtp", CHAIN, "Qwen3ForCausalLM"),
    )
    model = MTPDraftModel(config).eval()
    randomize(model, generator, tables=("embed_tokens.weight",))
    tokens = torch.randint(VOCAB, (1, SLOTS), generator=generator)
    states = 3 * torch.randn(1, SLOTS, HIDDEN, generator=generator)
    seen: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model.config.speculators_config.proposal_methods[0].speculative_tokens = 1
    padded = torch.nn.functional.pad(tokens, (1, 1))  # it takes the token after each slot and one more for the loss
    (logits,), *_ = model(padded, torch.nn.functional.pad(states, (0, 0, 0, 2)))
    model.config.speculators_config.proposal_methods[0].speculative_tokens = CHAIN
    hook.remove()

    rows, features, chain = tokens, states, []
    for _ in range(CHAIN):
        made = one_pass(model, rows, features)
        scores = model.lm_head(made)
        torch.testing.assert_close(made[:, :SLOTS], seen[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(scores[:, :SLOTS], logits, atol=1e-5, rtol=1e-5)
        chain.append((distinct(scores[0, -1:], 0.05), scores[0, -1], made[0, -1]))
        rows, features = torch.cat([rows, chain[-1][0][None]], 1), torch.cat([features, made[:, -1:]], 1)
    ids, chain_logits, recurrent = (torch.stack(each) for each in zip(*chain, strict=True))
    assert len(set(ids.flatten().tolist())) == CHAIN, "a repeated proposal would hide mistakes"
    found = {"tokens": tokens, "states": states, "logits": logits, "recurrent": seen[0], "chain_ids": ids.flatten()}
    found |= {"chain_logits": chain_logits, "chain_recurrent": recurrent}
    return model, found | {"embedding": model.embed_tokens.weight.detach(), "lm_head": model.lm_head.weight.detach()}


if __name__ == "__main__":
    write_cases(arguments("mtp").out, CASES, make, versions("speculators", "torch", "transformers"), "chain_ids")
