"""Make the golden fixtures of heads that other trainers save in z-lab's form, in tests/golden/dflash: JetSpec's causal
blocks and SpecForge's DSpark.

The cases are folders as in make_dflash_golden.py, with the same tensors. The trainers' own classes compute the states
of a block after all taps before it. JetSpec's head proposes from the row after the anchor on, as its engine does.
SpecForge's head also proposes from the anchor's row, and its Markov head samples greedily. This needs a venv of its
own:

    git clone https://github.com/hao-ai-lab/JetSpec
    git clone https://github.com/sgl-project/SpecForge
    python -m venv golden-env
    golden-env/bin/pip install torch==2.13.0 transformers==5.13.0 safetensors
    ATEN_CPU_CAPABILITY=avx2 golden-env/bin/python scripts/golden/make_zlab_golden.py \\
        --jetspec JetSpec --specforge SpecForge
"""

from collections.abc import Callable

import case
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config

LAYERS = case.SIZES | {"num_hidden_layers": 2, "rms_norm_eps": 1e-5}
OWN = {"mask_token_id": case.MASK_TOKEN, "target_layer_ids": case.OUTPUTS}
MARKOV = {"projector_type": "dspark", "markov_rank": 8, "enable_confidence_head": True}
JETSPEC = {"dflash_jetspec": ({"causal_head": True, "target_hidden_size": case.HIDDEN}, 827)}
SPECFORGE = {  # dflash_config, seed (the first from 704 on without a near-tie)
    "dspark_specforge": (MARKOV | {"markov_head_type": "vanilla"}, 704),
    "dspark_specforge_gated": (MARKOV | {"markov_head_type": "gated"}, 715),
}


def build_model(model_class: type, own: dict, generator: torch.Generator) -> PreTrainedModel:
    config = Qwen3Config(**LAYERS, block_size=case.BLOCK, num_target_layers=6, dflash_config=OWN | own)
    config._attn_implementation = "sdpa"
    model = model_class(config).eval()
    case.randomize(model, generator, tables=("markov_w1.weight",))
    return model


def golden(model: Callable[..., Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    tokens = torch.randint(case.VOCAB - 1, (1, case.BLOCK_SLOTS), generator=generator)
    taps = torch.randn(1, case.BLOCK_SLOTS, 3 * case.HIDDEN, generator=generator)
    embedding, lm_head = (torch.randn(case.VOCAB, case.HIDDEN, generator=generator) for _ in range(2))
    embedding[case.MASK_TOKEN] *= 0.05  # a row's token then depends on its attention
    lm_head *= case.HIDDEN**-0.5
    found: dict[str, list[Tensor]] = {"states": [], "logits": [], "proposals": []}
    for anchor in case.ANCHORS:
        block = torch.tensor([int(tokens[0, anchor])] + [case.MASK_TOKEN] * (case.BLOCK - 1))
        positions = torch.arange(anchor + case.BLOCK)[None]
        state = model(positions, noise_embedding=embedding[block][None], target_hidden=taps[:, :anchor])
        logits = state @ lm_head.T
        if getattr(model, "markov_head", None) is None:
            ids = case.distinct(logits[0, 1:], 0.003)
        else:
            first = tokens[:, anchor]
            sampled, logits = model.markov_head.sample_block_tokens(
                logits, first_prev_token_ids=first, hidden_states=state
            )
            ids = case.distinct(logits[0], 0.003)
            assert torch.equal(ids, sampled[0])
        for name, each in (("states", state[0]), ("logits", logits[0]), ("proposals", ids)):
            found[name].append(each)
    given = {"tokens": tokens, "taps": taps, "anchors": torch.tensor(case.ANCHORS)}
    made = {name: torch.stack(each) for name, each in found.items()}
    case.check_varied(made["proposals"])
    return given | made | {"embedding": embedding, "lm_head": lm_head}


def make(own: dict, generator: torch.Generator) -> tuple:
    if "causal_head" in own:
        from jetspec.models.draft_head import DFlashDraftModel as Model
    else:
        from specforge.modeling.draft.dspark import DSparkDraftModel as Model

    model = build_model(Model, own, generator)
    return model, golden(model, generator)


if __name__ == "__main__":
    out, used = case.arguments("dflash", "jetspec", "specforge").out, case.versions("torch", "transformers")
    case.write_cases(out, JETSPEC, make, f"JetSpec 2c7b3fa, {used}")
    case.write_cases(out, SPECFORGE, make, f"SpecForge a6b6b02, {used}")
