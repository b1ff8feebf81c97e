"""Joins tensors of a GGUF file that are parts of one tensor of the model.

transformers keeps the gate and the up projection of experts in one tensor, llama.cpp in two. The same holds for the
MLPs of Granite 4, and for Qwen3-Next's projection to queries, keys, values and gates.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from eagle3.targets.loading import dequantized, is_plain

if TYPE_CHECKING:
    from gguf.gguf_reader import ReaderTensor

Field = Callable[[str], int]
"""A function that returns a number of the file's metadata by its key without the architecture's name."""


def by_key_head(rows: Tensor, number: Field) -> Tensor:
    """Put the rows of a joined projection, [queries, keys, values, gates] of all heads, into transformers' order: the
    rows of the first key head, then those of the second, and so on."""
    heads, keys, inner = (number(f"ssm.{key}") for key in ("group_count", "state_size", "inner_size"))
    kinds = rows.split([heads * keys, heads * keys, inner, inner])
    return torch.cat([kind.unflatten(0, (heads, -1)) for kind in kinds], 1).flatten(0, 1)


class Join(NamedTuple):
    """A rule: tensors whose names end in ``parts`` become one whose name ends in ``own``."""

    parts: tuple[str, ...]
    own: str
    dimension: int
    """The parts lie one after the other along this dimension."""
    arranged: Callable[[Tensor, Field], Tensor] | None = None
    """Puts the rows of the joined tensor into transformers' order; None if they are in it."""

    def shape(self, shapes: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
        first, *others = shapes
        length = first[self.dimension] + sum(shape[self.dimension] for shape in others)
        return (*first[: self.dimension], length, *first[self.dimension + 1 :])

    def __call__(self, values: list[Tensor], number: Field) -> Tensor:
        """Join parts. Weights of one quantized type stay quantized; otherwise the parts are dequantized."""
        arranged = self.arranged or (lambda rows, _number: rows)

        def joined(parts: Iterable[Tensor]) -> Tensor:
            return arranged(torch.cat(list(parts), self.dimension), number)

        first, *others = values
        if not is_plain(first) and all(_kind(value) == _kind(first) for value in others):
            return with_parts(first, lambda part: joined(getattr(value, part) for value in values))
        return joined(dequantized("", value).float() for value in values)


def with_parts(weight: Tensor, made: Callable[[str], Tensor]) -> Tensor:
    """Return a quantized weight of the same class and settings as ``weight``; ``made`` returns each of the tensors that
    it consists of, by name."""
    form: Any = weight
    return type(form)(**{name: made(name) for name in form.tensor_data_names}, **_settings(form))


def _kind(weight: Tensor) -> tuple[object, ...]:
    return (type(weight),) if is_plain(weight) else (type(weight), *_settings(weight).values())


def _settings(weight: Any) -> dict[str, Any]:  # noqa: ANN401 - of torchao or ExecuTorch
    return {name: getattr(weight, name) for name in weight.tensor_attribute_names}


MLP = Join((".shared_mlp.gate_proj.weight", ".shared_mlp.up_proj.weight"), ".shared_mlp.input_linear.weight", 0)
EXPERTS = Join((".experts.gate_proj.weight", ".experts.up_proj.weight"), ".experts.gate_up_proj", 1)
QUERY_TO_GATE = Join((".in_proj_qkv.weight", ".in_proj_z.weight"), ".in_proj_qkvz.weight", 0, by_key_head)


class Entry(NamedTuple):
    """The tensors of a file that make up one tensor of the model, and the rule that joins them; None for a single
    tensor."""

    tensors: tuple["ReaderTensor", ...]
    join: Join | None = None


def entries(named: Iterable[tuple[str, "ReaderTensor"]], joins: tuple[Join, ...]) -> dict[str, Entry]:
    """Map each name in the model to its tensors. ``named`` are a file's tensors, each with its name as a tensor of its
    own, which a part keeps if another part is missing. Raises ValueError if two tensors have the same name."""
    found = dict[str, Entry]()
    for name, tensor in named:
        if name in found:
            raise ValueError(f"{name} is {found[name].tensors[0].name} and {tensor.name} in the file: which is meant?")
        found[name] = Entry((tensor,))
    for join in joins:
        for name in [name for name in found if name.endswith(join.parts[0])]:
            stem = name.removesuffix(join.parts[0])
            parts = [stem + part for part in join.parts]
            if all(part in found for part in parts):
                found[stem + join.own] = Entry(tuple(found.pop(part).tensors[0] for part in parts), join)
    return found
