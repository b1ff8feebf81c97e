"""The twin check of an MTP head: compares the head and its KV cache with its formulas, which compute every row anew."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from eagle3.export.checkpoints import open_source
from eagle3.export.checkpoints.json_fields import read_object
from eagle3.export.draft.common.loading import load_head
from eagle3.export.draft.common.playing import CHAIN, CHUNK, play, stand_in
from eagle3.export.draft.kinds.mtp.formulas import Drafter
from eagle3.export.draft.kinds.mtp.head import Head
from eagle3.export.draft.kinds.mtp.layer import one_layer_config
from eagle3.export.draft.kinds.mtp.reading import (
    KEYS,
    MTPDescription,
    checkpoint_naming,
    read,
    read_own_layer,
)
from eagle3.export.twin.comparison import SEEDS, TOLERANCE, Comparison
from eagle3.export.twin.folder import twin_folder
from eagle3.export.twin.lengths import prompt_length
from eagle3.export.twin.randomize import randomize
from eagle3.export.twin.shrink import shrink
from eagle3.targets.attention import EagerAttention
from eagle3.targets.text_part import build

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


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
        described = read_object(draft.folder / "config.json") | {KEYS: self.config.to_dict()}
        (folder / "config.json").write_text(json.dumps(described))
        return read(folder, described, open_source(folder))


def small_head(draft: MTPDescription, seed: int) -> SmallHead:
    """Return a small copy of the head with random weights."""
    small, generator = shrink(draft.layer), torch.Generator().manual_seed(seed)
    model = build(one_layer_config(small), real=True).eval().requires_grad_(False)
    randomize(model, seed)
    size = small.hidden_size
    tensors = {name: 1 + 0.3 * torch.randn(size, generator=generator) for name in ("enorm", "hnorm", "norm")}
    tensors["eh_proj"] = torch.randn(size, 2 * size, generator=generator) / size**0.5
    return SmallHead(small, model, tensors)
