"""The oracle of MTP heads: compares the head and its KV cache with formulas that compute every row anew, norms and
projection in plain PyTorch around transformers' own decoder layer. Parts have the names of DeepSeek's checkpoints.
Sources: see ``export/draft/kinds/mtp/__init__.py``."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from places import GOLDEN
from playing import CHAIN, CHUNK, play, stand_in
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers.core_model_loading import revert_weight_conversion

from eagle3.export.checkpoints import open_source
from eagle3.export.checkpoints.json_fields import Fields, read_object
from eagle3.export.draft.common.head import load_head
from eagle3.export.draft.common.speculators import LAYER
from eagle3.export.draft.kinds.mtp.head import Head
from eagle3.export.draft.kinds.mtp.own_layer import OF_DEEPSEEK, OF_QWEN, ZERO_CENTERED, renamed
from eagle3.export.draft.kinds.mtp.reading import (
    NAMES,
    MTPDescription,
    read,
    read_own_layer,
)
from eagle3.export.draft.kinds.mtp.tensors import LayerTensors, one_layer_config
from eagle3.export.draft.reading import read_draft
from eagle3.export.twin.comparison import SEEDS, TOLERANCE, Comparison, twin_folder
from eagle3.export.twin.lengths import prompt_length
from eagle3.export.twin.randomize import randomize
from eagle3.export.twin.shrink import shrink
from eagle3.targets.attention import EagerAttention
from eagle3.targets.text_part import build

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Drafter:
    """Computes an MTP head. ``model`` is transformers' model of one layer, which is the head's; ``tensors`` (float32)
    are enorm, hnorm, eh_proj and norm, ``embedding`` and ``lm_head`` [V, H] the target's."""

    model: Any
    tensors: dict[str, Tensor]
    embedding: Tensor
    lm_head: Tensor

    def fuse(self, states: list[Tensor]) -> Tensor:
        """Return the first feature [T, H], which is the target's state."""
        (state,) = states
        return state

    def __call__(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Compute all rows. tokens [T], each one position after its slot, and features [T, H] -> logits [T, V] and the
        features of the next step [T, H]."""
        length = len(tokens)
        joined = torch.cat([self._norm(self.embedding[tokens], "enorm"), self._norm(features, "hnorm")], dim=-1)
        x = (joined @ self.tensors["eh_proj"].T)[None]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        rotary = self.model.model.rotary_emb(x, torch.arange(length)[None])
        x = self.model.model.layers[0](x, attention_mask=mask, position_embeddings=rotary)
        state = self._norm(x[0], "norm")
        return F.linear(state, self.lm_head), state

    def _norm(self, x: Tensor, name: str) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        factor = self.tensors[name] + (self.model.config.model_type in ZERO_CENTERED)
        return x * torch.rsqrt(variance + self.model.config.rms_norm_eps) * factor


def compare(draft: MTPDescription, _taps: int, _overridden: bool | None = None) -> Comparison:
    """Compare with up to ``len(SEEDS)`` sets of random weights, and return the first comparison that agrees: with some
    weights two experts tie."""
    found = _compare(draft, SEEDS[0])
    for seed in SEEDS[1:]:
        if found.difference <= TOLERANCE:
            break
        found = min(found, _compare(draft, seed), key=lambda each: each.difference)
    return found


def _compare(draft: MTPDescription, seed: int) -> Comparison:
    with torch.no_grad(), twin_folder() as folder:
        generator = torch.Generator().manual_seed(seed)
        small, target = small_head(draft, seed), stand_in(vocabulary := 96, shrink(draft.layer).hidden_size, generator)
        twin = small.saved(folder, draft)
        length = max(prompt_length(small.config.to_dict()), 2 * CHUNK + CHAIN)
        head: Any = load_head(Head, twin, length, torch.float32, EagerAttention, target)
        states = [torch.randn(1, length, small.config.hidden_size, generator=generator)]
        tokens = torch.randint(0, vocabulary, (1, length), generator=generator)
        drafter = Drafter(small.model, small.tensors, target.embed_tokens.weight, target.lm_head.weight)
        return play(drafter, head, tokens, states)


@dataclass(frozen=True)
class SmallHead:
    """A small copy of a head: the target's configuration with smaller sizes, transformers' model of the head's one
    layer, and the tensors around it."""

    config: "PreTrainedConfig"
    model: Any
    tensors: dict[str, Tensor]

    def named(self, draft: MTPDescription) -> dict[str, Tensor]:
        """Return all tensors of the head under the names that the checkpoint of ``draft`` uses."""
        layer = {name: value for name, value in self.model.state_dict().items() if name.startswith("model.layers.0.")}
        parts = {f"{name}.weight": value for name, value in self.tensors.items()}
        saved = {
            name.removeprefix("model."): each for name, each in revert_weight_conversion(self.model, layer).items()
        }
        rename = checkpoint_naming(draft, self.config.num_hidden_layers)
        return {rename(name): value.contiguous() for name, value in (saved | parts).items()}

    def saved(self, folder: Path, draft: MTPDescription) -> MTPDescription:
        """Write the head in the form of the checkpoint of ``draft``, and read it back."""
        save_file(self.named(draft), folder / "model.safetensors")
        if draft.of_target:
            return read_own_layer(open_source(folder), self.config, folder)
        described = read_object(draft.folder / "config.json") | {LAYER: self.config.to_dict()}
        (folder / "config.json").write_text(json.dumps(described))
        return read(Fields(folder / "config.json", described), open_source(folder))


def small_head(draft: MTPDescription, seed: int) -> SmallHead:
    """Return a small copy of the head with random weights."""
    small, generator = shrink(draft.layer), torch.Generator().manual_seed(seed)
    model = build(one_layer_config(small), real=True).eval().requires_grad_(False)
    randomize(model, seed)
    size = small.hidden_size
    tensors = {name: 1 + 0.3 * torch.randn(size, generator=generator) for name in ("enorm", "hnorm", "norm")}
    tensors["eh_proj"] = torch.randn(size, 2 * size, generator=generator) / size**0.5
    return SmallHead(small, model, tensors)


def checkpoint_naming(draft: MTPDescription, layers: int) -> Callable[[str], str]:
    """Return a function that maps the head's names to those of a checkpoint of the same form as the checkpoint of
    ``draft``, for a target of ``layers`` layers."""
    if isinstance(draft.source, LayerTensors):
        return own_naming(draft.source.names, layers)
    return lambda name: renamed(name, inverse(NAMES))


def own_naming(names, layers: int) -> Callable[[str], str]:
    """Return a function that maps the head's names to the names in a target's checkpoint with ``layers`` layers.
    ``names`` shows which naming the checkpoint has."""
    if any(name.startswith("mtp.") for name in names):
        return lambda name: renamed(name, inverse(OF_QWEN))
    ours = inverse(OF_DEEPSEEK) | {"layers.0.": ""}
    return lambda name: f"model.layers.{layers}.{renamed(name, ours)}"


def inverse(names: Mapping[str, str]) -> dict[str, str]:
    return {after: before for before, after in names.items()}


def drafter_of(name: str, embedding: Tensor, lm_head: Tensor) -> Drafter:
    """Return the formulas of a golden head, with transformers' own layer."""
    tensors = load_file(GOLDEN / "mtp" / name / "model.safetensors")
    parts = {key.removeprefix("mtp_layers.0."): value for key, value in tensors.items()}
    model = build(one_layer_config(read_draft(GOLDEN / "mtp" / name).layer), real=True).eval().requires_grad_(False)
    model.config._attn_implementation = "eager"
    assert not model.model.layers[0].load_state_dict(parts, strict=False).missing_keys
    around = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj"}
    named = {ours: parts[f"{theirs}.weight"] for ours, theirs in (around | {"norm": "final_layernorm"}).items()}
    return Drafter(model, named, embedding, lm_head)
