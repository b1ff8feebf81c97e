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

from collections.abc import Callable

import case
import torch
from torch import Tensor
from transformers import Qwen3Config

LAYERS = case.SIZES | {"max_position_embeddings": 64, "num_hidden_layers": 2, "rms_norm_eps": 1e-5}
GRU, TABLES = {"projector_type": "domino", "gru_hidden_dim": 24, "emb_dim": 8}, ("embed_tokens.weight",)
SPECFORGE = {  # folder: options of its configuration, seed (the first from 704 on without a near-tie)
    "domino": ({"shift_label": True, "pure_draft_prefix_len": 1}, 707),
    "domino_unshifted": ({"shift_label": False, "pure_draft_prefix_len": 2}, 735),
}
SPECULATORS = {"domino_speculators": ({"draft_vocab_size": case.DRAFT_VOCAB}, 723)}
Scores = Callable[[Tensor], Tensor]
"""Returns the logits [A, B, V] of all rows of all blocks, for the tokens [A, B] that the GRU is given."""


def walked(scores: Scores, anchors: Tensor, first: int, d2t: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the logits [A, B, V] of all rows, and the best tokens of the rows from ``first`` on, each given the tokens
    before it."""
    given, proposals = anchors[:, None].repeat(1, case.BLOCK), []
    for row in range(first, case.BLOCK):
        ids = case.distinct(scores(given)[:, row], 0.003)
        proposals.append(ids if d2t is None else ids + d2t[ids])
        if len(proposals) < case.BLOCK:
            given[:, len(proposals)] = proposals[-1]
    proposed = torch.stack(proposals, dim=1)
    case.check_varied(proposed)
    return scores(given), proposed


def inputs(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return tokens [1, T] and taps [1, T, 3H]."""
    tokens = torch.randint(case.VOCAB - 1, (1, case.BLOCK_SLOTS), generator=generator)
    return tokens, torch.randn(1, case.BLOCK_SLOTS, len(case.OUTPUTS) * case.HIDDEN, generator=generator)


def specforge(options: dict, generator: torch.Generator) -> tuple:
    from specforge.modeling.draft.domino import DominoDraftModel

    own = GRU | options | {"mask_token_id": case.MASK_TOKEN, "target_layer_ids": case.OUTPUTS}
    config = Qwen3Config(
        **LAYERS, block_size=case.BLOCK, num_target_layers=6, dflash_config=own, emb_dim=GRU["emb_dim"]
    )
    model = DominoDraftModel(config).eval()
    case.randomize(model, generator, TABLES, biases=())
    embedding, lm_head = torch.randn(2, case.VOCAB, case.HIDDEN, generator=generator)
    lm_head *= case.HIDDEN**-0.5
    embedding[case.MASK_TOKEN] *= 0.05  # a row's token then depends on its attention
    tokens, taps = inputs(generator)
    anchors, states = tokens[0, case.ANCHORS], []
    for anchor, token in zip(case.ANCHORS, anchors, strict=True):
        block = torch.full((1, case.BLOCK), case.MASK_TOKEN)
        block[0, 0] = token
        state = model(
            position_ids=torch.arange(anchor + case.BLOCK)[None],
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
    found = {"tokens": tokens, "taps": taps, "anchors": torch.tensor(case.ANCHORS), "logits": logits, "states": hidden}
    return model, found | {"proposals": proposals, "embedding": embedding, "lm_head": lm_head}


def speculators(options: dict, generator: torch.Generator) -> tuple:
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

    config = DFlashSpeculatorConfig(
        transformer_layer_config=Qwen3Config(**LAYERS, attn_implementation="eager"),
        block_size=case.BLOCK,
        aux_hidden_state_layer_ids=case.INPUTS,
        mask_token_id=case.MASK_TOKEN,
        speculators_config=case.speculators_config("dflash", case.BLOCK - 1),
        **GRU,
        **options,
    )
    model = DFlashDraftModel(config).eval()
    case.load_vocabulary(model, generator)
    case.randomize(model, generator, TABLES, biases=())
    model.embed_tokens.weight[case.MASK_TOKEN] *= 0.05
    tokens, taps = inputs(generator)
    mask = torch.zeros(1, case.BLOCK_SLOTS, dtype=torch.bool)
    mask[0, case.ANCHORS] = True
    given = taps, tokens, mask, torch.zeros(1, case.BLOCK_SLOTS, case.HIDDEN), torch.zeros_like(tokens)
    states, base, *_, positions = model._backbone_forward(*given, max_anchors=len(case.ANCHORS))
    anchors, order = positions[:: case.BLOCK].sort()  # the anchors come in random order
    assert anchors.tolist() == case.ANCHORS
    hidden, base = (each.unflatten(1, (-1, case.BLOCK))[:, order] for each in (states, base))

    def scores(given: Tensor) -> Tensor:
        return model.domino_head(hidden, base, given[None], config.pure_draft_prefix_len, model.embed_tokens)[0]

    logits, proposals = walked(scores, tokens[0, case.ANCHORS], first=0 if config.shift_label else 1, d2t=model.d2t)
    found = {
        "tokens": tokens,
        "taps": taps,
        "anchors": torch.tensor(case.ANCHORS),
        "logits": logits,
        "states": hidden[0],
    }
    found |= {"proposals": proposals}
    return model, found | {"embedding": model.embed_tokens.weight.detach(), "lm_head": model.lm_head.weight.detach()}


if __name__ == "__main__":
    out, used = case.arguments("dflash", "specforge").out, case.versions("torch", "transformers")
    case.write_cases(out, SPECFORGE, specforge, f"SpecForge a6b6b02, {used}")
    case.write_cases(out, SPECULATORS, speculators, f"speculators c754d4c, {used}")
