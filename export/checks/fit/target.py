"""Runs the target over the texts, and keeps its states of all layers and its greedy token after each token.

A target that does not fit into memory is computed one decoder layer at a time (``streamed``). Its own forward runs, but
a layer's tensors are read from the checkpoint when the layer is called, and dropped after the call. So one forward is
one pass over the checkpoint. The values are those of the loaded target, bit for bit.
"""

import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eagle3.export.checkpoints.random_folder import LAYER
from eagle3.export.checkpoints.source import Source
from eagle3.export.checks.fit import texts
from eagle3.export.planning.plan import LARGE, Plan
from eagle3.export.speculator.tensor_files import return_freed_memory
from eagle3.runner.system.machine import free_memory
from eagle3.targets import TapTarget
from eagle3.targets.attention import Block, EagerAttention, KVCacheShape
from eagle3.targets.input_order import INPUT_ORDER
from eagle3.targets.loading import dequantized
from eagle3.targets.spec import Skeleton

DTYPE = torch.float32
BLOCK_ROWS = 2048
"""The most rows of blocks that one reading of a head computes, after tokens of pieces that are computed as given."""
FORWARDS = 40
"""The forwards of a head over the text: 20 readings, with a forward each and one more for their later steps."""
FLOPS_A_CORE, READ_A_SECOND = 2.5e10, 1e9
"""The operations per second of one core of an AVX2 processor, in float32 products of some hundred rows, and the bytes
per second of a disk, for a file that does not stay in memory."""
MOST_SECONDS = 60.0
"""The longest estimated time of a measurement that the user did not ask for."""


def cost(plan: Plan) -> tuple[bool, int, float]:
    """Estimate a measurement of the plan's head on this machine: whether the target is computed a layer at a time,
    since it does not fit into memory whole; the bytes of memory; the seconds."""
    config, head, layers = plan.target_config, plan.draft, names_by_layer(plan).values()
    sizes = {name: header.elements for name, header in plan.target_headers.items()}
    in_layers = [sum(sizes.get(name, 0) for name in names) for names in layers]
    draft = {name: header.elements for name, header in head.headers.items()}
    multiplied = sum(draft.values()) - draft.get("embed_tokens.weight", 0)
    multiplied += config.vocab_size * config.hidden_size * head.shares_lm_head
    states = texts.GIVEN * config.hidden_size * (config.num_hidden_layers + 2)  # of a piece
    held, free = 4 * (sum(sizes.values()) + sum(draft.values()) + texts.SEGMENTS * states), free_memory()
    streamed = free is not None and held > free
    tokens = texts.GIVEN * (texts.STREAMED if streamed else texts.SEGMENTS)
    rows = min(tokens * head.block_rows, BLOCK_ROWS) or tokens
    products = tokens * sum(sizes.values()) + FORWARDS * rows * multiplied
    seconds = 2 * products / (FLOPS_A_CORE * torch.get_num_threads())
    if streamed:  # two layers: beside the one that runs, what is read or merged
        held -= 4 * (sum(in_layers) - 2 * max(in_layers, default=0) + (texts.SEGMENTS - texts.STREAMED) * states)
        seconds += sum(header.bytes for header in plan.target_headers.values()) / READ_A_SECOND
    return streamed, held, seconds


def why_not_measured(plan: Plan, asked: bool) -> str | None:
    """Return a reason not to measure, None where there is none. ``asked``: the user typed ``--fit``, and waits."""
    if plan.target_config.max_position_embeddings <= texts.GIVEN or plan.max_seq_len <= texts.GIVEN:
        return f"the context is shorter than the texts of {texts.GIVEN} tokens"
    (streamed, held, seconds), free = cost(plan), free_memory()
    minutes = max(1, round(seconds / 60))
    takes = f"about {minutes} minute{'s' * (minutes > 1)} and {held / 1e9:,.1f} GB"
    takes += ", the target a layer at a time" * streamed
    if free is not None and held > free:
        return f"it takes {takes}, but {free / 1e9:,.1f} GB are free"
    return f"it would take {takes}: type --fit" if not asked and seconds > MOST_SECONDS else None


@dataclass(frozen=True)
class Seen:
    """The states and tokens that the target computed of one text of T tokens.

    ``greedy``, int64 [T], is its greedy token after each token. ``states``, each [1, T, H], are the inputs of layers
    and the last layer's output, as in transformers' ``hidden_states``, and ``final`` is the state after the final norm.
    The first token that may be the anchor of a round is at ``begin``. ``kept`` has keys and values of the last layer of
    each kind, for heads that attend to the target's cache.
    """

    tokens: Tensor
    greedy: Tensor
    states: tuple[Tensor, ...]
    final: Tensor
    begin: int
    kept: dict[str, tuple[Tensor, ...]]


class Measured:
    """The target's states over texts, with which any number of its heads is measured. ``written`` is True if the target
    wrote the texts, from the beginnings of pieces: then rounds are counted as in use. A large target computes the texts
    themselves, and what counts is its greedy token after each of their tokens."""

    def __init__(self, plan: Plan, text: Path | None = None, seed: int = 0, stream: bool | None = None):
        """Compute the target; with ``stream`` a layer at a time, by default where it does not fit into memory."""
        start, self.seed, config = time.monotonic(), seed, plan.target_config
        self.streamed = cost(plan)[0] if stream is None else stream
        small = sum(header.bytes for header in plan.target_headers.values()) < LARGE
        self.written = small and not self.streamed  # a token that is written takes a pass over the checkpoint
        length, count = (texts.PROMPT, texts.WRITTEN) if self.written else (texts.GIVEN, 0)
        number = texts.STREAMED if self.streamed else texts.SEGMENTS
        given = texts.pieces(plan.checkpoint, config.vocab_size, length, number, seed, text)
        self.kinds = ", ".join(dict.fromkeys(kind for kind, _ in given))
        if self.streamed:  # one pass for all of them
            given = [(self.kinds, [token for _, ids in given for token in ids])]
        slots = max(len(ids) for _, ids in given) + count + 1
        if slots > (most := config.max_position_embeddings):
            raise ValueError(f"the target knows {most} positions, too few for a text of {slots} tokens")
        self.target = (streamed if self.streamed else in_memory)(plan, slots)
        with few_threads(self.written):
            layers, stop = config.num_hidden_layers, plan.eos_ids
            self.seen = [look(self.target, layers, ids, count, stop) for _, ids in given]
        self.seconds = time.monotonic() - start

    @property
    def chains(self) -> int:
        """The number of tokens after which a chain begins."""
        return sum(len(each.tokens) - each.begin for each in self.seen)

    def text(self) -> str:
        """Return a description of the text, for a person."""
        whose = "the target's own greedy tokens behind" if self.written else "tokens of"
        return f"{self.chains} {whose} {self.kinds}"


@contextmanager
def few_threads(small: bool) -> Iterator[None]:
    """Compute small models on one thread: their products are not worth the wait for other threads on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if small else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def look(target: TapTarget, layers: int, ids: list[int], count: int = 0, stop: Collection[int] = ()) -> Seen:
    """Compute a piece of text, and up to ``count`` greedy tokens after it, one by one as in use. They end with the
    first token in ``stop``.

    A forward has rows of one text, from its position 0 on, so that the target may keep anything of earlier positions:
    keys and values, recurrent states, the rows of convolutions.
    """
    ids, at, most = list(ids), 0, len(ids) + count
    greedy: list[Tensor] = []
    parts: list[tuple[Tensor, ...]] = []
    begin = len(ids) if count else min(4, len(ids) - 1)
    while at < len(ids):
        state, taps = target(torch.tensor([ids[at:]]), torch.arange(at, len(ids)), tuple(range(layers + 1)))
        greedy += [target.scores(part).argmax(-1)[0] for part in state.split(64, dim=1)]
        parts.append((state, *taps))
        at = len(ids)
        if at < most and not (at > begin + 1 and ids[-1] in stop):
            ids.append(int(greedy[-1][-1]))
    final, *states = (torch.cat(each, dim=1) for each in zip(*parts, strict=True))
    kinds = ("full_attention", "sliding_attention")
    kept = {kind: tuple(part[:, :, : len(ids)].clone() for part in _caches(target, kind)) for kind in kinds}
    return Seen(torch.tensor(ids), torch.cat(greedy), tuple(states), final, begin, kept)


def restore(target: TapTarget, seen: Seen) -> None:
    """Write the keys and values of a text into the target's caches again."""
    for kind, parts in seen.kept.items():
        for cache, part in zip(_caches(target, kind), parts, strict=True):
            cache[:, :, : part.shape[2]] = part


def _caches(target: TapTarget, kind: str) -> tuple[Tensor, ...]:
    """Return the caches of the target's last layer of a kind, none if it has no such layer."""
    module: Any = target.kept(kind)
    return () if module is None else module.written(None, None, None)


class WholeText(EagerAttention):
    """The reference attention, but with a slot for every position in sliding layers too, so that one call can compute a
    whole text."""

    def __init__(self, shape: KVCacheShape):
        super().__init__(replace(shape, window=0, chunked=False))
        self.window, self.chunked = shape.window, shape.chunked

    def rows(self, input_pos: Tensor, block: Block | None = None) -> tuple[Tensor, Tensor]:
        if block is not None:
            return super().rows(input_pos, block)
        distance = input_pos[:, None] - torch.arange(self.shape.slots)
        visible = distance >= 0
        if self.window:
            visible &= distance < (input_pos[:, None] % self.window + 1 if self.chunked else self.window)
        return input_pos, visible[None, None]


def in_memory(plan: Plan, slots: int) -> TapTarget:
    """Return the plan's target with all of its weights in memory, dequantized. ``slots``: the longest text, in
    tokens."""
    tensors = plan.target_source.tensors()
    return plan.spec.module().load(tensors, plan.target_config, slots, DTYPE, WholeText, dequantized)


def streamed(plan: Plan, slots: int) -> TapTarget:
    """Return the plan's target, which reads a layer's tensors from its checkpoint in every forward.

    The forward raises ValueError if the checkpoint has one of them elsewhere, with another layer.
    """
    source, names = plan.target_source, names_by_layer(plan)
    later = {name for each in names.values() for name in each}

    def at_first() -> Iterator[tuple[str, Tensor]]:
        yield from source.some(lambda name: name not in later)
        shapes = {
            name: header.shape for name, header in source.headers().items() if not name.endswith(f".{INPUT_ORDER}")
        }
        yield from ((name, torch.empty(shapes[name], device="meta")) for name in later & shapes.keys())

    def convert(name: str, value: Tensor) -> Tensor:
        return torch.zeros((), dtype=DTYPE).expand(value.shape) if value.is_meta else dequantized(name, value)

    target: Any = plan.spec.module().load(at_first(), plan.target_config, slots, DTYPE, WholeText, convert)
    model = next(each for each in target.modules() if type(each) is type(plan.skeleton.model))
    skeleton = replace(plan.skeleton, model=model)

    for index, layer in layers_of(model).items():
        _fill_when_called(layer, skeleton, source, names[index])
    return target


def _fill_when_called(layer: nn.Module, skeleton: Skeleton, source: Source, names: set[str]) -> None:
    """Let a layer's tensors be read when it is called, and drop them after the call."""
    held: list[Any] = [each for module in layer.modules() for each in (module._parameters, module._buffers)]
    absent = [(each, name, value) for each in held for name, value in each.items() if is_absent(value)]

    def read(*_call: object) -> None:
        skeleton.fill(source.some(names.__contains__), DTYPE, dequantized)
        if missing := [name for each, name, _ in absent if is_absent(each[name])]:
            raise ValueError(
                f"{source.path}: a layer's {missing[0]} is not with its other tensors, so the target is not computed a "
                "layer at a time: type --no-fit"
            )

    def drop(*_call: object) -> None:
        for each, name, value in absent:
            each[name] = value
        return_freed_memory()

    layer.register_forward_pre_hook(read)
    layer.register_forward_hook(drop, always_call=True)


def names_by_layer(plan: Plan) -> dict[int, set[str]]:
    """Return the checkpoint's names of the decoder layers' tensors, by layer."""
    found: dict[int, set[str]] = defaultdict(set)
    for name in plan.target_source.headers():
        layer = LAYER.match(name)
        if layer is not None and (name.endswith(f".{INPUT_ORDER}") or plan.skeleton.key_map(name) is not None):
            found[int(layer[2])].add(name)
    return found


def layers_of(model: nn.Module) -> dict[int, nn.Module]:
    """Return the decoder layers that have parameters, by their places."""
    found = (LAYER.match(name) for name, _ in model.named_parameters())
    return {int(each[2]): model.get_submodule(each[1] + each[2]) for each in found if each is not None}


def is_absent(value: Tensor | None) -> bool:
    """Return whether a tensor stands in for one that was not read: all of its elements are one in memory."""
    return value is not None and value.ndim > 0 and not any(value.stride())
