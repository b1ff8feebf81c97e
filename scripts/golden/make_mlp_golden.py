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

import argparse
import json
import shutil
from importlib.metadata import version
from pathlib import Path

import torch
from fms_extras.models.speculator import MLPSpeculator
from safetensors.torch import save_file

CASES = {  # like ibm-ai-platform/llama3-8b-accelerator, ibm-granite's heads, and the defaults
    "tied": {"inner_dim": 40, "n_predict": 4, "tie_weights": True, "scale_input": True},
    "untied": {"inner_dim": 40, "n_predict": 3, "tie_weights": False, "scale_input": True},
    "as_wide": {"inner_dim": 0, "n_predict": 2, "tie_weights": False, "scale_input": False},
}
POSITIONS, WIDTH, TOKENS = 12, 64, 96


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description="Make the golden MLP speculators from fms-extras' MLPSpeculator.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the fixtures; it is replaced")
    out = parser.parse_args().out
    shutil.rmtree(out, ignore_errors=True)
    made_with = ", ".join(f"{name} {version(name)}" for name in ("ibm-fms", "torch"))
    generator = torch.Generator().manual_seed(404)
    for name, options in CASES.items():
        model = MLPSpeculator(emb_dim=WIDTH, vocab_size=TOKENS, **options).eval()
        model.reset_parameters()  # sets the norms to 1 and 0
        for weight in dict.fromkeys(model.parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(weight.round() + 0.3 * noise if weight.dim() == 1 else noise * weight.shape[-1] ** -0.5)
        tokens = torch.randint(TOKENS, (1, POSITIONS), generator=generator)
        states = torch.randn(1, POSITIONS, WIDTH, generator=generator) * 3
        stages, proposals, logits = options["n_predict"], [], []
        for position in range(POSITIONS):
            row, token = states[:, position : position + 1], tokens[:, position : position + 1]
            chain = model.generate_suffixes(row.clone(), token, topk=[1] * stages, n=1).reshape(stages).long()
            proposals.append(chain)
            logits.append(model(row.clone(), torch.cat((token[0], chain))[None]).reshape(stages, TOKENS))
        numbers = {"tokens": tokens, "states": states, "proposals": torch.stack(proposals)}
        (out / name).mkdir(parents=True)
        numbers["logits"] = torch.stack(logits)
        save_file(numbers, out / name / "golden.safetensors", {"made_with": made_with})
        described = {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"}
        described |= {"emb_dim": WIDTH, "vocab_size": TOKENS, "n_candidates": 4, "top_k_tokens_per_head": [2] * stages}
        (out / name / "config.json").write_text(json.dumps(described | options, indent=2) + "\n")
        tensors = {f"speculator.{key}": value.clone() for key, value in model.named_parameters()}
        save_file(tensors, out / name / "model.safetensors")
        print(name, len(tensors), float(numbers["logits"].std()))


if __name__ == "__main__":
    main()
