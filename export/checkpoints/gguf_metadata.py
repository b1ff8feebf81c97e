"""Whether a GGUF file is of the model that a configuration describes: what its metadata says against ``config.json``.

The configuration is what is computed; the file has the sizes and constants that llama.cpp would compute with. Where the
two disagree one of them is of another model.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from eagle3.export.checkpoints.gguf_file import GGUFFile
from eagle3.targets.spec import layer_windows

_LIKELY = "likely not of the same model: type --config with the Hugging Face folder that the file was made from"
_UNROTATED = 1e30
"""By what llama.cpp divides the frequencies of dimensions that are not rotated."""


def check_metadata(file: GGUFFile, config: Any, folder: Path) -> None:
    """``config`` is transformers' text configuration in ``folder``. Raises ValueError naming the first value that
    disagrees, and both."""
    own = file.architecture.model_types
    if config.model_type not in own:
        raise ValueError(
            f"{file.path} is {file.field('general.architecture')} (for {' or '.join(own)}), but {folder} is a "
            f"{config.model_type}: {_LIKELY}"
        )
    for key, field, expected in _implied(config):
        found = file.field(f"{{arch}}.{key}")
        if found is not None and expected is not None and not _agree(found, expected):
            raise ValueError(
                f"{file.path}: {key} is {_shown(found, expected)}, but {folder / 'config.json'} implies "
                f"{_shown(expected, found)} ({field}): {_LIKELY}"
            )
    _check_rope_factors(file, config, folder)


def _implied(config: Any) -> Iterator[tuple[str, str, Any]]:
    """Key in the metadata, field in ``config.json``, the value there: one, or a list by layer."""
    windows = [window.tokens for window in layer_windows(config)]
    layers, full, sliding = config.per_layer_config, None, None
    for layer, window in zip(layers, windows, strict=True):
        full, sliding = (full, layer) if window else (layer, sliding)
    one = full or sliding
    width, heads = getattr(one, "head_dim", None), config.num_attention_heads
    ropes = _ropes(config)
    kv_heads = [getattr(layer, "num_key_value_heads", None) or heads for layer in layers]
    yield "block_count", "num_hidden_layers", config.num_hidden_layers
    yield "embedding_length", "hidden_size", config.hidden_size
    yield "feed_forward_length", "intermediate_size", config.intermediate_size
    yield "context_length", "max_position_embeddings", config.max_position_embeddings
    yield "vocab_size", "vocab_size", config.vocab_size
    yield "attention.head_count", "num_attention_heads", heads
    yield "attention.head_count_kv", "num_key_value_heads", kv_heads
    yield "attention.key_length", "head_dim", width
    yield "attention.value_length", "head_dim", width
    yield "attention.key_length_swa", "head_dim", getattr(sliding, "head_dim", None)
    yield "attention.value_length_swa", "head_dim", getattr(sliding, "head_dim", None)
    yield "attention.layer_norm_rms_epsilon", "rms_norm_eps", config.rms_norm_eps
    yield "attention.sliding_window", "sliding_window", max(windows) or None
    pattern = [bool(window) for window in windows] if full and sliding else None
    yield "attention.sliding_window_pattern", "layer_types", pattern
    yield "rope.freq_base", "rope_parameters", ropes["full_attention"].get("rope_theta")
    yield "rope.freq_base_swa", "rope_parameters", ropes["sliding_attention"].get("rope_theta")
    rope = ropes["full_attention"]
    kind = rope.get("rope_type") if rope.get("rope_type") in ("linear", "yarn", "longrope") else "none"
    yield "rope.scaling.type", "rope_parameters", kind
    yield "rope.scaling.factor", "rope_parameters", rope.get("factor") if kind != "none" else None
    yield "final_logit_softcapping", "final_logit_softcapping", getattr(config, "final_logit_softcapping", None)


def _ropes(config: Any) -> dict[str, dict[str, Any]]:
    """By kind of layer: one rope for all, or one each."""
    given = config.rope_parameters
    return {kind: given.get(kind, given) for kind in ("full_attention", "sliding_attention")}


def _agree(found: Any, expected: Any) -> bool:
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(_agree, found, expected))
    if isinstance(found, list):
        return all(_agree(each, expected) for each in found)
    if isinstance(expected, list):
        return all(_agree(found, each) for each in expected)
    if isinstance(found, str) or isinstance(expected, str):
        return found == expected
    return math.isclose(found, expected, rel_tol=1e-6)  # the file has float32


def _shown(value: Any, other: Any) -> str:
    """A value; of a list, what is at the first place where the two differ."""
    if isinstance(value, list):
        pairs = enumerate(zip(value, other if isinstance(other, list) else [other] * len(value), strict=False))
        layer = next((number for number, pair in pairs if not _agree(*pair)), None)
        return f"{len(value)} layers long" if layer is None else f"{value[layer]} for layer {layer}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _check_rope_factors(file: GGUFFile, config: Any, folder: Path) -> None:
    """The factors that llama.cpp divides the frequencies of full layers by, against transformers' own frequencies."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    factors = file.by_own_name("rope_freqs.weight")
    if factors is None:
        return
    rope = _ropes(config)["full_attention"]
    plain = rope["rope_theta"] ** -(torch.arange(len(factors)) / len(factors))
    own = torch.where(factors < _UNROTATED / 2, plain / factors, 0.0)
    kind, expected = rope.get("rope_type", "default"), plain
    if kind in ROPE_INIT_FUNCTIONS:
        by_layer = {} if rope is config.rope_parameters else {"layer_type": "full_attention"}
        expected, _ = ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"), **by_layer)
    if expected.shape != own.shape or not torch.allclose(own, expected, rtol=1e-4, atol=0):
        raise ValueError(f"{file.path}: its rope_freqs are not those of the {kind} rope in {folder}: {_LIKELY}")
