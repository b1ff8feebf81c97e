"""The oracle of EAGLE heads: compares the head and its KV cache with the formulas of its dialect, which recompute
every row. The head is seeded from taps in chunks, drafts from its own features and rolls back, until positions are past
its sliding window.
"""

import json
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from eagle_formulas import Drafter
from playing import CHAIN, CHUNK, Shapes, layer_shapes, play, stand_in, with_sizes_of
from safetensors.torch import save_file
from torch import Tensor

from eagle3.export.checkpoints import open_source
from eagle3.export.checkpoints.json_fields import Fields, read_object
from eagle3.export.draft.common.head import load_head
from eagle3.export.draft.common.speculators import LAYER
from eagle3.export.draft.kinds import EAGLE, P_EAGLE
from eagle3.export.draft.kinds.eagle.description import EagleDescription
from eagle3.export.draft.kinds.eagle.head import Head
from eagle3.export.draft.kinds.eagle.reading import read
from eagle3.export.draft.kinds.eagle.rope_reading import FILE, RopeFlags
from eagle3.export.draft.kinds.eagle.tensor_names import MASK_TOKENS, own_name
from eagle3.export.twin.comparison import Comparison, twin_folder
from eagle3.export.twin.lengths import prompt_length
from eagle3.export.twin.shrink import shrink
from eagle3.targets.attention import EagerAttention

if TYPE_CHECKING:
    from transformers import LlamaConfig

VOCABULARY, DRAFT_VOCABULARY = 96, 48
NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


def compare(draft: EagleDescription, taps: int, overridden: bool | None = None, seed: int = 0) -> Comparison:
    with torch.no_grad(), twin_folder() as folder:
        generator = torch.Generator().manual_seed(seed)
        small = _small_layer(draft)
        config = _shrunken(draft, small, overridden)
        width = small.hidden_size + 16 * (not draft.takes_final_state and draft.taps_width != taps * draft.hidden_size)
        tensors = _random_tensors(draft, small, taps, width, generator)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
        source = open_source(folder)
        fields = Fields(folder / "config.json", read_object(folder / "config.json"))
        twin = read(
            fields,
            source,
            draft.dialect,
            overridden,
            RopeFlags(FILE, FILE),
        )
        length = max(prompt_length(small.to_dict()), 2 * CHUNK + CHAIN)  # a head may have fewer positions than a chunk
        target = stand_in(VOCABULARY, small.hidden_size, generator)
        head: Any = load_head(Head, twin, length, torch.float32, EagerAttention, target, CHAIN + 1)
        states = [torch.randn(1, length, width, generator=generator) for _ in range(taps or 1)]
        tokens = torch.randint(0, VOCABULARY, (1, length), generator=generator)
        shared = target.embed_tokens.weight, target.lm_head.weight
        return play(Drafter(draft.dialect, config, twin.layer, tensors, *shared), head, tokens, states)


def _small_layer(draft: EagleDescription) -> "LlamaConfig":
    layer = deepcopy(draft.layer)
    layer.num_hidden_layers, layer.layer_types = 1, (layer.layer_types or [None])[:1]
    layer.layer_types = None if layer.layer_types == [None] else layer.layer_types
    layer.sliding_window = draft.window or None
    return shrink(layer)


def _shrunken(draft: EagleDescription, small: "LlamaConfig", overridden: bool | None) -> dict[str, Any]:
    """Return the head's ``config.json`` with smaller sizes."""
    config = read_object(draft.folder / "config.json")
    fields = config if draft.gemma4 else config.get(LAYER, config)
    cut = small.to_dict()
    sizes = ("head_dim", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    fields |= {key: cut[key] for key in (*sizes, "max_position_embeddings")} | {"vocab_size": VOCABULARY}
    fields |= {key: cut["intermediate_size"] for key in ("intermediate_size_mlp",) if key in fields}
    fields |= {"sliding_window": small.sliding_window} if draft.window else {}
    for key in ("rope_theta", "rope_scaling", "partial_rotary_factor"):
        fields.pop(key, None)
    fields["rope_parameters"] = cut["rope_parameters"]
    fields |= with_sizes_of(cut) if draft.gemma4 else {}
    if config.get("draft_vocab_size") is not None:
        config["draft_vocab_size"] = _spoken(draft)
    for part in (config, config.get("eagle_config") or {}):
        part |= {key: VOCABULARY - 1 for key in MASK_TOKENS if part.get(key) is not None}
        if overridden is not None:
            part["norm_before_residual"] = overridden
    return config


def _spoken(draft: EagleDescription) -> int:
    """Return the size of the small copy's draft vocabulary."""
    return DRAFT_VOCABULARY if draft.maps_vocabulary else VOCABULARY


def _random_tensors(
    draft: EagleDescription, layer: "LlamaConfig", taps: int, width: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Draw a random tensor for each tensor of the checkpoint, by name. Raises ValueError for a tensor without a
    formula."""
    shapes = _shapes(draft, layer, taps, width)
    tensors = {}
    unread = {name: own_name(name) for name in draft.source.headers()}  # tensors that must not affect the output
    unread = {name: own for name, own in unread.items() if own in shapes}
    for name, own in (unread | draft.tensor_names).items():
        if own == "d2t":
            continue
        if own not in shapes:
            raise ValueError(f"there is no formula for its tensor {name}")
        noise = torch.randn(shapes[own], generator=generator)
        if noise.ndim == 1:
            noise = 0.3 * noise + (own.endswith("norm.weight") or "fc_norm" in own)
        elif own not in ("embed_tokens.weight", "mask_hidden"):
            noise = noise / shapes[own][-1] ** 0.5
        tensors[name] = noise
    if draft.maps_vocabulary:
        ids = torch.randperm(VOCABULARY, generator=generator)[:DRAFT_VOCABULARY].sort().values
        names = {own: name for name, own in draft.tensor_names.items()}
        tensors[names["d2t"]] = ids - torch.arange(DRAFT_VOCABULARY)
        tensors[draft.selector or "t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def _shapes(draft: EagleDescription, layer: "LlamaConfig", taps: int, width: int) -> Shapes:
    """Return the shape of each tensor that a head may have, biases included, by ``Head``'s names."""
    size = layer.hidden_size
    linears: Shapes = {
        "fc": (size, size + width if draft.kind == EAGLE else taps * width),
        "lm_head": (_spoken(draft), size),
        "embed_tokens": (VOCABULARY, size),
    }
    norms: Shapes = {"norm": (size,), "embed_norm": (size,), "input_norm": (taps * width,)}
    norms |= {f"fc_norm.{index}": (width,) for index in range(taps)}
    for index in range(draft.layers):
        inputs = size if index or draft.kind == EAGLE else 2 * size
        of_layer = layer_shapes(layer, f"layers.{index}", inputs, NORMS)
        linears, norms = linears | of_layer[0], norms | of_layer[1]
    shapes: Shapes = {f"{name}.weight": shape for name, shape in (linears | norms).items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in linears.items()}
    shapes |= {f"layers.{index}.layer_scalar": (1,) for index in range(draft.layers)}
    return shapes | ({"mask_hidden": (1, 1, (taps or 1) * width)} if draft.kind == P_EAGLE else {})
