"""Make the golden fixtures under tests/golden/mlp/: tiny MLP speculators and the outputs of fms-extras.

The numbers are those of `MLPSpeculator` (fms_extras/models/speculator.py), with which the published heads were trained.
A case is a folder with the checkpoint in the form of published ones, and golden.safetensors, fp32 or int64 (T = 12):

    tokens     [1, T]         the token after each position
    states     [1, T, H]      the target's final states after its norm
    proposals  [T, K]         the greedy chain from each position
    logits     [T, K, V]      of each stage, given the tokens before it

It needs an environment of its own:

    python -m venv mlp-env
    mlp-env/bin/pip install torch==2.13.0 safetensors ibm-fms==0.0.6
    mlp-env/bin/pip install --no-deps git+https://github.com/foundation-model-stack/fms-extras
    ATEN_CPU_CAPABILITY=avx2 mlp-env/bin/python scripts/golden/make_mlp_golden.py --out tests/golden/mlp
"""

import json
from functools import partial
from pathlib import Path

import torch
from case import HIDDEN, VOCAB, arguments, save_case, versions
from fms_extras.models.speculator import MLPSpeculator
from safetensors.torch import save_file

CASES = {  # like ibm-ai-platform/llama3-8b-accelerator, ibm-granite's heads, and the defaults
    "tied": {"inner_dim": 40, "n_predict": 4, "tie_weights": True, "scale_input": True},
    "untied": {"inner_dim": 40, "n_predict": 3, "tie_weights": False, "scale_input": True},
    "as_wide": {"inner_dim": 0, "n_predict": 2, "tie_weights": False, "scale_input": False},
}
POSITIONS = 12


def save(model: MLPSpeculator, options: dict, folder: Path) -> None:
    described = {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"}
    described |= {"emb_dim": HIDDEN, "vocab_size": VOCAB, "n_candidates": 4}
    described |= {"top_k_tokens_per_head": [2] * options["n_predict"]} | options
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    tensors = {f"speculator.{key}": value.clone() for key, value in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors")


@torch.no_grad()
def main() -> None:
    out, generator = arguments("mlp").out, torch.Generator().manual_seed(404)
    for name, options in CASES.items():
        model = MLPSpeculator(emb_dim=HIDDEN, vocab_size=VOCAB, **options).eval()
        model.reset_parameters()  # sets the norms to 1 and 0
        for weight in dict.fromkeys(model.parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(weight.round() + 0.3 * noise if weight.dim() == 1 else noise * weight.shape[-1] ** -0.5)
        tokens = torch.randint(VOCAB, (1, POSITIONS), generator=generator)
        states = torch.randn(1, POSITIONS, HIDDEN, generator=generator) * 3
        stages, proposals, logits = options["n_predict"], [], []
        for position in range(POSITIONS):
            row, token = states[:, position : position + 1], tokens[:, position : position + 1]
            chain = model.generate_suffixes(row.clone(), token, topk=[1] * stages, n=1).reshape(stages).long()
            proposals.append(chain)
            logits.append(model(row.clone(), torch.cat((token[0], chain))[None]).reshape(stages, VOCAB))
        numbers = {"tokens": tokens, "states": states, "proposals": torch.stack(proposals)}
        numbers |= {"logits": torch.stack(logits)}
        save_case(out / name, partial(save, model, options), numbers, versions("ibm-fms", "torch"), "proposals")


if __name__ == "__main__":
    main()
