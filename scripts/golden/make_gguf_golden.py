"""Make the golden fixtures under tests/golden/gguf/: tiny models with recurrent layers, short convolutions and experts,
and the GGUF files that llama.cpp's own converter makes of them.

A case is a folder with config.json, model.safetensors and model.gguf, all of random numbers in float32, without a
tokenizer. Models with layers of the gated delta rule have an MTP layer. The converter's sources come with
llama-cpp-python. In the environment of the tests:

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
from transformers import (
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

SIZE: dict[str, Any] = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
SIZE |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
TIED = {"tie_word_embeddings": True}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
SHARED: dict[str, Any] = {"shared_expert_intermediate_size": 20}
LFM2: dict[str, Any] = {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "block_multiple_of": 16}
GRANITE: dict[str, Any] = {
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "shared_intermediate_size": 20,
    "attention_multiplier": 0.125,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.0,
    "position_embedding_type": "nope",
}
NEMOTRON: dict[str, Any] = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 8,
    "head_dim": 8,
    "layers_block_type": ["mamba", "attention", "moe", "mamba"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 20,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
GEMMA4: dict[str, Any] = {
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 64,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 12,
}
DENSE_NEMOTRON = NEMOTRON | {"layers_block_type": ["mamba", "attention", "mlp", "mamba"]}
CASES: dict[str, tuple[type[PreTrainedModel], PreTrainedConfig]] = {
    "qwen35": (Qwen3_5ForCausalLM, Qwen3_5TextConfig(**SIZE, **DELTA)),
    "lfm2": (Lfm2ForCausalLM, Lfm2Config(**SIZE, **LFM2)),
    "lfm2moe": (
        Lfm2MoeForCausalLM,
        Lfm2MoeConfig(**SIZE | TIED, **EXPERTS, layer_types=LFM2["layer_types"], num_dense_layers=1),
    ),
    "granitehybrid": (GraniteMoeHybridForCausalLM, GraniteMoeHybridConfig(**SIZE, **GRANITE, num_local_experts=4)),
    "granitehybrid-dense": (
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig(**SIZE, **GRANITE, num_local_experts=0, num_experts_per_tok=0),
    ),
    "gemma4-moe": (Gemma4ForCausalLM, Gemma4TextConfig(**SIZE | TIED, **GEMMA4)),
    "nemotron_h": (NemotronHForCausalLM, NemotronHConfig(**SIZE, **DENSE_NEMOTRON)),
    "nemotron_h_moe": (NemotronHForCausalLM, NemotronHConfig(**SIZE, **NEMOTRON)),
    "qwen3moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZE, **EXPERTS, head_dim=16, norm_topk_prob=True)),
    "qwen35moe": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig(**SIZE, **DELTA, **EXPERTS, **SHARED)),
    "qwen3next": (Qwen3NextForCausalLM, Qwen3NextConfig(**SIZE, **DELTA, **EXPERTS, **SHARED)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make GGUF files of tiny models by llama.cpp's own converter.")
    parser.add_argument("--llama-cpp", type=Path, required=True, help="folder of llama.cpp's sources")
    parser.add_argument("--out", type=Path, required=True, help="folder for the fixtures; it is replaced")
    flags = parser.parse_args()
    shutil.rmtree(flags.out, ignore_errors=True)
    for name, (kind, config) in CASES.items():
        folder = flags.out / name
        kind(config).save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        tensors = _randomized(load_file(folder / "model.safetensors"))
        fields = json.loads((folder / "config.json").read_text())
        if hasattr(config, "linear_num_value_heads"):
            tensors |= _mtp(tensors)
            if name != "qwen3next":  # whose published files say nothing of it
                fields["mtp_num_hidden_layers"] = 1
        if name.startswith("granite"):  # as published, where transformers now writes names of its own
            fields["layer_types"] = GRANITE["layer_types"]
        if name.startswith("nemotron"):
            fields["layers_block_type"] = (NEMOTRON if name.endswith("moe") else DENSE_NEMOTRON)["layers_block_type"]
        (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
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
    for name in [name for name in sys.modules if name.split(".")[0] == "conversion"]:
        del sys.modules[name]
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    from conversion import gemma, granite, lfm2, nemotron, qwen
    from conversion.base import ModelBase, TextModel

    of_qwen = (qwen.Qwen3MoeModel, qwen.Qwen3NextModel, qwen.Qwen3_5TextModel, qwen.Qwen3_5MoeTextModel)
    for kind in (
        gemma.Gemma4Model,
        lfm2.LFM2Model,
        lfm2.LFM2MoeModel,
        granite.GraniteHybridModel,
        nemotron.NemotronHModel,
        *of_qwen,
    ):
        kind.set_vocab = TextModel._set_vocab_none
    if folder.name == "nemotron_h":  # its configuration in transformers has fields of experts that no file had
        fields = json.loads((folder / "config.json").read_text())
        of_experts = ("moe_intermediate_size", "n_group", "topk_group")
        fields = {key: value for key, value in fields.items() if "expert" not in key and key not in of_experts}
        fields["hybrid_override_pattern"] = "M*-M"  # the published form of layers_block_type
        ModelBase.load_hparams = staticmethod(lambda *_, **__: dict(fields))
    tokenizer = folder / "tokenizer.json"  # of which the converter of Gemma counts the tokens
    tokenizer.write_text(json.dumps({"model": {"vocab": list(range(SIZE["vocab_size"]))}, "added_tokens": []}))
    sys.argv = ["convert_hf_to_gguf.py", str(folder), "--outfile", str(folder / "model.gguf"), "--outtype", "f32"]
    runpy.run_path(str(llama_cpp / "convert_hf_to_gguf.py"), run_name="__main__")
    tokenizer.unlink()


if __name__ == "__main__":
    main()
