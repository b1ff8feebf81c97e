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

from itertools import pairwise
from unittest.mock import patch

import case
import torch
from make_draft_golden import LAYER
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.xpress import XPressDraftModel, XPressSpeculatorConfig, core
from transformers import Qwen3Config

TWO = {"num_hidden_layers": 2}
MIXED = TWO | {"sliding_window": 6, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
REDUCED, WHOLE = {"draft_vocab_size": case.DRAFT_VOCAB}, {"draft_vocab_size": case.VOCAB}
CLASSES = {
    "dflash": (DFlashDraftModel, DFlashSpeculatorConfig),
    "dflash2": (DFlash2DraftModel, DFlash2SpeculatorConfig),
    "dspark": (DSparkDraftModel, DSparkSpeculatorConfig),
    "xpress": (XPressDraftModel, XPressSpeculatorConfig),
}
MARKOV, REFINER, TOP = {"markov_rank": 8}, {"xpress_rank": 8}, {"selector_rank": 8, "selector_top_k": 6}
FEW, WIDER = {"num_jacobi_passes": 2}, {"xpress_mlp_ratio": 3}
ANCHORED, OPEN = {"sample_from_anchor": True}, {"sliding_window_non_causal": True}
CASES = {  # kind, options of the layers, options, seed: the first from 704 on without a near-tie
    "dflash_full": ("dflash", TWO, REDUCED, 946),
    "dflash_causal_window": ("dflash", MIXED, REDUCED | ANCHORED, 709),
    "dflash_window": ("dflash", MIXED | {"attention_bias": True}, WHOLE | OPEN, 1428),
    "dflash2": ("dflash2", MIXED, WHOLE | TOP, 704),
    "dspark": ("dspark", {}, REDUCED | MARKOV, 707),
    "dspark_gated": ("dspark", {}, WHOLE | MARKOV | {"markov_head_type": "gated", "sample_from_anchor": False}, 743),
    "dspark_rnn": ("dspark", {}, REDUCED | MARKOV | {"markov_head_type": "rnn"}, 724),
    "xpress": ("xpress", {}, REDUCED | REFINER | FEW, 704),
    "xpress_settled": ("xpress", MIXED, WHOLE | REFINER | WIDER | OPEN, 704),
    "xpress_anchor": ("xpress", MIXED, REDUCED | REFINER | FEW | ANCHORED, 707),
}


def build_model(kind: str, layer: dict, options: dict, generator: torch.Generator) -> DFlashDraftModel:
    model_class, config_class = CLASSES[kind]
    anchored = options.get("sample_from_anchor", kind == "dspark")
    config = config_class(
        transformer_layer_config=Qwen3Config(**LAYER | layer),
        block_size=case.BLOCK,
        aux_hidden_state_layer_ids=case.INPUTS,
        mask_token_id=case.MASK_TOKEN,
        speculators_config=case.speculators_config(kind, case.BLOCK - 1 + anchored),
        **options,
    )
    model = model_class(config).eval()
    if model.use_draft_vocab:
        case.load_vocabulary(model, generator)
    tables = "embed_tokens.weight", "codebook", "markov_w1.weight", "token_embed.weight"
    case.randomize(model, generator, tables)
    for name, weight in model.named_parameters():
        if name.endswith("base_kernel"):
            weight[:, 0] += 1
    model.embed_tokens.weight[case.MASK_TOKEN] *= 0.05  # a row's token then depends on its attention
    for layer in model.layers:
        layer.self_attn.q_norm.weight *= 2
    return model


def walked(model: DFlashDraftModel, logits: torch.Tensor, states: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """Return the logits [A, B, V] of a DSpark or DFlash2, each row given the best token of the row before."""
    markov, selector = (getattr(model, name, None) for name in ("markov_head", "candidate_selector"))
    if markov is None and selector is None:
        return logits
    before, found = anchors[:, None].repeat(1, case.BLOCK), logits.clone()
    for row in range(0 if model.config.sample_from_anchor else 1, case.BLOCK):
        if markov is not None:
            bias = markov.block_bias(prev_token_ids=before, hidden_states=states)
            found[:, row] += bias[:, row]
        else:
            ids, scores = (each[:, row] for each in selector.select(logits, states, before))
            found[:, row] = (scores.amin(-1, keepdim=True) - 1).expand(-1, case.VOCAB).scatter(-1, ids, scores)
        best = found[:, row].argmax(-1)
        if row + 1 < case.BLOCK:
            before[:, row + 1] = best if model.d2t is None else best + model.d2t[best]
    return found


def rounds(model: XPressDraftModel, given: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return the initial logits [A, B, V] of an xPress, and the logits of each of its passes."""
    seen = []

    def caught(_forced: torch.Tensor, passes: list, base: torch.Tensor, *_args: object, **_keys: object) -> tuple:
        seen.extend((base, *passes))
        return torch.zeros(()), {}

    with patch.object(core, "compute_metrics", caught):
        model(*given, max_anchors=len(case.ANCHORS), consistency_passes=model.config.num_jacobi_passes)
    return [each.unflatten(1, (-1, case.BLOCK))[0] for each in seen]


def check_passes(model: XPressDraftModel, passes: list[torch.Tensor]) -> None:
    """Check that no pass has a near-tie, and that each pass changes a token as long as one can change."""
    proposing = [each[:, 0 if model.config.sample_from_anchor else 1 :] for each in passes]
    ids = case.distinct(torch.stack(proposing), 0.003)
    changed = [bool((one != other).any()) for one, other in pairwise(ids)]
    can = len(proposing[0][0])
    assert all(changed[: min(can, 3)]) and not any(changed[can:]), "one pass more or less would give the same tokens"


def make(kind: str, layer: dict, options: dict, generator: torch.Generator) -> tuple:
    model = build_model(kind, layer, options, generator)
    tokens = torch.randint(case.VOCAB - 1, (1, case.BLOCK_SLOTS), generator=generator)
    taps = torch.randn(1, case.BLOCK_SLOTS, len(case.INPUTS) * case.HIDDEN, generator=generator)
    mask = torch.zeros(1, case.BLOCK_SLOTS, dtype=torch.bool)
    mask[0, case.ANCHORS] = True
    final = torch.zeros(1, case.BLOCK_SLOTS, case.HIDDEN)  # only the loss reads these states
    given = taps, tokens, mask, final, torch.zeros_like(tokens)
    hidden, logits, *_ = model._backbone_forward(*given, max_anchors=len(case.ANCHORS))
    logits, states = logits.unflatten(1, (-1, case.BLOCK))[0], hidden.unflatten(1, (-1, case.BLOCK))[0]
    if isinstance(model, XPressDraftModel):
        passes = rounds(model, given)
        assert torch.equal(passes[0], logits)
        check_passes(model, passes)
        logits = passes[-1]
    logits = walked(model, logits, states, tokens[0, case.ANCHORS])
    ids = case.distinct(logits[:, 0 if model.config.sample_from_anchor else 1 :], 0.003)
    case.check_varied(ids)
    found = {"tokens": tokens, "taps": taps, "anchors": torch.tensor(case.ANCHORS), "logits": logits, "states": states}
    found |= {"proposals": ids if model.d2t is None else ids + model.d2t[ids]}
    return model, found | {"embedding": model.embed_tokens.weight.detach(), "lm_head": model.lm_head.weight.detach()}


if __name__ == "__main__":
    case.write_cases(case.arguments("dflash").out, CASES, make, case.versions("speculators", "torch", "transformers"))
