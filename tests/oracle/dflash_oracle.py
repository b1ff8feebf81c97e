"""The oracle of DFlash heads: compares the head and its KV caches with its formulas, which compute every block
anew. The head is seeded in chunks and drafts a block after each. Then a part of the chunk is rolled back and written
again with other features, until positions have passed the sliding window twice. The first position and some later ones
are written in calls of one row.
"""

import json
import re
from copy import deepcopy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from dflash_formulas import Drafter
from dflash_variants import SHAPES, Sizes
from playing import Shapes, layer_shapes, with_sizes_of
from safetensors.torch import save_file
from torch import Tensor, nn

from eagle3.export.checkpoints import open_source
from eagle3.export.checkpoints.json_fields import Fields, read_object
from eagle3.export.draft.common.checks import SELECTOR
from eagle3.export.draft.common.head import load_head
from eagle3.export.draft.common.speculators import LAYER
from eagle3.export.draft.kinds.dflash.description import DFlashDescription
from eagle3.export.draft.kinds.dflash.dialects import OWN
from eagle3.export.draft.kinds.dflash.head import Head
from eagle3.export.draft.kinds.dflash.reading import read
from eagle3.export.twin.comparison import Comparison, twin_folder
from eagle3.export.twin.lengths import prompt_length
from eagle3.export.twin.shrink import shrink
from eagle3.targets.attention import EagerAttention

if TYPE_CHECKING:
    from transformers import LlamaConfig

VOCABULARY, SPOKEN = 96, 48
CHUNK, BACK = 7, 3  # rows
NORMS = ("input_layernorm", "post_attention_layernorm")
SCALE = 1.5
"""The factor by which the target multiplies the rows of its embedding."""


def compare(draft: DFlashDescription, taps: int, _overridden: bool | None = None, seed: int = 0) -> Comparison:
    with torch.no_grad(), twin_folder() as folder:
        generator = torch.Generator().manual_seed(seed)
        config, layer = _shrunken(draft)
        width = layer.hidden_size + 16 * (draft.taps_width != taps * draft.hidden_size)
        tensors = _random_tensors(draft, layer, taps, width, generator)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
        twin = read(Fields(file := folder / "config.json", read_object(file)), open_source(folder))
        length = max(prompt_length(layer.to_dict()), 3 * CHUNK)
        embedding = nn.Embedding(VOCABULARY, layer.hidden_size)
        lm_head = nn.Linear(layer.hidden_size, VOCABULARY, bias=False)
        for weight in (embedding.weight, lm_head.weight):
            weight.copy_(torch.randn(weight.shape, generator=generator))
        target: Any = SimpleNamespace(
            embed_tokens=embedding, embed=lambda tokens: embedding(tokens) * SCALE, lm_head=lm_head
        )
        head: Any = load_head(Head, twin, length, torch.float32, EagerAttention, target, twin.longest_chain)
        drafter = Drafter(config, twin.layer, tensors, embedding.weight, lm_head.weight, SCALE)
        states = [torch.randn(1, length, width, generator=generator) for _ in range(taps)]
        return _play(drafter, head, states, generator)


def _play(drafter: Drafter, head: Any, states: list[Tensor], generator: torch.Generator) -> Comparison:  # noqa: ANN401
    length = states[0].shape[1]
    compared = Comparison(length)
    features, fused = head.fuse(tuple(states)), drafter.fuse([state[0] for state in states])
    compared.add("tap 0", 0, features, fused[None], fused)
    start, text = 0, torch.zeros(length + 1, dtype=torch.long)  # the token of each position
    while start < length:
        for rejected, count in ((False, 1), (True, CHUNK), (False, CHUNK)):
            end = min(start + count, length)
            rows = fused[start:end].clone()
            if rejected:  # the last rows belong to tokens that are then rejected
                rows[-BACK:] = torch.randn(rows[-BACK:].shape, generator=generator)
            tokens = torch.randint(0, VOCABULARY, (1, end - start), generator=generator)
            logits, state = head(tokens, rows[None], torch.arange(start, end))
            context, text[start + 1 : end + 1] = torch.cat([fused[:start], rows]), tokens[0]
            before = int(text[end - 1]) if end > 1 else None
            expected, expected_state = drafter(context, int(tokens[0, -1]), before)
            compared.add("tap 1", end, state, expected_state[None], expected_state)
            compared.add("logits", end, logits, expected[None], expected)
            start = end - min(BACK, end - start) if rejected else end
            if start == length:
                break
    return compared


def _shrunken(draft: DFlashDescription) -> tuple[dict[str, Any], "LlamaConfig"]:
    """Return the head's ``config.json`` with smaller sizes, and the configuration of its layers."""
    layer = deepcopy(draft.layer)
    layer.sliding_window = layer.sliding_window if any(draft.windows) else None
    small = shrink(layer)
    config = read_object(draft.folder / "config.json")
    fields = config.get(LAYER, config)
    cut = small.to_dict()
    sizes = ("head_dim", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    fields |= {key: cut[key] for key in (*sizes, "max_position_embeddings")} | {"vocab_size": VOCABULARY}
    fields |= {"num_hidden_layers": small.num_hidden_layers}
    fields |= {"layer_types": small.layer_types} if small.layer_types else {}
    fields |= {"sliding_window": small.sliding_window} if any(draft.windows) else {}
    for key in ("rope_theta", "rope_scaling"):
        fields.pop(key, None)
    fields["rope_parameters"] = cut["rope_parameters"]
    fields |= with_sizes_of(cut) if draft.gemma4 else {}
    if config.get("draft_vocab_size") is not None:
        config["draft_vocab_size"] = SPOKEN if draft.maps_vocabulary else VOCABULARY
    for part in (config, config.get(OWN) or {}):
        small_values = {"mask_token_id": VOCABULARY - 1, "target_hidden_size": small.hidden_size}
        part |= {key: value for key, value in small_values.items() if part.get(key) is not None}
    return config, small


def _random_tensors(
    draft: DFlashDescription, layer: "LlamaConfig", taps: int, width: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Draw a random tensor for each tensor of the checkpoint, by its name. Raises ValueError for a tensor without a
    formula."""
    shapes, tensors = _shapes(draft, layer, taps, width), {}
    for name, own in draft.tensor_names.items():
        found = next((each for each in (own, own.replace(".kept.", ".")) if each in shapes), None)
        if own == "d2t" or _layer_of(own) >= layer.num_hidden_layers:
            continue
        if found is None:
            raise ValueError(f"there is no formula for its tensor {name}")
        noise = torch.randn(shapes[found], generator=generator)
        if noise.ndim == 1:
            noise = 0.3 * noise + own.endswith("norm.weight")
        elif own != "embed_tokens.weight":
            noise = noise / shapes[found][-1] ** 0.5
        tensors[name] = noise
    if draft.maps_vocabulary:
        ids = torch.randperm(VOCABULARY, generator=generator)[:SPOKEN].sort().values
        (d2t,) = (name for name, own in draft.tensor_names.items() if own == "d2t")
        tensors[d2t] = ids - torch.arange(SPOKEN)
        tensors[draft.selector or SELECTOR] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def _layer_of(own: str) -> int:
    found = re.match(r"layers\.(\d+)\.", own)
    return int(found[1]) if found else 0


def _shapes(draft: DFlashDescription, layer: "LlamaConfig", taps: int, width: int) -> Shapes:
    """Return the shape of each tensor that a head may have, biases included, by the checkpoint's names."""
    size = layer.hidden_size
    spoken = SPOKEN if draft.maps_vocabulary else VOCABULARY
    linears: Shapes = {"fc": (size, taps * width), "lm_head": (spoken, size), "embed_tokens": (VOCABULARY, size)}
    norms: Shapes = {name: (size,) for name in ("norm", "hidden_norm")}
    for index in range(layer.num_hidden_layers):
        of_layer = layer_shapes(layer, f"layers.{index}", size, NORMS)
        linears, norms = linears | of_layer[0], norms | of_layer[1]
    shapes: Shapes = {f"{name}.weight": shape for name, shape in (linears | norms).items()}
    shapes |= {f"layers.{index}.layer_scalar": (1,) for index in range(layer.num_hidden_layers)}
    if draft.variant.module:
        sizes = Sizes(size, VOCABULARY, spoken, layer.num_hidden_layers, draft.block_rows)
        shapes |= SHAPES[draft.kind](draft.variant, sizes)
    return shapes | {f"{name}.bias": shape[:1] for name, shape in linears.items()}
