"""Converts checkpoints whose tensors do not correspond one to one to a model's, such as single experts on disk that are
stacked in the module.

The conversion is transformers' own mapping (``conversion_mapping.py`` there). Reverting it, as transformers does when
it saves, gives the names and shapes of the tensors that a checkpoint must have.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
    dot_natural_key,
    revert_weight_conversion,
)

from eagle3.targets.experts import use_experts
from eagle3.targets.text_part import TextPart


@dataclass(frozen=True)
class Part:
    """A tensor of a checkpoint that is merged with others into the model's tensor ``target``. ``pattern`` is the name
    that transformers gives its role in the merge."""

    target: str
    pattern: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Shapes:
    """Stands in for the model in transformers' converters, because by then the model has our ``Experts``. It holds the
    original tensors, on the meta device."""

    tensors: dict[str, Tensor]

    def get_parameter(self, name: str) -> Tensor:
        return self.tensors[name]


class Conversion:
    """Converts the checkpoints of one model of transformers on the meta device. The model's experts are replaced by our
    ``Experts``.

    Names are those of transformers' text model. A part goes by the name to which transformers renames it. A
    ``TextPart`` is converted like its wrapper, and the wrapper's names are then mapped to the text model's.
    """

    def __init__(self, model: nn.Module):
        self.part = model if isinstance(model, TextPart) else None
        self.model: Any = self.part.wrapper if self.part else model
        transforms = get_model_conversion_mapping(self.model)
        self.own = dict(model.state_dict())
        self.renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        self.converters = [each for each in transforms if isinstance(each, WeightConverter)]
        self.shapes = _Shapes({self._whole(name): value for name, value in self.own.items()})
        self._saved = self._as_saved()
        self.replaced = use_experts(model)

    def name(self, name: str) -> str | None:
        """Return the model's name of a checkpoint's tensor; None for a tensor that is not part of the model."""
        renamed = self._text(apply_renamings(name, self.renamings))
        for own in (renamed, name):  # the second case is a text model's names in a wrapper's checkpoint
            if own in self.own or own in self.parts:
                return own
        return None

    def _text(self, name: str) -> str:
        """Return the text model's name of a tensor of the wrapper."""
        return (self.part.text_name(name) or name) if self.part else name

    def _whole(self, name: str) -> str:
        return self.part.wrapped_name(name) if self.part else name

    @cached_property
    def parts(self) -> dict[str, Part]:
        """The parts by name; empty if checkpoints hold the model's own tensors."""
        return {name: part for name, part in self._saved.items() if isinstance(part, Part)}

    def _as_saved(self) -> dict[str, Part | tuple[int, ...]]:
        """Map each tensor of a checkpoint to its ``Part``, or to its shape if it is one of the model's own tensors."""
        if not self.converters:
            return {name: tuple(value.shape) for name, value in self.own.items()}
        saved = {}
        for name, value in revert_weight_conversion(self.model, self.shapes.tensors).items():
            name, shape = apply_renamings(name, self.renamings), tuple(value.shape)
            target, pattern = apply_converters(name, self.converters)
            saved[self._text(name)] = shape if pattern is None else Part(self._text(target), pattern, shape)
        return saved

    def expected(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Map names to shapes of the tensors that must be in a checkpoint that holds ``names``. If the checkpoint does
        not hold a target as one tensor, it must hold the target's parts."""
        own = {name: tuple(value.shape) for name, value in self.own.items()}
        whole = {name for name in names if name in own and name not in self._saved}
        parts = {name: part.shape for name, part in self.parts.items() if part.target not in whole}
        return {name: shape for name, shape in own.items() if name in self._saved or name in whole} | parts

    def joined(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Convert (name, tensor) pairs of a checkpoint to those of the model with our ``Experts``.

        Parts are kept, memory-mapped if the checkpoint is, and merged when the last part of their target has been read.
        """
        missing = Counter(part.target for part in self.parts.values())
        waiting: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors:
            part = self.parts.get(name)
            if part is None:
                yield self._flat(name, tensor)
                continue
            waiting.setdefault(part.target, {})[name] = tensor
            missing[part.target] -= 1
            if not missing[part.target]:
                for own, merged in self._merge(part.target, waiting.pop(part.target)):
                    yield self._flat(own, merged)

    def _flat(self, name: str, tensor: Tensor) -> tuple[str, Tensor]:
        own, flatten = self.replaced.get(name, (name, None))
        return own, tensor if flatten is None else flatten(tensor).contiguous()

    def _merge(self, target: str, given: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        patterns = {self.parts[name].pattern for name in given}
        converter = deepcopy(next(each for each in self.converters if patterns <= set(each.source_patterns)))
        for name in sorted(given, key=dot_natural_key):  # experts in the order of their numbers
            converter.add_tensor(self._whole(target), self._whole(name), self.parts[name].pattern, given.pop(name))
        made = converter.convert(self._whole(target), model=self.shapes, config=self.model.config)
        for own, value in made.items():
            yield self._text(own), value[0] if isinstance(value, list) else value
