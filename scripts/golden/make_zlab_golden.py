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

import argparse
import sys
from pathlib import Path

import torch
from case import save_case
from make_deepspec_golden import distinct
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config
from transformers import __version__ as transformers_version

OUT = Path(__file__).parents[2] / "tests" / "golden" / "dflash"
HIDDEN, VOCAB, MASK_TOKEN, BLOCK, SLOTS = 64, 96, 95, 5, 32
ANCHORS = [2, 5, 6, 9, 14, 21, 26]
SIZES = {"hidden_size": HIDDEN, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 32, "num_hidden_layers": 2, "vocab_size": VOCAB, "rms_norm_eps": 1e-5}
OWN = {"mask_token_id": MASK_TOKEN, "target_layer_ids": [0, 2, 3]}
MARKOV = {"projector_type": "dspark", "markov_rank": 8, "enable_confidence_head": True}
CASES = {  # folder: class, dflash_config, seed (the first from 704 on without a near-tie)
    "dflash_jetspec": ("jetspec", {"causal_head": True, "target_hidden_size": HIDDEN}, 827),
    "dspark_specforge": ("specforge", MARKOV | {"markov_head_type": "vanilla"}, 704),
    "dspark_specforge_gated": ("specforge", MARKOV | {"markov_head_type": "gated"}, 715),
}


def build_model(model_class: type, own: dict, generator: torch.Generator) -> PreTrainedModel:
    config = Qwen3Config(**SIZES, block_size=BLOCK, num_target_layers=6, dflash_config=OWN | own)
    config._attn_implementation = "sdpa"
    return random_weights(model_class(config).eval(), generator)


def random_weights(model: PreTrainedModel, generator: torch.Generator) -> PreTrainedModel:
    """Give a head random weights, none of them at a value that would hide a mistake."""
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        scale = 1.0 if name.endswith("markov_w1.weight") else weight.shape[-1] ** -0.5
        weight.copy_(0.3 * noise + (not name.endswith("bias")) if weight.dim() == 1 else scale * noise)
    return model


def golden(model: PreTrainedModel, generator: torch.Generator) -> dict[str, Tensor]:
    tokens = torch.randint(VOCAB - 1, (1, SLOTS), generator=generator)
    taps = torch.randn(1, SLOTS, 3 * HIDDEN, generator=generator)
    embedding, lm_head = (torch.randn(VOCAB, HIDDEN, generator=generator) for _ in range(2))
    embedding[MASK_TOKEN] *= 0.05  # a row's token then depends on its attention
    lm_head *= HIDDEN**-0.5
    found: dict[str, list[Tensor]] = {"states": [], "logits": [], "proposals": []}
    for anchor in ANCHORS:
        block = torch.tensor([int(tokens[0, anchor])] + [MASK_TOKEN] * (BLOCK - 1))
        positions = torch.arange(anchor + BLOCK)[None]
        state = model(positions, noise_embedding=embedding[block][None], target_hidden=taps[:, :anchor])
        logits = state @ lm_head.T
        if getattr(model, "markov_head", None) is None:
            ids = distinct(logits[0, 1:], 0.003)
        else:
            first = tokens[:, anchor]
            sampled, logits = model.markov_head.sample_block_tokens(
                logits, first_prev_token_ids=first, hidden_states=state
            )
            ids = distinct(logits[0], 0.003)
            assert torch.equal(ids, sampled[0])
        assert len(set(ids.tolist())) > 2
        for name, each in (("states", state[0]), ("logits", logits[0]), ("proposals", ids)):
            found[name].append(each)
    given = {"tokens": tokens, "taps": taps, "anchors": torch.tensor(ANCHORS)}
    return (
        given | {name: torch.stack(each) for name, each in found.items()} | {"embedding": embedding, "lm_head": lm_head}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the golden heads of JetSpec and SpecForge.")
    parser.add_argument("--jetspec", type=Path, required=True, help="a checkout of hao-ai-lab/JetSpec")
    parser.add_argument("--specforge", type=Path, required=True, help="a checkout of sgl-project/SpecForge")
    given = parser.parse_args()
    sys.path[:0] = [str(given.jetspec), str(given.specforge)]
    from jetspec.models.draft_head import DFlashDraftModel
    from specforge.modeling.draft.dspark import DSparkDraftModel

    classes = {"jetspec": (DFlashDraftModel, "JetSpec 2c7b3fa"), "specforge": (DSparkDraftModel, "SpecForge a6b6b02")}
    for name, (trainer, own, seed) in CASES.items():
        model_class, version = classes[trainer]
        generator = torch.Generator().manual_seed(seed)
        model = build_model(model_class, own, generator)
        tensors = golden(model, generator)
        made_with = f"{version}, torch {torch.__version__}, transformers {transformers_version}"
        save_case(OUT / name, model.save_pretrained, tensors, made_with, "proposals")


if __name__ == "__main__":
    with torch.no_grad():
        main()
