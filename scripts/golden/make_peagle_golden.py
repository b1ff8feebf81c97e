"""Make the golden fixtures under tests/golden/peagle/: tiny random P-EAGLE heads and the outputs of speculators.

The numbers are those of speculators 0.9.0's `PEagleDraftModel`. Its forward is for training only: it draws at random
how many tokens ahead each slot predicts, and returns a loss. Here the last slot predicts DEPTHS tokens and every other
slot one, and a hook reads the output of lm_head. A case is a folder as in make_draft_golden.py, and this script needs
the same environment:

    export ATEN_CPU_CAPABILITY=avx2 HF_HUB_OFFLINE=1
    golden-env/bin/python scripts/golden/make_peagle_golden.py --out tests/golden/peagle

    tokens     [1, T]                   target-vocabulary ids embedded in each draft slot
    taps       [1, T, 3H]               the target's hidden states at the three aux layers, concatenated
    logits     [T + DEPTHS - 1, 48]     of every slot, then of the mask rows after the last one, depth by depth
    proposals  [DEPTHS]                 the greedy tokens after the last slot, as target-vocabulary ids
"""

from functools import partial
from unittest.mock import patch

import torch
from make_draft_golden import AUX_IDS, DRAFT_VOCAB, HIDDEN, LAYER, SLOTS, VOCAB, WINDOW, write_cases
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig, core
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
from transformers import LlamaConfig, Qwen3Config

DEPTHS, MASK_TOKEN = 4, 95
CASES = {  # the seeds are the first from 704 on without a near-tie
    "peagle_two_layers": (partial(LlamaConfig, num_hidden_layers=2), {"norm_before_residual": True}, 704),
    "peagle_fc_norm": (
        partial(Qwen3Config, num_hidden_layers=1),
        {"norm_before_residual": False, "fc_norm": True},
        705,
    ),
    "peagle_window": (
        partial(LlamaConfig, num_hidden_layers=2, **WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}),
        {"norm_before_residual": True, "norm_before_fc": True},
        707,
    ),
}


def build_model(layer_class: type, options: dict, generator: torch.Generator) -> PEagleDraftModel:
    config = PEagleSpeculatorConfig(
        transformer_layer_config=layer_class(**LAYER),
        draft_vocab_size=DRAFT_VOCAB,
        eagle_aux_hidden_state_layer_ids=AUX_IDS,
        mask_token_id=MASK_TOKEN,
        speculators_config=SpeculatorsConfig(
            algorithm="peagle",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DEPTHS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="tiny-verifier", architectures=["LlamaForCausalLM"]),
        ),
        **options,
    )
    model = PEagleDraftModel(config).eval()
    counts = torch.randperm(VOCAB, generator=generator).tolist()
    d2t, t2d = build_vocab_mappings_from_distribution(dict(enumerate(counts)), DRAFT_VOCAB, VOCAB)
    model.load_vocab_mappings(t2d, d2t)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        scale = 1.0 if name in ("embed_tokens.weight", "mask_hidden") else weight.shape[-1] ** -0.5
        weight.copy_(1 + 0.3 * noise if weight.dim() == 1 else noise * scale)
    return model


def golden(model: PEagleDraftModel, generator: torch.Generator) -> dict[str, torch.Tensor]:
    length, masks = SLOTS + DEPTHS - 1, DEPTHS - 1
    tokens = torch.randint(VOCAB, (1, length), generator=generator)  # the last DEPTHS - 1 are not read at depth 0
    taps = torch.randn(1, length, len(AUX_IDS) * HIDDEN, generator=generator)
    anchors = torch.cat([torch.arange(SLOTS), torch.full((masks,), SLOTS - 1)])
    depths = torch.cat([torch.zeros(SLOTS, dtype=torch.long), torch.arange(1, DEPTHS)])
    seen = []
    hook = model.lm_head.register_forward_hook(lambda _, _args, output: seen.append(output[0]))
    with patch.object(core, "generate_cod_sample_indices", lambda **_: (anchors, depths)):
        final = torch.randn(1, length, HIDDEN, generator=generator)
        loss = resolve_loss_config("kl_div", "eager")  # the argument is required, but its result is not used
        documents = torch.zeros_like(tokens)
        model(taps, tokens, documents, verifier_last_hidden_states=final, loss_config=loss, num_depths=DEPTHS)
    hook.remove()
    (logits,) = seen
    ids = logits[SLOTS - 1 :].argmax(-1)
    best = logits[SLOTS - 1 :].topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 0.05, "too close to a tie to be compared"
    return {
        "tokens": tokens[:, :SLOTS],
        "taps": taps[:, :SLOTS],
        "logits": logits,
        "proposals": ids + model.d2t[ids],
    }


if __name__ == "__main__":
    write_cases(CASES, build_model, golden, "proposals", "PEagleDraftModel")
