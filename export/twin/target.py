"""Compares two small copies of a target: transformers' model (eager attention, no cache, all recomputed) and the
export's.

Logits and the states at every layer are compared over two prompts, one after the other in the same caches. Both are
longer than any length in the configuration (sliding window, original rope length):

1. the first is computed in the longest chunks that are allowed, then in steps, each after a verify window that is
   rolled back;
2. in the second no chunk crosses a length: a chunk ends before the shortest length, steps cross each length, and chunks
   cover the parts between.

transformers' states must not depend on the length of the text either, so it also computes a text that ends at each
length.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from eagle3.export.checkpoints import open_source
from eagle3.export.twin.comparison import SEEDS, TOLERANCE, Comparison, twin_folder
from eagle3.export.twin.fields import all_fields, reset, unusual_fields
from eagle3.export.twin.lengths import TRIED, passed_lengths, prompt_length, unnamed_lengths, with_value
from eagle3.export.twin.randomize import randomize
from eagle3.export.twin.shrink import common_fields, from_common_fields, known_fields, shrink
from eagle3.targets import TargetSpec
from eagle3.targets.attention import EagerAttention
from eagle3.targets.state_mixers import token_by_token
from eagle3.targets.text_part import TextPart, build

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

STEPS, STEP_ROWS, WRONG_ROWS = 4, 2, 4
"""After a prompt, ``STEPS`` verify windows with ``STEP_ROWS`` right tokens follow. Each overwrites ``WRONG_ROWS`` wrong
tokens."""
BEFORE = 5
"""The first chunk of the second prompt ends this many rows before the shortest length. It is odd so that the chunk's
length is odd, since most lengths are even."""
MOST_FIELDS_TRIED = 12
DISTRIBUTED_TENSORS = "torch.distributed.tensor"
MOST_CHARACTERS = 200  # the longest shown part of an error of transformers or torch, or of a value


@dataclass(frozen=True)
class Twin:
    """The configuration of a small copy, the length of its prompt in tokens, and the lengths that the prompt passes,
    ascending."""

    config: "PreTrainedConfig"
    tokens: int
    lengths: tuple[int, ...]


def make_twin(config: "PreTrainedConfig") -> Twin:
    """Make the ``Twin`` of a user's text configuration. Raises transformers' own error if it cannot build a model."""
    small = shrink(config)
    fields = common_fields(small)

    def build(fields: dict[str, Any]) -> nn.Module:
        model = _reference(from_common_fields(small, deepcopy(fields)))
        randomize(model, SEEDS[0])
        return model

    tokens = torch.randint(0, small.vocab_size, (1, prompt_length(fields)), generator=torch.Generator().manual_seed(0))
    unnamed = unnamed_lengths(fields, build, known_fields(), tokens)
    for index, path in enumerate(unnamed):
        fields = with_value(fields, path, TRIED + 2 * index)
    small = from_common_fields(small, fields) if unnamed else small
    length = prompt_length(fields, unnamed)
    passed = (border for border in passed_lengths(fields, unnamed) if border + STEP_ROWS <= length)
    return Twin(small, length, tuple(passed))


def check_target(spec: TargetSpec, name: str, checkpoint: Path, config: "PreTrainedConfig") -> dict[str, Any]:
    """Compare the two small copies of a text configuration of transformers, and return the manifest's entry on the
    comparison. Raises ValueError if they differ or the export's copy does not run. The message names the fields that
    differ from their class's defaults.
    """
    file = checkpoint / "config.json"
    twin = _shrunk(file, config)
    try:
        compared = best_comparison(spec, twin)
    except OSError:  # a fault of the disk, not of the model
        raise
    except Exception as error:
        reason = _line(error)
        if not isinstance(error, ValueError):  # not a refusal by this package
            reason = f"its layers have an unsupported structure ({type(error).__name__}, {reason})"
        raise ValueError(
            f"{name} cannot compute {file} ({config.model_type}): {reason}; {_named(unusual_fields(config))}"
        ) from error
    if compared.difference > TOLERANCE:
        raise ValueError(
            f"{name} would not compute {file} ({config.model_type}) as transformers does: {compared.worst()} in a "
            f"small copy with random weights; {_culprits(spec, twin, config)}"
        )
    return compared.as_json() | {"layers": twin.config.num_hidden_layers}


def _shrunk(file: Path, config: "PreTrainedConfig") -> Twin:
    try:
        return _running(config)
    except Exception as error:
        causes = {field: value for field, value in _tried(config) if _runs_without(config, field)}
        fact = f"with {_listed(causes)} " if causes else ""
        raise ValueError(
            f"{file}: {fact}transformers cannot build or run a model from it ({_line(error)}): copy or correct the file"
        ) from error


def _running(config: "PreTrainedConfig") -> Twin:
    """Return the ``Twin`` of a configuration. Raises transformers' error if it cannot build the model or the model does
    not run."""
    twin = make_twin(config)
    _reference(twin.config)(torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    return twin


def _tried(config: "PreTrainedConfig") -> list[tuple[str, Any]]:
    return list(unusual_fields(config).items())[:MOST_FIELDS_TRIED]


def _runs_without(config: "PreTrainedConfig", field: str) -> bool:
    """Return True if transformers can build and run a small copy of a configuration in which a field has its class's
    default."""
    try:
        _running(reset(config, field))
    except Exception:  # the class rejects the default beside the other fields, or the model does not run
        return False
    return True


def best_comparison(spec: TargetSpec, twin: Twin) -> Comparison:
    """Compare the two copies with several sets of random weights, until they agree: with some weights two experts tie,
    and rounding decides between them."""
    found = compare(spec, twin, SEEDS[0])
    for seed in SEEDS[1:]:
        if found.difference <= TOLERANCE:
            break
        found = min(found, compare(spec, twin, seed), key=lambda each: each.difference)
    return found


def compare(spec: TargetSpec, twin: Twin, seed: int) -> Comparison:
    """Compare both copies with the same random weights, which transformers saves and the export's loader reads."""
    config, length = twin.config, twin.tokens
    compared = Comparison(length)

    def add(start: int, given: dict[str, Tensor]) -> None:
        for what, value in given.items():
            compared.add(what, start, value, expected[what][:, start : start + value.shape[1]], expected[what])

    with torch.random.fork_rng(devices=[]), torch.no_grad(), twin_folder() as folder:
        torch.manual_seed(seed)
        reference = _reference(config)
        randomize(reference, seed)
        tokens = torch.randint(0, config.vocab_size, (1, length))
        wrong = torch.randint(0, config.vocab_size, (1, length + WRONG_ROWS))
        expected = _recomputed(reference, tokens)
        for end in twin.lengths:
            add(0, _recomputed(reference, tokens[:, :end]))
        _save(reference, folder)
        del reference
        weights = open_source(folder).tensors()
        target = spec.module().load(weights, deepcopy(config), length + WRONG_ROWS, torch.float32, EagerAttention)
        rows = max(1, min(spec.max_forward_len(config), (length - STEPS * STEP_ROWS) // 2))
        taps = tuple(range(config.num_hidden_layers + 1))
        for walk in (_in_long_chunks(length, rows), _along_lengths(length, rows, twin.lengths)):
            for start, end, is_right in walk:
                given = (tokens if is_right else wrong)[:, start:end]
                state, tapped = target(given, torch.arange(start, end), taps)
                if is_right:
                    states = {f"tap {tap}": value for tap, value in zip(taps, tapped, strict=True)}
                    add(start, {"logits": target.logits(state).float()} | states)
    return compared


def _line(error: Exception) -> str:
    """Return an error's message on one line, cut to ``MOST_CHARACTERS``."""
    return _cut(" ".join(str(error).split()) or type(error).__name__)


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."


@contextmanager
def quiet_saving() -> Iterator[None]:
    """Keep transformers from showing a progress bar in this context, and from importing the module of distributed
    tensors, which huggingface_hub would use to check each weight."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    unknown = sys.modules.setdefault(DISTRIBUTED_TENSORS, None) is None  # type: ignore[arg-type]  # to import it fails
    try:
        yield
    finally:
        if unknown:
            del sys.modules[DISTRIBUTED_TENSORS]
        if shown:
            logging.enable_progress_bar()


def _reference(twin: "PreTrainedConfig") -> "PreTrainedModel | TextPart":
    """Return transformers' model, or the text part of a multimodal one, which runs the whole model's forward.

    It keeps the dtypes that transformers gives it: some classes have parts that stay in bfloat16 and compute in it.
    """
    model = build(twin, real=True).eval().requires_grad_(False)
    if isinstance(model, TextPart) and model.owner is not model.wrapper:
        without_images(model.owner)
    return model


def without_images(text_model: nn.Module) -> None:
    """Add the missing field for images, with the value None, to the outputs of a text model within a wrapper. Llama 4's
    wrapper in transformers 5.24.0 reads this field, and raises an error if it is missing.
    """

    def add_none(_module: nn.Module, _args: object, output: Any) -> None:  # noqa: ANN401 - transformers' own
        if not hasattr(output, "image_outputs"):
            output.image_outputs = None

    text_model.register_forward_hook(add_none)


def _save(reference: "PreTrainedModel | TextPart", folder: Path) -> None:
    if isinstance(reference, TextPart):
        save_file(reference.saved(), folder / "model.safetensors")
    else:
        with quiet_saving():
            reference.save_pretrained(folder)


def _recomputed(model: "PreTrainedModel | TextPart", tokens: Tensor) -> dict[str, Tensor]:
    """Return logits and states of one forward over all tokens, by name: each [1, T, .]. Hooks on the layers read the
    states, since transformers applies the final norm to the last state that it returns."""
    states: dict[int, Tensor] = {}
    count = model.config.num_hidden_layers
    layers = next(each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == count)
    hooks = []
    for index, layer in enumerate(layers):

        def keep_input(
            _module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any], index: int = index
        ) -> None:
            states[index] = args[0] if args else kwargs["hidden_states"]

        hooks.append(layer.register_forward_pre_hook(keep_input, with_kwargs=True))

    def keep_output(_module: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        states[len(layers)] = output[0] if isinstance(output, tuple) else output

    hooks.append(layers[-1].register_forward_hook(keep_output))
    with token_by_token(model):
        logits = model(tokens, use_cache=False).logits.float()
    for hook in hooks:
        hook.remove()
    for index in reversed(range(len(layers))):
        states.setdefault(index, states[index + 1])  # a layer that attends only to images has no effect on a text
    return {"logits": logits} | {f"tap {index}": states[index] for index in range(len(layers) + 1)}


Forward = tuple[int, int, bool]
"""The first position of a forward, the one after its last, and True if its tokens are the right ones."""


def _in_long_chunks(length: int, rows: int) -> Iterator[Forward]:
    prompt = length - STEPS * STEP_ROWS
    yield from _chunks(0, prompt, rows)
    yield from _steps(prompt, length, rows)


def _along_lengths(length: int, rows: int, lengths: tuple[int, ...]) -> Iterator[Forward]:
    """Yield forwards in which one step ends at each of ``lengths``, ascending, and the next one begins there."""
    lengths = lengths or (length // 2,)
    at = max(1, min(lengths[0] - BEFORE, rows))
    yield from _chunks(0, at, rows)
    for border in lengths:
        for start, end in ((border - 2 * STEP_ROWS, border), (border, border + STEP_ROWS)):
            yield from _chunks(at, start, rows)
            at = max(at, start)
            yield from _steps(at, end, rows)
            at = max(at, end)
    yield from _chunks(at, length - STEPS * STEP_ROWS, rows)
    yield from _steps(max(at, length - STEPS * STEP_ROWS), length, rows)


def _chunks(start: int, end: int, rows: int) -> Iterator[Forward]:
    for at in range(start, end, rows):
        yield at, min(at + rows, end), True


def _steps(start: int, end: int, rows: int) -> Iterator[Forward]:
    for at in range(start, end, STEP_ROWS):
        yield at, at + min(WRONG_ROWS, rows), False
        yield from _chunks(at, min(at + STEP_ROWS, end), rows)


def _culprits(spec: TargetSpec, twin: Twin, config: "PreTrainedConfig") -> str:
    """Find the fields that cause a difference, and return a text that names them with their values in ``config``. Each
    unusual field of the small copy is reset to its default, one at a time; if the copies then agree, the field is a
    cause."""
    given, causes = all_fields(config), {}
    for field, value in _tried(twin.config):
        try:
            if compare(spec, replace(twin, config=reset(twin.config, field)), SEEDS[0]).difference <= TOLERANCE:
                causes[field] = given.get(field, value)
        except Exception:  # transformers cannot build a model without this value, so the test says nothing
            continue
    if causes:
        return f"{_listed(causes)}: this value is not supported"
    return _named(unusual_fields(config))


def _named(unusual: dict[str, Any]) -> str:
    return f"not at their defaults: {_listed(unusual)}" if unusual else "every field is at its default"


def _listed(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {_cut(repr(value))}" for name, value in fields.items())
