"""Finds the lengths in a configuration (sliding windows, chunks, original rope lengths), in tokens, cuts them for a
small copy, and chooses a prompt that is longer than each. Most lengths are known by the names of their fields.
``unnamed_lengths`` finds the others by their effect on transformers' own model.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

LONGEST, SHORTEST, APART, POSITIONS = 32, 16, 4, 256
"""Numbers of tokens: the longest length that a prompt passes twice, the shortest length, the least difference between
two lengths, and max_position_embeddings if no other field determines it."""
PAST = 24
"""The number of tokens of a prompt after a length that it passes once."""
RUN_LENGTHS = (
    *("sliding_window", "sliding_window_size", "attention_window_size", "window_size", "local_attention"),
    *("attention_chunk_size", "floor_scale", "log_scaling_n_floor", "index_topk"),
)
"""The names of lengths in tokens that a forward compares with positions."""
ORIGINAL, MAX_POSITIONS = "original_max_position_embeddings", "max_position_embeddings"
TRIED = 19
"""The value, in tokens, that a number is set to, to test if it is a length. No other number of a small copy has this
value."""
TOLERANCE = 1e-5  # for logits with a standard deviation of about 3

Path = tuple[str, ...]


def parts(value: object, path: Path = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the fields and every dictionary in them: rope parameters, also per layer type, and overrides per layer."""
    if isinstance(value, dict):
        yield path, value
        for name, inner in value.items():
            yield from parts(inner, (*path, name))


def is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def cut_lengths(fields: dict[str, Any], unnamed: tuple[Path, ...] = ()) -> None:
    """Cut every length by one ratio, in place. The longest length below max_position_embeddings, which a prompt can
    exceed, becomes about ``LONGEST``. Different lengths stay different and in the same order. A
    yarn table stays longer than 2 pi beta_fast tokens, since a shorter one would not depend on beta_fast.
    """
    positions = fields.get(MAX_POSITIONS) or math.inf
    found = list(_lengths(fields, unnamed))
    reached = [each for each in found if each[0][each[1]] < positions]
    ranked = sorted({part[name] for part, name in reached if not _table(part, name)})
    cuts: dict[int, int] = {}
    for value in ranked:
        least = max(cuts.values(), default=SHORTEST - APART) + APART
        cuts[value] = min(value, max(round(value * LONGEST / ranked[-1]), least))

    def cut(part: dict[str, Any], name: str) -> int:
        table = _table(part, name)
        return min(part[name], table) if table else cuts[part[name]]

    # A missing factor is max_position_embeddings divided by the original length.
    ruled = [cut(part, name) * positions // part[name] for part, name in reached if name == ORIGINAL]
    fewer = min(positions, max(ruled, default=POSITIONS))
    for part, name in found:
        part[name] = cut(part, name) if part[name] < positions else part[name] * fewer // positions
    for _, part in parts(fields):
        if is_count(part.get(MAX_POSITIONS)):
            part[MAX_POSITIONS] = min(part[MAX_POSITIONS], fewer)


def passed_lengths(fields: dict[str, Any], unnamed: tuple[Path, ...] = ()) -> dict[int, bool]:
    """Map the lengths that a small copy's prompt passes, ascending, to True if the prompt passes them twice."""
    positions = fields.get(MAX_POSITIONS) or math.inf
    found: dict[int, bool] = {}
    for part, name in _lengths(fields, unnamed):
        if part[name] < positions:
            found[part[name]] = found.get(part[name], False) or not _table(part, name)
    return dict(sorted(found.items()))


def prompt_length(fields: dict[str, Any], unnamed: tuple[Path, ...] = ()) -> int:
    """Return the number of tokens with which a prompt passes every length of a small copy: two and a half times the
    longest length, or a little more than the length of a yarn table."""
    passed = passed_lengths(fields, unnamed)
    twice = max((length for length, whether in passed.items() if whether), default=LONGEST)
    wanted = max(5 * twice // 2, max(passed, default=0) + PAST)
    positions = fields.get(MAX_POSITIONS)
    return min(wanted, positions - 4) if positions else wanted  # 4 for a rejected window after the end


def unnamed_lengths(
    fields: dict[str, Any], build: Callable[[dict[str, Any]], nn.Module], known: set[str], tokens: Tensor
) -> tuple[Path, ...]:
    """Return the paths of the numbers in ``fields`` that are lengths under unknown names.

    Such a number is larger than the length T of the prompt ``tokens`` [1, T]. If it is set to ``TRIED``, no tensor's
    shape and none of the first logits change, but later logits do. ``build`` makes a model from fields and gives equal
    shapes equal random weights.
    """
    numbers = [
        (*path, name)
        for path, part in parts(fields)
        for name, value in part.items()
        if is_count(value) and value > tokens.shape[1] and name not in known and not name.endswith("_token_id")
    ]
    if not numbers:
        return ()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = build(fields)
        shapes, logits = _shapes(model), model(tokens, use_cache=False).logits
        found = []
        for path in numbers:
            try:
                other = build(with_value(fields, path, TRIED))
                if _shapes(other) != shapes:
                    continue
                gap = (other(tokens, use_cache=False).logits - logits).abs().amax(-1)[0]
            except Exception:  # any error means that the number is a size on which others depend
                continue
            if gap[: TRIED // 2].max() <= TOLERANCE < gap.max():
                found.append(path)
    return tuple(found)


def with_value(fields: dict[str, Any], path: Path, value: object) -> dict[str, Any]:
    """Return a copy of ``fields`` with another value at ``path``."""
    name, *rest = path
    return fields | {name: with_value(fields[name], tuple(rest), value) if rest else value}


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def _lengths(fields: dict[str, Any], unnamed: tuple[Path, ...]) -> Iterator[tuple[dict[str, Any], str]]:
    names = (*RUN_LENGTHS, ORIGINAL)
    for path, part in parts(fields):
        for name, value in part.items():
            if is_count(value) and (name in names or (*path, name) in unnamed):
                yield part, name


def _table(part: dict[str, Any], name: str) -> int:
    """Return the largest length, in tokens, of a small copy's yarn table; 0 for a field that is not the length of a
    yarn table."""
    yarn = name == ORIGINAL and part.get("rope_type", part.get("type")) == "yarn"
    return int(6.5 * (part.get("beta_fast") or 32)) if yarn else 0
