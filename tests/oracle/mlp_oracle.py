"""The oracle of MLP speculators: compares the head with the formulas of its paper, computed in double precision
with elementary operations. ``tests/golden/mlp`` compares both with fms-extras."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from eagle3.export.draft.kinds.mlp_speculator.head import Head
from eagle3.export.draft.kinds.mlp_speculator.reading import EPSILON, SpeculatorDescription
from eagle3.export.twin.comparison import Comparison

WIDTH, INNER, TOKENS, ROUNDS = 48, 40, 96, 8
PARTS = ("embed_tokens.weight", "norm.weight", "shift", "lm_head.weight")


def compare(draft: SpeculatorDescription, _taps: int, _overridden: bool | None = None, seed: int = 0) -> Comparison:
    layer = type(draft.layer)(hidden_size=WIDTH if draft.layer.hidden_size == draft.width else INNER)
    small = replace(draft, layer=layer, width=WIDTH, target_vocab_size=TOKENS)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        head = Head(small, 1, small.stages)
        for name, tensor in head.named_parameters():
            wide = tensor.dim() > 1
            drawn = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(drawn * (1.5 / math.sqrt(tensor.shape[-1]) if wide else 0.5) + float(".norm." in name))
        compared = Comparison(ROUNDS)
        for position in range(ROUNDS):
            token = torch.randint(0, TOKENS, (1, 1), generator=generator)
            state = torch.randn(1, 1, WIDTH, generator=generator) * 4
            values = head.chain(token, state)
            expected = formulas(small, head.state_dict(), int(token), state[0, 0].double())
            for what, value, wanted in zip(("logits", "tap 0"), values, expected, strict=True):
                compared.add(what, position, value.double(), wanted[None], wanted[None])
    return compared


def formulas(
    draft: SpeculatorDescription, tensors: dict[str, Tensor], token: int, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute a greedy chain in double precision: token, state [H] -> logits [K, V] and states [K, inner]."""
    if draft.scales_input:
        state = state / (state @ state / len(state) + EPSILON).sqrt() / math.sqrt(2)
    kept = 2 ** (-1 / (2 * draft.stages))
    added = math.sqrt((1 - kept * kept) * draft.layer.hidden_size / 2)
    logits, states = [], []
    for stage in range(draft.stages):
        own, second = (0, min(stage, 1)) if draft.tied else (stage, stage)
        part = {name: tensors[f"stages.{own}.{name}"].double() for name in PARTS}
        x = tensors[f"proj.{second}.weight"].double() @ state + added / kept * part["embed_tokens.weight"][token]
        x = x / (x @ x / len(x) + EPSILON).sqrt() * part["norm.weight"] + part["shift"]
        state = x * (1 + torch.special.erf(x / math.sqrt(2))) / 2
        logits.append(part["lm_head.weight"] @ state)
        states.append(state)
        token = int(logits[-1].argmax())
    return torch.stack(logits), torch.stack(states)
