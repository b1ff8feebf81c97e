"""Compares a GGUF file's metadata with ``config.json``, so that a file of another model is refused.

The export computes what the configuration says; the file holds the sizes and constants that llama.cpp would use. Where
the two disagree, they belong to different models. A key that has no counterpart in the configuration is refused, unless
its value is 0 or empty.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from eagle3.export.checkpoints.gguf_file import GGUFFile
from eagle3.export.checkpoints.gguf_implied import HARMLESS, implied, ropes_of, rotates
from eagle3.export.checkpoints.json_fields import read_object
from eagle3.export.checkpoints.source import TensorHeader

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_LIKELY = "likely not of the same model: type --config with the Hugging Face folder that the file was made from"
_UNROTATED = 1e30
"""llama.cpp divides the frequencies of unrotated dimensions by this number."""
FACTORS: tuple[str, ...] = (
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "attention.scale",
    "rope.scaling.factor",
)
FACTORS += ("rope.scale_linear", "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor")
"""Keys whose value 0 makes llama.cpp use its own default."""
OVERRIDDEN = {"full_attention_interval": "attention.recurrent_layers"}
"""Keys that llama.cpp reads only if the file lacks another one. Its converter may write 4 for the first of them,
whatever the model has."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def check_metadata(file: GGUFFile, config: "PreTrainedConfig", folder: Path, stop_ids: tuple[int, ...] = ()) -> None:
    """Check a GGUF file against ``config``, transformers' text configuration in ``folder``, and against the folder's
    stop tokens ``stop_ids``. Raises ValueError naming the first key that disagrees, and both values."""
    own = file.architecture.model_types
    if config.model_type not in own:
        raise ValueError(
            f"{file.path} is {file.field('general.architecture')} (for {' or '.join(own)}), but {folder} is a "
            f"{config.model_type}: {_LIKELY}"
        )
    described = file.field("{arch}.context_length") is not None
    compared = set(HARMLESS)
    for key, field, expected, absent in implied(config):
        compared.add(key)
        found = file.layers if key == "block_count" else file.field(f"{{arch}}.{key}")
        if found is None and described:
            found = absent
        left_to_llama_cpp = found is None or (found == 0 and key in FACTORS)
        overridden = key in OVERRIDDEN and file.field(f"{{arch}}.{OVERRIDDEN[key]}") is not None
        if expected is None or left_to_llama_cpp or overridden or _may_be_cut(file, key, found, config):
            continue
        found = _by_layer(file, key, found, expected)
        if not _agree(found, expected):
            raise ValueError(
                f"{file.path}: {key} is {_shown(found, expected)}, but {folder / 'config.json'} implies "
                f"{_shown(expected, found)} ({field}): {_LIKELY}"
            )
    for key, value in file.own_fields().items():
        if key not in compared and value not in (None, 0, "", []):
            raise ValueError(
                f"{file.path}: {key} is {_shown(value, value)}, which is not read, and {folder / 'config.json'} says "
                f"nothing of it: {_LIKELY}, or name the weights in that folder"
            )
    _check_ids(file, config, folder, stop_ids)
    _check_rope_factors(file, config, folder, described)


def rows_of_embedding(
    file: GGUFFile, headers: dict[str, TensorHeader], config: "PreTrainedConfig", folder: Path
) -> int:
    """Return the number of tokens in the file's embedding: ``config.vocab_size``, or fewer if the converter left out
    the rows that belong to no token (Gemma 3's last 64). Raises ValueError if it left out rows of tokens."""
    rows = {headers[name].shape[0] for name in (EMBEDDING, HEAD) if name in headers and headers[name].shape}
    if not file.architecture.cuts_vocabulary or len(rows) != 1 or min(rows) >= config.vocab_size:
        return config.vocab_size
    (count,), known = rows, _tokens(file, folder)
    if known is not None and known > count:
        raise ValueError(
            f"{file.path}: its embedding has {count} rows, but the tokenizer has {known} tokens and "
            f"{folder / 'config.json'} implies {config.vocab_size} (vocab_size): {_LIKELY}"
        )
    return count


def template_note(file: GGUFFile, folder: Path) -> list[str]:
    """Return a line that says which chat template is used, if the file has one that differs from the folder's."""
    own, used = file.field("tokenizer.chat_template"), _template(folder)
    if not isinstance(own, str) or not own or own == used:
        return []
    if used is None:
        return [
            f"{file.path} has a chat template, which is not read, and {folder} has none: the artifact will have none"
        ]
    return [f"the chat template of {folder} is used: {file.path} has a different one, which is not read"]


def _template(folder: Path) -> str | None:
    """Return the chat template that transformers finds: a separate file comes before ``tokenizer_config.json``."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = read_object(folder / name).get("chat_template") if (folder / name).is_file() else None
        if isinstance(found, list):  # a list of named templates
            found = next((each.get("template") for each in found if each.get("name") == "default"), None)
        if isinstance(found, str):
            return found
    return None


def _tokens(file: GGUFFile, folder: Path) -> int | None:
    """Return the number of tokens in the file's own list, or else in the folder's tokenizer; None if there is
    neither."""
    listed = file.length("tokenizer.ggml.tokens")
    if listed is not None:
        return listed
    if not (folder / "tokenizer.json").is_file():
        return None
    fields = read_object(folder / "tokenizer.json")
    words, added = fields.get("model", {}).get("vocab"), fields.get("added_tokens") or []
    ids = list(words.values()) if isinstance(words, dict) else range(len(words or ()))
    return max([*ids, *(each["id"] for each in added)], default=-1) + 1


def _may_be_cut(file: GGUFFile, key: str, found: object, config: "PreTrainedConfig") -> bool:
    if key != "vocab_size" or not file.architecture.cuts_vocabulary:
        return False
    return isinstance(found, int) and found <= config.vocab_size


def _check_ids(file: GGUFFile, config: "PreTrainedConfig", folder: Path, stop_ids: tuple[int, ...]) -> None:
    """Check the file's bos and eos tokens against the configuration's, where it has any."""
    ends = config.eos_token_id
    ends = ends if isinstance(ends, list | tuple) else [] if ends is None else [ends]
    ends, begins = sorted({*ends, *stop_ids}), config.bos_token_id
    for key, field, expected in (
        ("tokenizer.ggml.bos_token_id", "bos_token_id", [] if begins is None else [begins]),
        ("tokenizer.ggml.eos_token_id", "eos_token_id", ends),
    ):
        found = file.field(key)
        if found is not None and expected and found not in expected:
            says = " or ".join(map(str, expected))
            raise ValueError(f"{file.path}: {key} is {found}, but {folder} implies {says} ({field}): {_LIKELY}")


def _by_layer(file: GGUFFile, key: str, found: object, expected: object) -> object:
    """Return a value of the metadata in the form of the expected one. A pattern of sliding windows may be one number n,
    with which every n-th layer has full attention: it becomes a list over the layers. Lists lose the values for MTP
    layers, which come last, and rope sections their trailing zeros."""
    if isinstance(found, list) and len(found) == file.field("{arch}.block_count"):
        found = found[: file.layers]
    pattern = key == "attention.sliding_window_pattern"
    if pattern and isinstance(found, int) and not isinstance(found, bool) and isinstance(expected, list):
        return [found == 0 or bool((layer + 1) % found) for layer in range(len(expected))]
    if key == "rope.dimension_sections" and isinstance(found, list):
        while found and not found[-1]:
            found = found[:-1]
        return found or 0
    return found


def _agree(found: object, expected: object) -> bool:
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(_agree, found, expected))
    if isinstance(found, list):
        return all(_agree(each, expected) for each in found)
    if isinstance(expected, list):
        return all(_agree(found, each) for each in expected)
    if isinstance(found, int | float) and isinstance(expected, int | float):
        return math.isclose(found, expected, rel_tol=1e-6)  # the file stores float32
    return found == expected


def _shown(value: object, other: object) -> str:
    """Format a value; for a list, only the entry of the first layer in which it differs from ``other``."""
    if isinstance(value, list):
        pairs = enumerate(zip(value, other if isinstance(other, list) else [other] * len(value), strict=False))
        layer = next((number for number, pair in pairs if not _agree(*pair)), None)
        return f"{len(value)} layers long" if layer is None else f"{value[layer]} for layer {layer}"
    return f"{value:g}" if isinstance(value, float) else str(value)[:60]


def _check_rope_factors(file: GGUFFile, config: "PreTrainedConfig", folder: Path, described: bool) -> None:
    """Check the file's divisors of the rope frequencies in layers with full attention against transformers'
    frequencies."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope, factors = ropes_of(config)["full_attention"], file.by_own_name("rope_freqs.weight")
    if not rotates(config) or (not rope and factors is None):
        return
    kind: str = rope.get("rope_type", "default")
    expected: torch.Tensor | None = None
    # linear and yarn have metadata keys instead of divisors
    if kind in ROPE_INIT_FUNCTIONS and kind not in ("linear", "yarn"):
        by_layer = {} if rope is config.rope_parameters else {"layer_type": "full_attention"}
        expected, _ = ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"), **by_layer)
    given = expected if factors is None else factors
    if given is None or (factors is None and not described):
        return
    count = len(given)
    plain = rope["rope_theta"] ** -(torch.arange(count) / count)
    own = plain if factors is None else torch.where(factors < _UNROTATED / 2, plain / factors, 0.0)
    expected = plain if expected is None else expected
    if expected.shape == own.shape and torch.allclose(own, expected, rtol=1e-4, atol=0):
        return
    if factors is None:
        raise ValueError(
            f"{file.path} has no rope_freqs, but {folder / 'config.json'} implies those of the {kind} rope: {_LIKELY}"
        )
    raise ValueError(f"{file.path}: its rope_freqs are not those of the {kind} rope in {folder}: {_LIKELY}")
