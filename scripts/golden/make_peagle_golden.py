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

from unittest.mock import patch

import case
import torch
from make_draft_golden import AFTER, BEFORE, LAYER, SLOTS, WINDOW
from speculators.losses import resolve_loss_config
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig, core
from transformers import LlamaConfig, Qwen3Config

DEPTHS, TWO = 4, {"num_hidden_layers": 2}
MIXED = TWO | WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
CASES = {  # configuration of the layers, options, seed: the first from 704 on without a near-tie
    "peagle_two_layers": (LlamaConfig, TWO, BEFORE, 704),
    "peagle_fc_norm": (Qwen3Config, {}, AFTER | {"fc_norm": True}, 705),
    "peagle_window": (LlamaConfig, MIXED, BEFORE | {"norm_before_fc": True}, 707),
}


def make(layer_class: type, layer: dict, options: dict, generator: torch.Generator) -> tuple:
    config = PEagleSpeculatorConfig(
        transformer_layer_config=layer_class(**LAYER | layer),
        draft_vocab_size=case.DRAFT_VOCAB,
        eagle_aux_hidden_state_layer_ids=case.INPUTS,
        mask_token_id=case.MASK_TOKEN,
        speculators_config=case.speculators_config("peagle", DEPTHS),
        **options,
    )
    model = PEagleDraftModel(config).eval()
    case.load_vocabulary(model, generator)
    case.randomize(model, generator, tables=("embed_tokens.weight", "mask_hidden"), biases=())
    length, masks = SLOTS + DEPTHS - 1, DEPTHS - 1
    tokens = torch.randint(case.VOCAB, (1, length), generator=generator)  # the last DEPTHS - 1 are not read at depth 0
    taps = torch.randn(1, length, len(case.INPUTS) * case.HIDDEN, generator=generator)
    anchors = torch.cat([torch.arange(SLOTS), torch.full((masks,), SLOTS - 1)])
    depths = torch.cat([torch.zeros(SLOTS, dtype=torch.long), torch.arange(1, DEPTHS)])
    seen = []
    hook = model.lm_head.register_forward_hook(lambda _, _args, output: seen.append(output[0]))
    with patch.object(core, "generate_cod_sample_indices", lambda **_: (anchors, depths)):
        final = torch.randn(1, length, case.HIDDEN, generator=generator)
        loss = resolve_loss_config("kl_div", "eager")  # the argument is required, but its result is not used
        documents = torch.zeros_like(tokens)
        model(taps, tokens, documents, verifier_last_hidden_states=final, loss_config=loss, num_depths=DEPTHS)
    hook.remove()
    (logits,) = seen
    ids = case.distinct(logits[SLOTS - 1 :], 0.05)
    found = {"tokens": tokens[:, :SLOTS], "taps": taps[:, :SLOTS], "logits": logits}
    return model, found | {"proposals": ids + model.d2t[ids]}


if __name__ == "__main__":
    case.write_cases(case.arguments("peagle").out, CASES, make, case.versions("speculators", "torch", "transformers"))
