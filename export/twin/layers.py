"""Chooses the layers that a small copy keeps: the fewest that include every kind of layer. Two layers are of one kind
if transformers' modules for them have the same types, plain attributes and shapes, and the configuration's per-layer
lists have the same entries for both.
"""

from collections.abc import Callable, Hashable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.initialization import no_init_weights

from eagle3.targets.text_part import build as build_model
from eagle3.targets.text_part import fields_of

LAYER_INDICES = (
    *("moe_layers", "mlp_only_layers", "full_attn_idxs", "hybrid_layer_ids", "ple_layer_ids", "cross_attention_layers"),
    "attn_layer_indices",
)
"""Fields that list indices of layers. Any other list with as many entries as the model has layers has one entry per
layer."""
FACTORS = ("ssm_multipliers", "mlp_multipliers", "time_step_limit", "mtp_layers_block_type")
"""Lists that do not have an entry for each layer, whatever their length."""
LONG = 8
"""If the prefix would be longer than this, only the first layer of each kind is tried."""
KEEPS = "store_full_length_kv"
"""The attribute of an attention layer that stores its keys for later layers. From 5.24 on transformers' Gemma 4 also
sets it if no layer reuses the keys, for assistants. Then it does not distinguish kinds, since the layer computes the
same."""


def fewest_layers(fields: dict[str, Any], build: Callable[[dict[str, Any]], PreTrainedConfig]) -> PreTrainedConfig:
    """Build the configuration of the model's first layers: the fewest, but at least two, that include every kind of
    layer. They are the first ones because some classes decide by a layer's index. The last of them has the kind of the
    model's last layer, if that is possible.
    """
    count = fields.get("num_hidden_layers") or 0
    if count <= 2:
        return build(fields)
    traits = _traits(build(deepcopy(fields)))
    telling = _telling(traits)
    kinds = _kinds(traits, telling)
    first = sorted({kind: at for at, kind in reversed(list(enumerate(kinds)))}.values())
    shortest = max(2, 1 + first[-1])
    choices: list[Sequence[int]] = [[*first, count - 1] if first[-1] < count - 1 else first] * (shortest > LONG)
    choices += [range(length) for length in range(shortest, min(shortest + LONG, count + 1))]
    complete: list[dict[str, Any]] = []
    for layers in choices:
        fewer = _take(fields, layers)
        try:
            found = _kinds(_traits(build(deepcopy(fewer))), telling)
        except (ValueError, LookupError):  # the class rejects this prefix
            continue
        if set(found) == set(kinds):
            complete.append(fewer)
            if found[-1] == kinds[-1]:
                return build(fewer)
    return build(complete[0] if complete else fields)


def fewer_layers(
    fields: dict[str, Any], build: Callable[[dict[str, Any]], PreTrainedConfig], count: int
) -> tuple[PreTrainedConfig, list[int]]:
    """Build the configuration of ``count`` layers with every kind of layer among them, and return their indices.

    The first layers are taken. If they lack a kind of layer, the model's first layer of that kind replaces a later
    layer of another kind. Raises ValueError for a count that leaves a kind out, and for one that is no smaller than the
    model's.
    """
    total = fields["num_hidden_layers"]
    if count >= total:
        raise ValueError(f"--layers {count}: the target has {total} layers: type a smaller number, or leave it out")
    traits = _traits(build(deepcopy(fields)))
    telling = _telling(traits)
    kinds = _kinds(traits, telling)
    first = {kind: at for at, kind in reversed(list(enumerate(kinds)))}.values()
    others = [at for at in range(total) if at not in first]

    def chosen(count: int) -> list[int] | None:
        for layers in (list(range(count)), sorted([*first, *others[: max(0, count - len(first))]])):
            try:
                found = _kinds(_traits(build(_take(fields, layers))), telling)
            except (ValueError, LookupError):  # the class rejects this choice
                continue
            if len(layers) == count and set(found) == set(kinds):
                return layers
        return None

    layers = chosen(count)
    if layers is None:
        fewest = next((more for more in range(count + 1, total) if chosen(more)), None)
        instead = f"type --layers {fewest}" if fewest else "leave --layers out"
        raise ValueError(f"--layers {count} leaves out some of the target's {len(first)} kinds of layers: {instead}")
    return build(_take(fields, layers)), layers


def _take(fields: dict[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """Return the fields of a model that has only ``layers`` (ascending indices)."""
    count, fewer = fields["num_hidden_layers"], deepcopy(fields) | {"num_hidden_layers": len(layers)}
    for name, value in fewer.items():
        if isinstance(value, list) and name in LAYER_INDICES:
            fewer[name] = [layers.index(index) for index in value if index in layers]
        elif isinstance(value, list) and len(value) >= count and name not in FACTORS:
            fewer[name] = [value[index] for index in layers]
    if fewer.get("per_layer_config"):
        overrides = {int(index): override for index, override in fewer["per_layer_config"].items()}
        fewer["per_layer_config"] = {at: overrides[index] for at, index in enumerate(layers) if index in overrides}
    if fewer.get("num_kv_shared_layers"):  # the last layers
        fewer["num_kv_shared_layers"] = sum(index >= count - fewer["num_kv_shared_layers"] for index in layers)
    return fewer


def _traits(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the attributes, types and shapes of each layer, by name."""
    count, shared = config.num_hidden_layers, getattr(config, "num_kv_shared_layers", 0)
    lists = {
        name: value
        for name, value in fields_of(config).items()
        if isinstance(value, list) and len(value) >= count and name not in (*LAYER_INDICES, *FACTORS)
    }
    with no_init_weights(), torch.device("meta"):
        model = build_model(config)
    stacks = (module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == count)
    found = []
    for at, layer in enumerate(next(stacks, [nn.Module()] * count)):
        traits: dict[str, Any] = {name: repr(value[at]) for name, value in lists.items()}
        traits |= {name: tuple(weight.shape) for name, weight in layer.named_parameters()}
        for path, module in layer.named_modules():
            traits[path] = type(module)
            for name, value in vars(module).items():
                if name == KEEPS and not shared:
                    continue
                if not name.startswith("_") and isinstance(value, bool | int | float | str | None):
                    traits[f"{path}.{name}"] = value
        found.append(traits)
    return found


def _telling(traits: list[dict[str, Any]]) -> set[str]:
    """Return the names of the traits that distinguish kinds of layers: those that differ between layers. Numbers that
    rise or fall from each layer to the next are left out, since they are a layer's index or derived from it.
    """
    telling = set()
    for name in set().union(*traits):
        values = [layer[name] for layer in traits if name in layer]
        if len(values) == len(traits) and len(set(values)) == 1:
            continue
        steps = [0]
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            steps = [later - earlier for earlier, later in zip(values, values[1:], strict=False)] or [0]
        if min(steps) <= 0 <= max(steps):
            telling.add(name)
    return telling


def _kinds(traits: list[dict[str, Any]], telling: set[str]) -> list[Hashable]:
    return [frozenset((name, value) for name, value in layer.items() if name in telling) for layer in traits]
