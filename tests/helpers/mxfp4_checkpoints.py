"""Writes a checkpoint of gpt-oss with experts in MXFP4."""

import torch
from random_checkpoints import random_model
from safetensors.torch import save_file


def mxfp4_checkpoint(folder) -> None:
    """Write a small gpt-oss in the published form, with experts in blocks."""
    model = random_model("gpt-oss-20b", num_hidden_layers=2).to(torch.bfloat16)
    model.config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    tensors = dict(model.state_dict())
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        experts, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 126, (experts, rows, columns // 32), dtype=torch.uint8)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = ["GptOssForCausalLM"]
    model.config.save_pretrained(folder)
