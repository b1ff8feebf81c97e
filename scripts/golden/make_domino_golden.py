"""Make the golden Domino heads in tests/golden/dflash: tiny random heads as SpecForge and speculators save them, and
the outputs of their own code.

The cases are folders as in make_dflash_golden.py, with the same tensors. Both trainers apply a Domino's GRU to the
tokens of the text; here the rows after a row are given its best token. SpecForge's block is run as its
``spec_generate`` runs it, after all taps before the anchor, and ``apply_logits_head`` scores it. The block of
speculators comes from its ``_backbone_forward``, and ``domino_head`` scores it. This code is pull request 773, which is
in no release:

    git clone https://github.com/sgl-project/SpecForge
    git clone --branch v6-normalize-experiment https://github.com/vllm-project/speculators
    python -m venv golden-env
    golden-env/bin/pip install torch==2.13.0 transformers==5.13.0 speculators/
    export ATEN_CPU_CAPABILITY=avx2 HF_HUB_OFFLINE=1
    golden-env/bin/python scripts/golden/make_domino_golden.py --specforge SpecForge --out tests/golden/dflash
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from case import save_case
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers import __version__ as transformers_version

HIDDEN, VOCAB, DRAFT_VOCAB, MASK_TOKEN, BLOCK, SLOTS = 64, 96, 48, 95, 5, 32
ANCHORS = [2, 5, 6, 9, 14, 21, 26]
OUTPUTS, INPUTS = [0, 2, 3], [1, 3, 4]
"""The tapped layers of the target, as SpecForge counts them and as speculators counts them."""
LAYERS = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "vocab_size": VOCAB, "num_attention_heads": 4}
LAYERS |= {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64, "num_hidden_layers": 2}
LAYERS |= {"rms_norm_eps": 1e-5}
GRU = {"projector_type": "domino", "gru_hidden_dim": 24, "emb_dim": 8}
SPECFORGE = {  # folder: options of its configuration, seed (the first from 704 on without a near-tie)
    "domino": ({"shift_label": True, "pure_draft_prefix_len": 1}, 707),
    "domino_unshifted": ({"shift_label": False, "pure_draft_prefix_len": 2}, 735),
}
SPECULATORS = {"domino_speculators": ({"draft_vocab_size": DRAFT_VOCAB}, 723)}
Scores = Callable[[Tensor], Tensor]
"""Returns the logits [A, B, V] of all rows of all blocks, for the tokens [A, B] that the GRU is given."""


def randomize(model: nn.Module, generator: torch.Generator) -> None:
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        table = name.endswith("embed_tokens.weight")
        weight.copy_(1 + 0.3 * noise if weight.dim() == 1 else noise * (1.0 if table else weight.shape[-1] ** -0.5))


def walked(scores: Scores, anchors: Tensor, first: int, d2t: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the logits [A, B, V] of all rows, and the best tokens of the rows from ``first`` on, each given the tokens
    before it."""
    given, proposals = anchors[:, None].repeat(1, BLOCK), []
    for row in range(first, BLOCK):
        best = scores(given)[:, row].topk(2)
        assert (best.values[:, 0] - best.values[:, 1]).min() > 0.003, "too close to a tie to be compared"
        ids = best.indices[:, 0]
        proposals.append(ids if d2t is None else ids + d2t[ids])
        if len(proposals) < BLOCK:
            given[:, len(proposals)] = proposals[-1]
    proposed = torch.stack(proposals, dim=1)
    assert all(len(set(block)) > 2 for block in proposed.tolist()), (
        "blocks with few different tokens would hide mistakes"
    )
    return scores(given), proposed


def inputs(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return tokens [1, T] and taps [1, T, 3H]."""
    tokens = torch.randint(VOCAB - 1, (1, SLOTS), generator=generator)
    return tokens, torch.randn(1, SLOTS, len(OUTPUTS) * HIDDEN, generator=generator)


def specforge(options: dict, generator: torch.Generator) -> tuple[nn.Module, dict[str, Tensor]]:
    from specforge.modeling.draft.domino import DominoDraftModel

    own = GRU | options | {"mask_token_id": MASK_TOKEN, "target_layer_ids": OUTPUTS}
    config = Qwen3Config(**LAYERS, block_size=BLOCK, num_target_layers=6, dflash_config=own, emb_dim=GRU["emb_dim"])
    model = DominoDraftModel(config).eval()
    randomize(model, generator)
    embedding, lm_head = torch.randn(2, VOCAB, HIDDEN, generator=generator)
    lm_head *= HIDDEN**-0.5
    embedding[MASK_TOKEN] *= 0.05  # a row's token then depends on its attention
    tokens, taps = inputs(generator)
    anchors, states = tokens[0, ANCHORS], []
    for anchor, token in zip(ANCHORS, anchors, strict=True):
        block = torch.full((1, BLOCK), MASK_TOKEN)
        block[0, 0] = token
        state = model(
            position_ids=torch.arange(anchor + BLOCK)[None],
            noise_embedding=embedding[block],
            target_hidden=taps[:, :anchor],
            is_causal=False,
        )
        states.append(state[0])
    hidden = torch.stack(states)

    def scores(given: Tensor) -> Tensor:
        of_tokens = embedding[given][None]
        (logits,) = model.apply_logits_head(
            (hidden @ lm_head.T)[None], hidden_states=hidden[None], prev_token_embeddings=of_tokens
        )
        return logits

    logits, proposals = walked(scores, anchors, first=0 if options["shift_label"] else 1)
    found = {"logits": logits, "states": hidden, "proposals": proposals, "embedding": embedding, "lm_head": lm_head}
    return model, {"tokens": tokens, "taps": taps} | found


def speculators(options: dict, generator: torch.Generator) -> tuple[nn.Module, dict[str, Tensor]]:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    config = DFlashSpeculatorConfig(
        transformer_layer_config=Qwen3Config(**LAYERS, attn_implementation="eager"),
        block_size=BLOCK,
        aux_hidden_state_layer_ids=INPUTS,
        mask_token_id=MASK_TOKEN,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="tiny-verifier", architectures=["LlamaForCausalLM"]),
        ),
        **GRU,
        **options,
    )
    model = DFlashDraftModel(config).eval()
    counts = torch.randperm(VOCAB, generator=generator).tolist()
    d2t, t2d = build_vocab_mappings_from_distribution(dict(enumerate(counts)), DRAFT_VOCAB, VOCAB)
    model.load_vocab_mappings(t2d, d2t)
    randomize(model, generator)
    model.embed_tokens.weight[MASK_TOKEN] *= 0.05
    tokens, taps = inputs(generator)
    mask = torch.zeros(1, SLOTS, dtype=torch.bool)
    mask[0, ANCHORS] = True
    given = taps, tokens, mask, torch.zeros(1, SLOTS, HIDDEN), torch.zeros_like(tokens)
    states, base, *_, positions = model._backbone_forward(*given, max_anchors=len(ANCHORS))
    anchors, order = positions[::BLOCK].sort()  # the anchors come in random order
    assert anchors.tolist() == ANCHORS
    hidden, base = (each.unflatten(1, (-1, BLOCK))[:, order] for each in (states, base))

    def scores(given: Tensor) -> Tensor:
        return model.domino_head(hidden, base, given[None], config.pure_draft_prefix_len, model.embed_tokens)[0]

    logits, proposals = walked(scores, tokens[0, ANCHORS], first=0 if config.shift_label else 1, d2t=model.d2t)
    found = {"tokens": tokens, "taps": taps, "logits": logits, "states": hidden[0], "proposals": proposals}
    return model, found | {"embedding": model.embed_tokens.weight.detach(), "lm_head": model.lm_head.weight.detach()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the golden Domino heads.")
    parser.add_argument("--specforge", type=Path, required=True, help="a checkout of sgl-project/SpecForge")
    parser.add_argument("--out", type=Path, required=True, help="folder for the fixtures; a case's folder is replaced")
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.specforge))
    libraries = f"torch {torch.__version__}, transformers {transformers_version}"
    for made_by, make, cases in (
        ("SpecForge a6b6b02", specforge, SPECFORGE),
        ("speculators c754d4c", speculators, SPECULATORS),
    ):
        for name, (options, seed) in cases.items():
            model, tensors = make(options, torch.Generator().manual_seed(seed))
            tensors |= {"anchors": torch.tensor(ANCHORS)}
            made_with = f"{made_by}, {libraries}"
            save_case(arguments.out / name, model.save_pretrained, tensors, made_with, "proposals")


if __name__ == "__main__":
    with torch.no_grad():
        main()
