"""Computes a target that does not fit into memory, one decoder layer at a time.

The target's own forward runs. Its layers have no weights of their own: a layer's tensors are read from the checkpoint
when the layer is called, and dropped behind the call. One forward therefore is one pass over the checkpoint, and what
stays in memory is the embedding, the head and the KV caches. The values are those of the loaded target, bit for bit.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from eagle3.export.checkpoints.random_folder import LAYER
from eagle3.export.checkpoints.source import Source
from eagle3.export.planning.plan import Plan
from eagle3.export.speculator.tensor_files import return_freed_memory
from eagle3.targets import TapTarget
from eagle3.targets.attention import AttentionFactory
from eagle3.targets.input_order import INPUT_ORDER
from eagle3.targets.loading import dequantized
from eagle3.targets.spec import Convert, Skeleton

Load = Callable[..., TapTarget]
"""One of the two functions below."""


def in_memory(
    plan: Plan, slots: int, dtype: torch.dtype, attention: AttentionFactory, convert: Convert = dequantized
) -> TapTarget:
    """Return the plan's target with all of its weights in memory; arguments as of ``streamed``."""
    tensors = plan.target_source.tensors()
    return plan.spec.module().load(tensors, plan.target_config, slots, dtype, attention, convert)


def streamed(
    plan: Plan, slots: int, dtype: torch.dtype, attention: AttentionFactory, convert: Convert = dequantized
) -> TapTarget:
    """Return the plan's target, which reads a layer's tensors from its checkpoint in every forward.

    Args:
        slots: the longest context, in tokens
        dtype: of the computation, whatever the checkpoint's is
        convert: makes the weights that are computed of those that are read, by default dequantized ones
    """
    source, names = plan.target_source, names_by_layer(plan)
    later = {name for each in names.values() for name in each}

    def at_first() -> Iterator[tuple[str, Tensor]]:
        yield from source.some(lambda name: name not in later)
        headers = source.headers()
        for name in later:
            if name.rpartition(".")[2] != INPUT_ORDER:
                yield name, torch.empty(headers[name].shape, device="meta")

    def filled_later(name: str, value: Tensor) -> Tensor:
        return torch.zeros((), dtype=dtype).expand(value.shape) if value.is_meta else convert(name, value)

    target: Any = plan.spec.module().load(at_first(), plan.target_config, slots, dtype, attention, filled_later)
    model = next(each for each in target.modules() if type(each) is type(plan.skeleton.model))
    skeleton = replace(plan.skeleton, model=model)
    for index, layer in layers_of(model).items():
        stored = LayerTensors(source, skeleton, dtype, layer, names[index], convert)
        layer.register_forward_pre_hook(stored.read)
        layer.register_forward_hook(stored.drop, always_call=True)
    return target


def names_by_layer(plan: Plan) -> dict[int, set[str]]:
    """Return the checkpoint's names of the decoder layers' tensors, by layer."""
    found: dict[int, set[str]] = defaultdict(set)
    for name in plan.target_source.headers():
        layer = LAYER.match(name)
        read = name.rpartition(".")[2] == INPUT_ORDER or plan.skeleton.key_map(name) is not None
        if layer is not None and read:
            found[int(layer[2])].add(name)
    return found


def layers_of(model: nn.Module) -> dict[int, nn.Module]:
    """Return the decoder layers that have parameters, by their places."""
    found = (LAYER.match(name) for name, _ in model.named_parameters())
    return {int(each[2]): model.get_submodule(each[1] + each[2]) for each in found if each is not None}


class LayerTensors:
    """The tensors of one decoder layer, which are in memory only while it runs. ``names``: the checkpoint's of them."""

    def __init__(
        self,
        source: Source,
        skeleton: Skeleton,
        dtype: torch.dtype,
        layer: nn.Module,
        names: set[str],
        convert: Convert,
    ):
        self.source, self.skeleton, self.dtype, self.layer, self.names = source, skeleton, dtype, layer, names
        self.convert = convert
        self.absent = [(held, name, value) for held, name, value in _held(layer) if is_absent(value)]

    def read(self, *_call: object) -> None:
        """Read the tensors, as a hook in front of the layer. Raises ValueError if the checkpoint has one of them
        elsewhere, with another layer."""
        self.skeleton.fill(self.source.some(self.names.__contains__), self.dtype, self.convert)
        missing = [name for held, name, _ in self.absent if is_absent(held[name])]
        if missing:
            raise ValueError(
                f"{self.source.path}: {missing[0]} is not with the tensors of its layer, so the target is not "
                "computed a layer at a time: type --no-fit"
            )

    def drop(self, *_call: object) -> None:
        """Drop the tensors, as a hook behind the layer."""
        for held, name, value in self.absent:
            held[name] = value
        return_freed_memory()


def _held(layer: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor | None]]:
    for module in layer.modules():
        for held in (module._parameters, module._buffers):
            yield from ((held, name, value) for name, value in list(held.items()))


def is_absent(value: Tensor | None) -> bool:
    """Return whether a tensor stands in for one that was not read: all of its elements are one in memory."""
    return value is not None and value.ndim > 0 and not any(value.stride())
