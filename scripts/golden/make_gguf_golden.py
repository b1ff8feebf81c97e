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

import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from case import arguments
from safetensors.torch import load_file, save_file
from torch import Tensor

SIZE: dict[str, Any] = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
SIZE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
SIZE |= {"tie_word_embeddings": False}
TIED = {"tie_word_embeddings": True}
DELTA: dict[str, Any] = {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6}
DELTA |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
DELTA |= {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 20}
CONV: dict[str, Any] = {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}
GRANITE: dict[str, Any] = {"layer_types": ["mamba", "attention", "mamba", "mamba"], "shared_intermediate_size": 20}
GRANITE |= {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_head": 16, "mamba_d_state": 8, "logits_scaling": 3.0}
GRANITE |= {"attention_multiplier": 0.125, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
GRANITE |= {"position_embedding_type": "nope", "num_local_experts": 4}
NEMOTRON: dict[str, Any] = {"layers_block_type": ["mamba", "attention", "moe", "mamba"], "head_dim": 8}
NEMOTRON |= {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8, "n_routed_experts": 4}
NEMOTRON |= {"num_experts_per_tok": 2, "moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 20}
NEMOTRON |= {"norm_topk_prob": True, "routed_scaling_factor": 2.5}
GEMMA4: dict[str, Any] = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 64}
GEMMA4 |= {"head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
GEMMA4 |= {"hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
GEMMA4 |= {"moe_intermediate_size": 12}
DENSE_NEMOTRON = NEMOTRON | {"layers_block_type": ["mamba", "attention", "mlp", "mamba"]}
DENSE_GRANITE = GRANITE | {"num_local_experts": 0, "num_experts_per_tok": 0}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {  # transformers' model, its configuration, fields
    "qwen35": ("Qwen3_5", "TextConfig", DELTA),
    "lfm2": ("Lfm2", "Config", CONV | {"block_multiple_of": 16}),
    "lfm2moe": ("Lfm2Moe", "Config", CONV | EXPERTS | TIED | {"num_dense_layers": 1}),
    "granitehybrid": ("GraniteMoeHybrid", "Config", GRANITE),
    "granitehybrid-dense": ("GraniteMoeHybrid", "Config", DENSE_GRANITE),
    "gemma4-moe": ("Gemma4", "TextConfig", GEMMA4 | TIED),
    "nemotron_h": ("NemotronH", "Config", DENSE_NEMOTRON),
    "nemotron_h_moe": ("NemotronH", "Config", NEMOTRON),
    "qwen3moe": ("Qwen3Moe", "Config", EXPERTS | {"head_dim": 16, "norm_topk_prob": True}),
    "qwen35moe": ("Qwen3_5Moe", "TextConfig", DELTA | SHARED),
    "qwen3next": ("Qwen3Next", "Config", DELTA | SHARED),
}


def main() -> None:
    given = arguments("gguf", "llama-cpp")
    sys.path.insert(0, str(given.llama_cpp / "gguf-py"))
    for name, (family, config, own) in CASES.items():
        folder = given.out / name
        shutil.rmtree(folder, ignore_errors=True)
        config = getattr(transformers, family + config)(**SIZE | own)
        getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
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
            fields["layers_block_type"] = own["layers_block_type"]
        (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        _convert(given.llama_cpp, folder)


def _randomized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn_like(value) * 0.3 for name, value in sorted(tensors.items())}


def _mtp(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return an MTP layer under the names of published checkpoints: a layer of full attention, and what comes before
    and after it."""
    layer, width = "model.layers.2.", SIZE["hidden_size"]
    copied = {name.replace(layer, "mtp.layers.0."): tensors[name] for name in tensors if name.startswith(layer)}
    own = {name: torch.randn_like(value) * 0.3 for name, value in copied.items()}
    own["mtp.fc.weight"] = torch.randn(width, 2 * width)
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    return own | {f"mtp.{name}.weight": torch.randn(width) for name in norms}


def _convert(llama_cpp: Path, folder: Path) -> None:
    """Run the converter in this process, with no tokenizer in place of the model's."""
    for name in [name for name in sys.modules if name.split(".")[0] == "conversion"]:
        del sys.modules[name]
    from conversion import gemma, granite, lfm2, nemotron, qwen
    from conversion.base import ModelBase, TextModel

    of_qwen = (qwen.Qwen3MoeModel, qwen.Qwen3NextModel, qwen.Qwen3_5TextModel, qwen.Qwen3_5MoeTextModel)
    others = (gemma.Gemma4Model, lfm2.LFM2Model, lfm2.LFM2MoeModel, granite.GraniteHybridModel, nemotron.NemotronHModel)
    for kind in of_qwen + others:
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
