"""A draft head's twin: the formulas of its dialect, every row computed anew, against our head and its KV cache.

Rows are seeded from taps in chunks, chained on the head's own features and rolled back, beyond the head's window.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from eagle3.export.checkpoints.json_fields import read_object
from eagle3.export.draft import DraftDescription, read_draft
from eagle3.export.draft.formulas import Drafter
from eagle3.export.draft.head import DraftHead, load_draft
from eagle3.export.draft.speculators import layer_config
from eagle3.export.twin.comparison import TOLERANCE, Comparison
from eagle3.export.twin.shrink import prompt_length, shrink
from eagle3.targets.attention import EagerAttention

VOCABULARY, DRAFT_VOCABULARY = 96, 48
CHUNK, CHAIN = 7, 3  # rows


def check_draft(draft: DraftDescription, taps: int) -> dict[str, Any]:
    """Compare the twins of a head that fuses ``taps`` states of its target; returns what the manifest says of it.

    Raises ValueError where they differ or ours does not run.
    """
    file = draft.folder / "config.json"
    try:
        compared = compare(draft, taps)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{file} describes a draft head that cannot be computed: {reason}") from error
    if compared.difference > TOLERANCE:
        raise ValueError(
            f"{file} describes a draft head that would not be computed by its formulas: {compared.worst()} in a "
            "shrunken twin: this kind of head is not supported"
        )
    return compared.as_json()


def compare(draft: DraftDescription, taps: int, seed: int = 0) -> Comparison:
    with torch.no_grad(), TemporaryDirectory(prefix="eagle3-twin-") as name:
        folder, generator = Path(name), torch.Generator().manual_seed(seed)
        config = _shrunken(draft)
        layer = layer_config(folder / "config.json", config)
        width = layer.hidden_size + 16 * (draft.taps_width != taps * draft.hidden_size)
        tensors = _random_tensors(draft, layer, taps, width, generator)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
        twin = read_draft(folder)
        length = prompt_length(layer)
        embedding = nn.Embedding(VOCABULARY, layer.hidden_size)
        embedding.weight.copy_(torch.randn(embedding.weight.shape, generator=generator))
        head = load_draft(twin, length, torch.float32, EagerAttention, embedding)
        states = [torch.randn(1, length, width, generator=generator) for _ in range(taps)]
        tokens = torch.randint(0, VOCABULARY, (1, length), generator=generator)
        return _play(Drafter(config, layer, tensors), head, tokens, states)


def _play(drafter: Drafter, head: DraftHead, tokens: Tensor, taps: list[Tensor]) -> Comparison:
    """Seed chunk by chunk; after each, chain, and take the chain back by seeding over it."""
    length = tokens.shape[1]
    compared = Comparison(length)
    features = head.fuse(tuple(taps))
    fused = drafter.fuse([tap[0] for tap in taps])[None]
    compared.add("tap 0", 0, features, fused, fused)  # all taps, fused
    embed = head.embed_tokens
    chunk = min(CHUNK, head.window or CHUNK)
    for start in range(0, length - CHAIN, chunk):
        end = min(start + chunk, length - CHAIN)
        ids, rows = tokens[:, :end], fused[:, :end]
        given = tokens[:, start:end], fused[:, start:end], torch.arange(start, end)
        for step in range(CHAIN + 1):
            expected_logits, expected_next = drafter(embed(ids)[0], rows[0])
            logits, recurrent = head(*given)
            for what, value, wanted in (("logits", logits, expected_logits), ("tap 1", recurrent, expected_next)):
                compared.add(what, start, value, wanted[None, -value.shape[1] :], wanted)
            if step < CHAIN:
                token = head.target_ids(expected_logits[None, -1:])
                state = expected_next[None, -1:]
                given = token, state, torch.tensor([end + step])
                ids, rows = torch.cat([ids, token], dim=1), torch.cat([rows, state], dim=1)
    return compared


def _shrunken(draft: DraftDescription) -> dict[str, Any]:
    """The head's own JSON with its sizes cut."""
    config = read_object(draft.folder / "config.json")
    written = config["transformer_layer_config"]
    small = shrink(draft.layer).to_dict() | {"vocab_size": VOCABULARY, "model_type": draft.layer.model_type}
    sizes = (*written, "head_dim", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    kept = {key: small[key] for key in sizes if key in small}
    config["transformer_layer_config"] = written | kept
    if config.get("draft_vocab_size") is not None:
        config["draft_vocab_size"] = _spoken(draft)
    return config


def _spoken(draft: DraftDescription) -> int:
    """Tokens that the twin speaks."""
    return DRAFT_VOCABULARY if draft.maps_vocabulary else VOCABULARY


def _random_tensors(
    draft: DraftDescription, layer: Any, taps: int, width: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """A tensor for each one of the checkpoint, under its name. Raises ValueError for one without a formula."""
    shapes = _shapes(draft, layer, taps, width)
    tensors = {}
    for name, own in draft.tensor_names.items():
        if own == "d2t":
            continue
        if own not in shapes:
            raise ValueError(f"there is no formula for its tensor {name}")
        noise = torch.randn(shapes[own], generator=generator)
        if noise.ndim == 1:
            tensors[name] = 0.3 * noise + (own.endswith("norm.weight") or "fc_norm" in own)
        else:
            tensors[name] = noise / shapes[own][-1] ** 0.5 if own != "embed_tokens.weight" else noise
    if draft.maps_vocabulary:
        ids = torch.randperm(VOCABULARY, generator=generator)[:DRAFT_VOCABULARY].sort().values
        names = {own: name for name, own in draft.tensor_names.items()}
        tensors[names["d2t"]] = ids - torch.arange(DRAFT_VOCABULARY)
        tensors[draft.selector or "t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def _shapes(draft: DraftDescription, layer: Any, taps: int, width: int) -> dict[str, tuple[int, ...]]:
    """By ``DraftHead``'s names, biases where the checkpoint has them."""
    size, inner = layer.hidden_size, layer.intermediate_size
    head_dim = getattr(layer, "head_dim", None) or size // layer.num_attention_heads
    queries, keys = layer.num_attention_heads * head_dim, layer.num_key_value_heads * head_dim
    linears = {
        "fc": (size, taps * width),
        "lm_head": (_spoken(draft), size),
        "embed_tokens": (VOCABULARY, size),
        "layer.self_attn.q_proj": (queries, 2 * size),
        "layer.self_attn.k_proj": (keys, 2 * size),
        "layer.self_attn.v_proj": (keys, 2 * size),
        "layer.self_attn.o_proj": (size, queries),
        "layer.mlp.gate_proj": (inner, size),
        "layer.mlp.up_proj": (inner, size),
        "layer.mlp.down_proj": (size, inner),
    }
    norms = {name: (size,) for name in ("norm", "layer.input_layernorm", "layer.hidden_norm")}
    norms |= {"layer.post_attention_layernorm": (size,), "input_norm": (taps * width,)}
    norms |= {f"fc_norm.{index}": (width,) for index in range(taps)}
    norms |= {f"layer.self_attn.{name}_norm": (head_dim,) for name in "qk"}
    shapes = {f"{name}.weight": shape for name, shape in (linears | norms).items()}
    return shapes | {f"{name}.bias": shape[:1] for name, shape in linears.items()}
