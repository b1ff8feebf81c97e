"""Packs tiny models as common quantization tools do.

The rule of each tool is implemented here, and the golden files confirm it. Codes are random, and the dense weights that
a loader must return are computed from them.
"""

import json
from functools import partial
from pathlib import Path

import torch
from random_checkpoints import random_model, save_random_draft
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from eagle3.export.configuration.config import ExportConfig
from eagle3.export.planning.plan import Plan, make_plan

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 8}
"""Widths that are multiples of 256, as CUDA's INT4 kernels require."""


def words(values: Tensor, bits: int) -> Tensor:
    """Pack values [R, C] into int32 [R, C * bits / 32], the lowest bits first; the last word is filled with zeros."""
    per_word = 32 // bits
    values = nn.functional.pad(values.long(), (0, -values.shape[1] % per_word)).unflatten(1, (-1, per_word))
    packed = (values << (bits * torch.arange(per_word))).sum(-1)
    return (packed - ((packed >> 31) << 32)).to(torch.int32)


def compressed_tensors(codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> dict[str, Tensor]:
    """Pack codes along a row, and zero points along the rows."""
    parts = {
        "weight_packed": words(codes, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor(codes.shape),
    }
    return parts if zero is None else parts | {"weight_zero_point": words(zero.t(), bits).t()}


def compressed_tensors_config(bits: int, group: int, symmetric: bool) -> dict:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False}
    weights |= {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    stored = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
    return stored | {"config_groups": {"group_0": scheme}, "ignore": ["lm_head"], "kv_cache_scheme": None}


def gptq(codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int, less: int = 1) -> dict[str, Tensor]:
    """Pack codes along the inputs, and zero points along the outputs. In the format v1 zero points are stored less
    1."""
    zero = torch.full(scale.shape, 1 << (bits - 1)) if zero is None else zero
    columns, groups = codes.shape[1], scale.shape[1]
    return {
        "qweight": words(codes, bits).t(),
        "qzeros": words(zero.t() - less, bits),
        "scales": scale.t(),
        "g_idx": (torch.arange(columns) // (columns // groups)).int(),
    }


def scattered_gptq(codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> dict[str, Tensor]:
    """Pack as with desc_act, which scatters the columns of a group. ``codes`` are sorted by groups."""
    parts, order = gptq(codes, scale, zero, bits), order_of(codes.shape[1])
    placed = torch.empty_like(codes).index_copy_(1, order, codes)
    return parts | {
        "qweight": words(placed, bits).t(),
        "g_idx": torch.empty_like(parts["g_idx"]).index_copy_(0, order, parts["g_idx"]),
    }


def order_of(columns: int) -> Tensor:
    """Return the columns ordered by their groups of 128, ascending within a group."""
    mixed = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
    return mixed.unflatten(0, (-1, 128)).sort(-1).values.flatten()


def gptq_config(bits: int, group: int, symmetric: bool, kind: str = "gptq") -> dict:
    stored = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": False}
    return stored | {"checkpoint_format": kind}


def awq(codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> dict[str, Tensor]:
    """Pack codes along the outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7 of each eight from the lowest bits on."""

    def mixed(values: Tensor) -> Tensor:
        return words(values.unflatten(1, (-1, 8))[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 4)

    zero = torch.full(scale.shape, 8) if zero is None else zero
    return {"qweight": mixed(codes.t()), "qzeros": mixed(zero.t()), "scales": scale.t()}


def awq_config(bits: int, group: int, symmetric: bool) -> dict:
    return {"quant_method": "awq", "bits": bits, "group_size": group, "zero_point": not symmetric, "version": "gemm"}


def gptq_with_zero_biases(codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> dict[str, Tensor]:
    """Pack as AutoGPTQ does, which writes a bias of zeros for every linear."""
    return gptq(codes, scale, zero, bits) | {"bias": torch.zeros(codes.shape[0], dtype=torch.float16)}


def without_g_idx(codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> dict[str, Tensor]:
    """Pack as AutoRound does."""
    return {part: value for part, value in gptq(codes, scale, zero, bits).items() if part != "g_idx"}


def auto_round_config(bits: int, group: int, symmetric: bool, packing: str = "auto_round:auto_gptq") -> dict:
    stored = {"quant_method": "auto-round", "bits": bits, "group_size": group, "sym": symmetric, "data_type": "int"}
    of_single = {"lm_head": {"bits": 16, "data_type": "float"}}
    return stored | {"packing_format": packing, "iters": 200, "autoround_version": "0.9.2", "extra_config": of_single}


FORMATS = {
    "compressed-tensors": (compressed_tensors, compressed_tensors_config),
    "gptq": (gptq, gptq_config),
    "gptq_v2": (partial(gptq, less=0), partial(gptq_config, kind="gptq_v2")),
    "awq": (awq, awq_config),
    "gptq zero biases": (gptq_with_zero_biases, gptq_config),
    "auto-round": (without_g_idx, auto_round_config),
    "auto-round awq": (awq, partial(auto_round_config, packing="auto_round:auto_awq")),
    "gptq desc_act": (scattered_gptq, lambda *scheme: gptq_config(*scheme) | {"desc_act": True}),
}


def dense(codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> Tensor:
    zero = torch.full(scale.shape, 1 << (bits - 1)) if zero is None else zero
    group = codes.shape[1] // scale.shape[1]
    scale, zero = (values.float().repeat_interleave(group, 1) for values in (scale, zero))
    return (codes - zero) * scale


def save_packed(folder: Path, name: str, bits: int, group: int, symmetric: bool, dtype=torch.float16, **sizes):
    """Return a Llama of transformers with the dequantized weights of random codes, in float32. Its folder has every
    linear except lm_head packed."""
    pack, config = FORMATS[name]
    model = random_model("llama3.1-8B", **sizes)
    with torch.no_grad():
        packed = {linear: _pack(module, pack, bits, group, symmetric, dtype) for linear, module in linears(model)}
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for linear, parts in packed.items():
        del tensors[f"{linear}.weight"]
        tensors |= {f"{linear}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, quantization_config=config(bits, group, symmetric))
    return model


def linears(model: nn.Module):
    return [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"]


def _pack(module: nn.Linear, pack, bits: int, group: int, symmetric: bool, dtype) -> dict[str, Tensor]:
    rows, columns = module.weight.shape
    groups = columns // (columns if group == -1 else group)
    codes = torch.randint(0, 1 << bits, (rows, columns))
    scale = ((0.5 + torch.rand(rows, groups)) * 4 / columns**0.5 / (1 << bits)).to(dtype)
    zero = None if symmetric else torch.randint(1, 1 << bits, (rows, groups))
    weight = dense(codes, scale, zero, bits)
    if pack is scattered_gptq:
        weight = torch.empty_like(weight).index_copy_(1, order_of(columns), weight)
    module.weight.copy_(weight)
    return pack(codes, scale, zero, bits)


def change_config(folder: Path, **fields) -> None:
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))


def planned(folder: Path, model, backend: str) -> Plan:
    """Return the plan of the target in ``folder`` with a random draft."""
    arch = "sm_90" if backend == "cuda" and not torch.cuda.is_available() else None
    draft = save_random_draft(folder / "draft", model.config, aux_layers=(0, 1, 2))
    folders = {"checkpoint": folder / "target", "draft": draft}
    config = ExportConfig("auto", output_dir=None, backend=backend, cuda_arch=arch, max_seq_len=64, **folders)
    return make_plan(config)
