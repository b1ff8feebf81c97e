"""Writes GGUF files as llama.cpp does. gguf-py writes no K-quants, so their blocks are packed here in the layout of
ggml-common.h, which ``gguf.dequantize`` reads."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

TYPES = gguf.GGMLQuantizationType


def six_bit_pairs(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Pack two arrays of codes from 0 to 63, uint8 [blocks, 8] each, into [blocks, 12]."""
    low_s, high_s, low_m, high_m = scales[:, :4], scales[:, 4:], minima[:, :4], minima[:, 4:]
    return np.concatenate(
        [low_s | high_s >> 4 << 6, low_m | high_m >> 4 << 6, (high_s & 15) | (high_m & 15) << 4], axis=1
    )


def nibbles(codes: np.ndarray) -> np.ndarray:
    """Pack uint8 [blocks, 256] into [blocks, 128]. Of each 64 codes, the first half is in the low nibbles."""
    pairs = (codes & 15).reshape(-1, 4, 2, 32)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)


def halves(*values: np.ndarray) -> np.ndarray:
    """Pack arrays of super-scales, float16 [blocks] each, into bytes [blocks, 2 per array]."""
    return np.stack(values, axis=1).astype(np.float16).view(np.uint8)


def q4_k(codes, scales, minima, d, d_min) -> np.ndarray:
    """Pack codes [blocks, 256] from 0 to 15, scales and minima [blocks, 8] from 0 to 63, d and d_min [blocks]."""
    return np.concatenate([halves(d, d_min), six_bit_pairs(scales, minima), nibbles(codes)], axis=1)


def q5_k(codes, scales, minima, d, d_min) -> np.ndarray:
    """Pack like ``q4_k``, with codes from 0 to 31."""
    high = (codes >> 4).reshape(-1, 8, 32) << np.arange(8, dtype=np.uint8)[:, None]
    high = np.bitwise_or.reduce(high, axis=1)
    return np.concatenate([halves(d, d_min), six_bit_pairs(scales, minima), high, nibbles(codes)], axis=1)


def q6_k(codes, scales, d) -> np.ndarray:
    """Pack codes [blocks, 256] from 0 to 63, scales int8 [blocks, 16], and d [blocks]."""
    quarters = codes.reshape(-1, 2, 4, 32)
    low = (quarters[:, :, :2] & 15) | (quarters[:, :, 2:] & 15) << 4
    high = np.bitwise_or.reduce(quarters >> 4 << np.array([0, 2, 4, 6], dtype=np.uint8)[:, None], axis=2)
    return np.concatenate([low.reshape(-1, 128), high.reshape(-1, 64), scales.view(np.uint8), halves(d)], axis=1)


def random_blocks(kind: str, n: int, k: int, seed: int = 0) -> np.ndarray:
    """Return random blocks in which all codes occur, and extreme values and both signs of minima and scales: uint8 [n,
    bytes of a row]."""
    random, blocks = np.random.default_rng(seed), n * k // 256

    def whole(low: int, high: int, *shape: int, dtype=np.uint8) -> np.ndarray:
        return random.integers(low, high, (blocks, *shape), dtype=dtype, endpoint=True)

    d, d_min = (random.uniform(0, 0.01, blocks) for _ in range(2))
    if kind == "Q6_K":
        packed = q6_k(whole(0, 63, 256), whole(-128, 127, 16, dtype=np.int8), d)
    elif kind == "Q5_K":
        packed = q5_k(whole(0, 31, 256), whole(0, 63, 8), whole(0, 63, 8), d, d_min)
    else:
        packed = q4_k(whole(0, 15, 256), whole(0, 63, 8), whole(0, 63, 8), d, d_min)
    return packed.reshape(n, -1)


def quantized(weight: Tensor, kind: str) -> np.ndarray:
    """Quantize a weight [N, K] by rounding to nearest. Returns the blocks of its rows, uint8 [N, bytes of a row]."""
    n = weight.shape[0]
    w = weight.float().numpy().reshape(-1, 256)
    if kind == "Q6_K":
        groups = w.reshape(-1, 16, 16)
        scale = np.abs(groups).max(2) / 31
        d = (scale.max(1) / 127).astype(np.float16).astype(np.float32)
        scales = np.round(scale / np.maximum(d, 1e-30)[:, None]).clip(0, 127).astype(np.int8)
        step = (d[:, None] * scales)[:, :, None]
        codes = np.round(groups / np.maximum(step, 1e-30)).clip(-32, 31) + 32
        return q6_k(codes.reshape(-1, 256).astype(np.uint8), scales, d).reshape(n, -1)
    top = {"Q4_K": 15, "Q5_K": 31}[kind]
    groups = w.reshape(-1, 8, 32)
    least = np.maximum(-groups.min(2), 0)
    scale = (groups.max(2) + least) / top
    d, d_min = ((x.max(1) / 63).astype(np.float16).astype(np.float32) for x in (scale, least))
    scales, minima = (
        np.round(x / np.maximum(by, 1e-30)[:, None]).clip(0, 63).astype(np.uint8)
        for x, by in ((scale, d), (least, d_min))
    )
    step, offset = ((by[:, None] * x)[:, :, None] for by, x in ((d, scales), (d_min, minima)))
    codes = np.round((groups + offset) / np.maximum(step, 1e-30)).clip(0, top).astype(np.uint8)
    return {"Q4_K": q4_k, "Q5_K": q5_k}[kind](codes.reshape(-1, 256), scales, minima, d, d_min).reshape(n, -1)


def as_read(weight: Tensor, kind: str) -> Tensor:
    """Return ``weight`` after quantization to ``kind`` and dequantization by gguf-py."""
    if kind in ("F32", "F16", "BF16"):
        return weight.to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]).float()
    return torch.from_numpy(gguf.dequantize(blocks_of(weight, kind), TYPES[kind]))


def blocks_of(weight: Tensor, kind: str) -> np.ndarray:
    return quantized(weight, kind) if kind.endswith("_K") else gguf.quantize(weight.float().numpy(), TYPES[kind])


def write_gguf(path: Path, architecture: str, fields: dict[str, Any], tensors: dict[str, tuple[Tensor, str]]) -> Path:
    """Write a GGUF file. ``tensors`` maps the file's names to tensors and their storage types. ``fields`` are prefixed
    with the architecture's name, except those that begin with a dot."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        key = key[1:] if key.startswith(".") else f"{architecture}.{key}"
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        kinds.get(type(value), writer.add_array)(key, value)
    for name, (value, kind) in tensors.items():
        if kind in ("F32", "F16"):
            writer.add_tensor(name, value.to({"F32": torch.float32, "F16": torch.float16}[kind]).numpy())
        else:
            writer.add_tensor(name, blocks_of(value, kind), raw_dtype=TYPES[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def transformers_gguf(
    path: Path,
    model: torch.nn.Module,
    architecture: str,
    kinds: dict[str, str],
    rope_freqs: Tensor | None = None,
    fields: dict[str, Any] | None = None,
    rows: int | None = None,
) -> Path:
    """Write a transformers model as llama.cpp's converter does (``LlamaModel`` and others there). ``kinds`` has the
    same meaning as in ``gemma4_gguf``. ``fields`` change its metadata, and None removes a key; ``rows`` is the number
    of rows of the embedding and the head."""
    config = model.config
    (kind,) = (kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    tensors = {}
    for name, value in model.state_dict().items():
        stem, part = name.rsplit(".", 1)
        if stem == "lm_head" and config.tie_word_embeddings:
            continue
        if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
            value = value.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            value = value + 1
        if architecture == "qwen35":
            name, value = qwen35_stored(name, value, config)
            stem, part = name.rsplit(".", 1)
        if stem in ("model.embed_tokens", "lm_head"):
            value = value[:rows]
        own = f"{names.get_name(stem)}.{part}" if names.get_name(stem) else names.get_name(name)
        value = value.squeeze(1) if value.ndim == 3 else value
        fitting = [kind for end, kind in kinds.items() if own.endswith(end)] if value.ndim == 2 else []
        tensors[own] = value.float().contiguous(), fitting[0] if fitting else "F32"
    rope = config.rope_parameters
    if rope_freqs is None and rope.get("rope_type") == "llama3":
        plain = rope["rope_theta"] ** -(torch.arange(config.head_dim // 2) / (config.head_dim // 2))
        rope_freqs = plain / model.model.rotary_emb.inv_freq
    if rope_freqs is not None:
        tensors["rope_freqs.weight"] = rope_freqs, "F32"
    metadata = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None) or config.norm_eps,
        "rope.freq_base": rope.get("full_attention", rope)["rope_theta"],
        ".general.type": "model",
    }
    if architecture == "qwen35":
        metadata |= {
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "ssm.state_size": config.linear_key_head_dim,
            "ssm.group_count": config.linear_num_key_heads,
            "ssm.time_step_rank": config.linear_num_value_heads,
            "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
            "rope.dimension_count": int(config.head_dim * rope["partial_rotary_factor"]),
        }
    if getattr(config, "head_dim", None):
        metadata |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    metadata = {key: value for key, value in (metadata | (fields or {})).items() if value is not None}
    return write_gguf(path, architecture, metadata, tensors)


def qwen35_stored(name: str, value: Tensor, config: Any) -> tuple[str, Tensor]:
    """Return the name that gguf-py's map knows for a tensor of Qwen3.5, and the tensor as llama.cpp's converter stores
    it: value heads in the order of their number within a group, decays in place of their logarithms, norms with one
    added."""
    stem, _, part = name.rpartition(".linear_attn.")
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    first = 2 * keys * config.linear_key_head_dim

    def tiled(rows: Tensor, width: int) -> Tensor:
        return rows.unflatten(0, (keys, heads // keys, width)).transpose(0, 1).flatten(0, 2)

    if not stem:
        return name, value + 1 if name.endswith("norm.weight") else value
    if part in ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight"):
        value = tiled(value, 1)
    elif part in ("in_proj_qkv.weight", "conv1d.weight"):
        value = torch.cat((value[:first], tiled(value[first:], config.linear_value_head_dim)))
    elif part == "in_proj_z.weight":
        value = tiled(value, config.linear_value_head_dim)
    elif part == "out_proj.weight":
        value = tiled(value.T, config.linear_value_head_dim).T
    value = -value.exp() if part == "A_log" else value
    return name.replace("dt_bias", "dt_proj.bias"), value


def gemma4_gguf(
    path: Path,
    model: torch.nn.Module,
    kinds: dict[str, str],
    fields: dict[str, Any] | None = None,
    others: dict[str, tuple[Tensor, str]] | None = None,
) -> Path:
    """Write a transformers Gemma 4 without experts as llama.cpp's converter does (``Gemma4Model`` there).

    ``kinds`` maps ends of tensor names to the types of matrices; all others are F32. ``others`` are further tensors
    with their types.
    """
    config = model.config
    full = config.layer_types.index("full_attention")
    sliding = config.layer_types.index("sliding_attention")
    layers = config.per_layer_config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, config.num_hidden_layers)
    tensors = {}
    for name, value in model.state_dict().items():
        stem = name.removesuffix(".weight")
        if stem == "lm_head" and config.tie_word_embeddings:
            continue
        own = names.get_name(stem) + ".weight"
        fitting = [kind for end, kind in kinds.items() if own.endswith(end)] if value.ndim == 2 else []
        tensors[own] = value.float(), fitting[0] if fitting else "F32"
    rope = config.rope_parameters
    rotated = int(layers[full].head_dim * rope["full_attention"]["partial_rotary_factor"] / 2)
    factors = torch.full((layers[full].head_dim // 2,), 1e30)
    factors[:rotated] = 1
    tensors["rope_freqs.weight"] = factors, "F32"
    metadata = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [layer.num_key_value_heads for layer in layers],
        "attention.key_length": layers[full].head_dim,
        "attention.value_length": layers[full].head_dim,
        "attention.key_length_swa": layers[sliding].head_dim,
        "attention.value_length_swa": layers[sliding].head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
        "rope.freq_base": rope["full_attention"]["rope_theta"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
        "rope.dimension_count": layers[full].head_dim,
        "rope.dimension_count_swa": layers[sliding].head_dim,
        "final_logit_softcapping": config.final_logit_softcapping,
        ".general.type": "model",
    }
    return write_gguf(path, "gemma4", metadata | (fields or {}), tensors | (others or {}))
