"""Make the golden fixtures under tests/golden/gguf/: tiny models with recurrent layers and short convolutions, and the
GGUF files that llama.cpp's own converter makes of them.

A case is a folder with config.json, model.safetensors and model.gguf, all of random numbers in float32, without a
tokenizer. ``qwen35`` has an MTP layer. The converter's sources come with llama-cpp-python. In the environment of the
tests:

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
    tar xzf llama_cpp_python-0.3.36.tar.gz
    python scripts/golden/make_gguf_golden.py --out tests/golden/gguf \\
        --llama-cpp llama_cpp_python-0.3.36/vendor/llama.cpp
"""

import argparse
import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Lfm2Config, Lfm2ForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

SIZE: dict[str, Any] = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
SIZE |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
QWEN35 = Qwen3_5TextConfig(
    **SIZE,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
)
LFM2 = Lfm2Config(**SIZE, layer_types=["conv", "full_attention", "conv", "full_attention"], block_multiple_of=16)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make GGUF files of tiny models by llama.cpp's own converter.")
    parser.add_argument("--llama-cpp", type=Path, required=True, help="folder of llama.cpp's sources")
    parser.add_argument("--out", type=Path, required=True, help="folder for the fixtures; it is replaced")
    flags = parser.parse_args()
    shutil.rmtree(flags.out, ignore_errors=True)
    for name, model in (("qwen35", Qwen3_5ForCausalLM(QWEN35)), ("lfm2", Lfm2ForCausalLM(LFM2))):
        folder = flags.out / name
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        tensors = _randomized(load_file(folder / "model.safetensors"))
        if name == "qwen35":
            tensors |= _mtp(tensors)
            fields = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(fields | {"mtp_num_hidden_layers": 1}, indent=2) + "\n")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        _convert(flags.llama_cpp, folder)


def _randomized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn_like(value) * 0.3 for name, value in sorted(tensors.items())}


def _mtp(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return an MTP layer under the names of published checkpoints: a layer of full attention, and what comes before
    and after it."""
    layer, width = "model.layers.2.", SIZE["hidden_size"]
    own = {
        f"mtp.layers.0.{name.removeprefix(layer)}": torch.randn_like(value) * 0.3
        for name, value in tensors.items()
        if name.startswith(layer)
    }
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    return (
        own | {"mtp.fc.weight": torch.randn(width, 2 * width)} | {f"mtp.{n}.weight": torch.randn(width) for n in norms}
    )


def _convert(llama_cpp: Path, folder: Path) -> None:
    """Run the converter in this process, with no tokenizer in place of the model's."""
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    from conversion.base import TextModel
    from conversion.lfm2 import LFM2Model
    from conversion.qwen import Qwen3_5TextModel

    for kind in (LFM2Model, Qwen3_5TextModel):
        kind.set_vocab = TextModel._set_vocab_none
    sys.argv = ["convert_hf_to_gguf.py", str(folder), "--outfile", str(folder / "model.gguf"), "--outtype", "f32"]
    runpy.run_path(str(llama_cpp / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    main()
