"""Make the golden fixtures under tests/golden/dflash/: tiny random heads of the DFlash family and the outputs of
speculators.

The numbers are those of speculators 0.9.0's `DFlashDraftModel` and the classes of DFlash2, DSpark and xPress. Their
forward is for training only: it drafts a block after each of several random anchors and returns a loss. Here the loss
mask permits only the anchors ANCHORS, and the result of `_backbone_forward`, from which the loss is computed, is read.
DFlash2 and DSpark score a row by the token before it, which in training is the text's own token. Here the model's head
or selector is run row by row with the best token. xPress's forward runs several rounds, each with the best tokens of
the round before; here it runs as many as the head has passes, and their logits are read before the loss. A case is a
folder as in make_draft_golden.py, and this script needs the same environment:

    export ATEN_CPU_CAPABILITY=avx2 HF_HUB_OFFLINE=1
    golden-env/bin/python scripts/golden/make_dflash_golden.py --out tests/golden/dflash

    tokens     [1, T]               target-vocabulary ids; the block after position p begins with tokens[p]
    taps       [1, T, 3H]           the target's hidden states at the three aux layers, concatenated
    anchors    [A]                  the positions of the blocks' first rows; a block sees the taps before it
    logits     [A, B, V_draft]      of every row of each block
    states     [A, B, H]            the states after the last norm
    proposals  [A, B - 1 or B]      the greedy tokens, as target-vocabulary ids
    embedding, lm_head [V, H]       the target's tensors, which the checkpoint lacks or has only in part
"""

from functools import partial
from itertools import pairwise
from unittest.mock import patch

import torch
from make_draft_golden import AUX_IDS, DRAFT_VOCAB, HIDDEN, LAYER, VOCAB, write_cases
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.xpress import XPressDraftModel, XPressSpeculatorConfig, core
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
from transformers import Qwen3Config

SLOTS, BLOCK, MASK_TOKEN, WINDOW = 32, 5, 95, 6
ANCHORS = [2, 5, 6, 9, 14, 21, 26]  # positions inside the first window, at its ends, and after two windows
LAYERS = partial(Qwen3Config, num_hidden_layers=2)
SLIDING = {"sliding_window": WINDOW, "use_sliding_window": True}
MIXED = partial(LAYERS, **SLIDING, layer_types=["sliding_attention", "full_attention"])
REDUCED, WHOLE = {"draft_vocab_size": DRAFT_VOCAB}, {"draft_vocab_size": VOCAB}
CLASSES = {
    "dflash": (DFlashDraftModel, DFlashSpeculatorConfig),
    "dflash2": (DFlash2DraftModel, DFlash2SpeculatorConfig),
    "dspark": (DSparkDraftModel, DSparkSpeculatorConfig),
    "xpress": (XPressDraftModel, XPressSpeculatorConfig),
}
ONE, MARKOV, REFINER = partial(Qwen3Config, num_hidden_layers=1), {"markov_rank": 8}, {"xpress_rank": 8}
FEW, WIDER = {"num_jacobi_passes": 2}, {"xpress_mlp_ratio": 3}
CASES = {  # the seeds are the first from 704 on without a near-tie
    "dflash_full": (LAYERS, REDUCED, 946),
    "dflash_causal_window": (MIXED, REDUCED | {"sample_from_anchor": True}, 709),
    "dflash_window": (partial(MIXED, attention_bias=True), WHOLE | {"sliding_window_non_causal": True}, 1428),
    "dflash2": (MIXED, WHOLE | {"selector_rank": 8, "selector_top_k": 6}, 704),
    "dspark": (ONE, REDUCED | MARKOV, 707),
    "dspark_gated": (ONE, WHOLE | MARKOV | {"markov_head_type": "gated", "sample_from_anchor": False}, 743),
    "dspark_rnn": (ONE, REDUCED | MARKOV | {"markov_head_type": "rnn"}, 724),
    "xpress": (ONE, REDUCED | REFINER | FEW, 704),
    "xpress_settled": (MIXED, WHOLE | REFINER | WIDER | {"sliding_window_non_causal": True}, 704),
    "xpress_anchor": (MIXED, REDUCED | REFINER | FEW | {"sample_from_anchor": True}, 707),
}


def build_model(layer_class: type, options: dict, generator: torch.Generator) -> DFlashDraftModel:
    named = {"markov_rank": "dspark", "selector_rank": "dflash2", "xpress_rank": "xpress"}
    kind = next((kind for key, kind in named.items() if key in options), "dflash")
    model_class, config_class = CLASSES[kind]
    anchored = options.get("sample_from_anchor", kind == "dspark")
    config = config_class(
        transformer_layer_config=layer_class(**LAYER),
        block_size=BLOCK,
        aux_hidden_state_layer_ids=AUX_IDS,
        mask_token_id=MASK_TOKEN,
        speculators_config=SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1 + anchored)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="tiny-verifier", architectures=["LlamaForCausalLM"]),
        ),
        **options,
    )
    model = model_class(config).eval()
    if model.use_draft_vocab:
        counts = torch.randperm(VOCAB, generator=generator).tolist()
        d2t, t2d = build_vocab_mappings_from_distribution(dict(enumerate(counts)), DRAFT_VOCAB, VOCAB)
        model.load_vocab_mappings(t2d, d2t)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        tables = "embed_tokens.weight", "codebook", "markov_w1.weight", "token_embed.weight"
        scale = 1.0 if name.endswith(tables) else weight.shape[-1] ** -0.5
        if weight.dim() == 1:
            weight.copy_(0.3 * noise + (0 if name.endswith("bias") else 1))
        else:
            weight.copy_(noise * scale)
        if name.endswith("base_kernel"):
            weight[:, 0] += 1
    model.embed_tokens.weight[MASK_TOKEN] *= 0.05  # a row's token then depends on its attention
    for layer in model.layers:
        layer.self_attn.q_norm.weight *= 2
    return model


def walked(model: DFlashDraftModel, logits: torch.Tensor, states: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """Return the logits [A, B, V] of a DSpark or DFlash2, each row given the best token of the row before."""
    markov, selector = (getattr(model, name, None) for name in ("markov_head", "candidate_selector"))
    if markov is None and selector is None:
        return logits
    before, found = anchors[:, None].repeat(1, BLOCK), logits.clone()
    for row in range(0 if model.config.sample_from_anchor else 1, BLOCK):
        if markov is not None:
            bias = markov.block_bias(prev_token_ids=before, hidden_states=states)
            found[:, row] += bias[:, row]
        else:
            ids, scores = (each[:, row] for each in selector.select(logits, states, before))
            found[:, row] = (scores.amin(-1, keepdim=True) - 1).expand(-1, VOCAB).scatter(-1, ids, scores)
        best = found[:, row].argmax(-1)
        if row + 1 < BLOCK:
            before[:, row + 1] = best if model.d2t is None else best + model.d2t[best]
    return found


def rounds(model: XPressDraftModel, given: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return the initial logits [A, B, V] of an xPress, and the logits of each of its passes."""
    seen = []

    def caught(_forced: torch.Tensor, passes: list, base: torch.Tensor, *_args: object, **_keys: object) -> tuple:
        seen.extend((base, *passes))
        return torch.zeros(()), {}

    with patch.object(core, "compute_metrics", caught):
        model(*given, max_anchors=len(ANCHORS), consistency_passes=model.config.num_jacobi_passes)
    return [each.unflatten(1, (-1, BLOCK))[0] for each in seen]


def check_passes(model: XPressDraftModel, passes: list[torch.Tensor]) -> None:
    """Check that no pass has a near-tie, and that each pass changes a token as long as one can change."""
    proposing = [each[:, 0 if model.config.sample_from_anchor else 1 :] for each in passes]
    best = torch.stack(proposing).topk(2).values
    assert (best[..., 0] - best[..., 1]).min() > 0.003, "a pass is too close to a tie to be compared"
    ids = [each.argmax(-1) for each in proposing]
    changed = [bool((one != other).any()) for one, other in pairwise(ids)]
    can = len(proposing[0][0])
    assert all(changed[: min(can, 3)]) and not any(changed[can:]), "one pass more or less would give the same tokens"


def golden(model: DFlashDraftModel, generator: torch.Generator) -> dict[str, torch.Tensor]:
    tokens = torch.randint(VOCAB - 1, (1, SLOTS), generator=generator)
    taps = torch.randn(1, SLOTS, len(AUX_IDS) * HIDDEN, generator=generator)
    mask = torch.zeros(1, SLOTS, dtype=torch.bool)
    mask[0, ANCHORS] = True
    final = torch.zeros(1, SLOTS, HIDDEN)  # only the loss reads these states
    documents = torch.zeros_like(tokens)
    given = taps, tokens, mask, final, documents
    hidden, logits, *_ = model._backbone_forward(*given, max_anchors=len(ANCHORS))
    logits, states = logits.unflatten(1, (-1, BLOCK))[0], hidden.unflatten(1, (-1, BLOCK))[0]
    if isinstance(model, XPressDraftModel):
        passes = rounds(model, given)
        assert torch.equal(passes[0], logits)
        check_passes(model, passes)
        logits = passes[-1]
    logits = walked(model, logits, states, tokens[0, ANCHORS])
    proposing = logits[:, 0 if model.config.sample_from_anchor else 1 :]
    best = proposing.topk(2).values
    assert (best[..., 0] - best[..., 1]).min() > 0.003, "too close to a tie to be compared"
    ids = proposing.argmax(-1)
    assert all(len(set(block)) > 2 for block in ids.tolist()), "blocks with few different tokens would hide mistakes"
    return {
        "tokens": tokens,
        "taps": taps,
        "anchors": torch.tensor(ANCHORS),
        "logits": logits,
        "states": states,
        "proposals": ids if model.d2t is None else ids + model.d2t[ids],
        "embedding": model.embed_tokens.weight.detach(),
        "lm_head": model.lm_head.weight.detach(),
    }


if __name__ == "__main__":
    write_cases(CASES, build_model, golden, "proposals", "DFlash models")
