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

from functools import partial

import torch
from make_draft_golden import HIDDEN, LAYER, VOCAB, write_cases
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config

SLOTS, CHAIN = 24, 3
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
TARGET = partial(Qwen3Config, num_hidden_layers=4)
CASES = {  # each seed is the first from 704 on whose chain has no repeated token and no near-tie
    "qwen3": (TARGET, {}, 704),
    "qwen3_biases_yarn": (partial(TARGET, attention_bias=True), {"rope_parameters": YARN}, 704),
}


def build_model(layer_class: type, options: dict, generator: torch.Generator) -> MTPDraftModel:
    config = MTPSpeculatorConfig(
        transformer_layer_config=layer_class(**LAYER | options),
        speculators_config=SpeculatorsConfig(
            algorithm="mtp",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=CHAIN)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="tiny-verifier", architectures=["Qwen3ForCausalLM"]),
        ),
    )
    model = MTPDraftModel(config).eval()
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() == 1:
            weight.copy_(0.3 * noise + (0 if name.endswith("bias") else 1))
        else:
            weight.copy_(noise * (1.0 if name == "embed_tokens.weight" else weight.shape[-1] ** -0.5))
    return model


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


def golden(model: MTPDraftModel, generator: torch.Generator) -> dict[str, torch.Tensor]:
    tokens = torch.randint(VOCAB, (1, SLOTS), generator=generator)
    states = 3 * torch.randn(1, SLOTS, HIDDEN, generator=generator)
    seen: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model.config.speculators_config.proposal_methods[0].speculative_tokens = 1
    padded = torch.nn.functional.pad(
        tokens, (1, 1)
    )  # the forward takes the token after each slot and one more for the loss
    (logits,), *_ = model(padded, torch.nn.functional.pad(states, (0, 0, 0, 2)))
    model.config.speculators_config.proposal_methods[0].speculative_tokens = CHAIN
    hook.remove()

    rows, features, chain = tokens, states, []
    for _ in range(CHAIN):
        made = one_pass(model, rows, features)
        scores = model.lm_head(made)
        torch.testing.assert_close(made[:, :SLOTS], seen[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(scores[:, :SLOTS], logits, atol=1e-5, rtol=1e-5)
        best = scores[0, -1].topk(2)
        assert best.values[0] - best.values[1] > 0.05, "too close to a tie to be compared"
        chain.append((best.indices[:1], scores[0, -1], made[0, -1]))
        rows, features = torch.cat([rows, best.indices[None, :1]], 1), torch.cat([features, made[:, -1:]], 1)
    ids, chain_logits, recurrent = (torch.stack(each) for each in zip(*chain, strict=True))
    assert len(set(ids.flatten().tolist())) == CHAIN, "a repeated proposal would hide mistakes"
    return {
        "tokens": tokens,
        "states": states,
        "logits": logits,
        "recurrent": seen[0],
        "chain_ids": ids.flatten(),
        "chain_logits": chain_logits,
        "chain_recurrent": recurrent,
        "embedding": model.embed_tokens.weight.detach(),
        "lm_head": model.lm_head.weight.detach(),
    }


if __name__ == "__main__":
    write_cases(CASES, build_model, golden, "chain_ids", "MTPDraftModel")
