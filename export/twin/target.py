"""A target's twin: transformers' own model (eager attention, no cache, whole recompute) against our target.

Logits and the states at every layer are compared over a prompt in chunks, longer than a chunk and than whatever length
the configuration has (window, original rope length), then over steps, each after a window that is rolled back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from eagle3.export.checkpoints import open_source
from eagle3.export.twin.comparison import SEEDS, TOLERANCE, Comparison
from eagle3.export.twin.fields import reset, unusual_fields
from eagle3.export.twin.randomize import randomize
from eagle3.export.twin.shrink import prompt_length, shrink
from eagle3.targets import TargetSpec
from eagle3.targets.attention import EagerAttention

STEPS, STEP_ROWS, WRONG_ROWS = 4, 2, 4
"""After the prompt: so many windows of right rows, each written over a longer one of wrong rows."""
MOST_FIELDS_TRIED = 12


def check_target(spec: TargetSpec, name: str, checkpoint: Path, config: Any) -> dict[str, Any]:
    """Compare the twins of a transformers text configuration; returns what the manifest says of it.

    Raises ValueError where they differ or ours does not run, naming the fields that are not at their class's defaults.
    """
    file = checkpoint / "config.json"
    twin = _shrunk(file, config)
    try:
        compared = best_comparison(spec, twin)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if not isinstance(error, ValueError):  # not one of our own refusals
            reason = f"its layers are not of the kind that we adapt ({type(error).__name__}, {reason})"
        raise ValueError(
            f"{name} cannot compute {file} ({config.model_type}): {reason}; {_named(unusual_fields(twin))}"
        ) from error
    if compared.difference > TOLERANCE:
        raise ValueError(
            f"{name} would not compute {file} ({config.model_type}) as transformers does: {compared.worst()} in a "
            f"shrunken twin; {_culprits(spec, twin)}"
        )
    return compared.as_json() | {"layers": twin.num_hidden_layers}


def _shrunk(file: Path, config: Any) -> Any:
    try:
        twin = shrink(config)
        _reference(twin)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{file}: transformers builds no model of it ({reason}): copy or correct the file") from error
    return twin


def best_comparison(spec: TargetSpec, twin: Any) -> Comparison:
    """The twins compared with the first random weights under which they agree: one draw may put an expert's choice on
    a tie, and then rounding decides it."""
    found = None
    for seed in SEEDS:
        compared = compare(spec, twin, seed)
        if found is None or compared.difference < found.difference:
            found = compared
        if found.difference <= TOLERANCE:
            break
    return found


def compare(spec: TargetSpec, twin: Any, seed: int) -> Comparison:
    """Both twins with the same random weights, which ours loads from a folder as transformers saves them."""
    length = prompt_length(twin)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), TemporaryDirectory(prefix="eagle3-twin-") as folder:
        torch.manual_seed(seed)
        reference = _reference(twin)
        randomize(reference, seed)
        tokens = torch.randint(0, twin.vocab_size, (1, length))
        wrong = torch.randint(0, twin.vocab_size, (1, length + WRONG_ROWS))
        expected = _recomputed(reference, tokens)
        with quiet_saving():
            reference.save_pretrained(folder)
        del reference
        weights = open_source(Path(folder)).tensors()
        target = spec.module().load(weights, deepcopy(twin), length + WRONG_ROWS, torch.float32, EagerAttention)
        rows = max(1, min(spec.max_forward_len(twin), (length - STEPS * STEP_ROWS) // 2))
        compared = Comparison(length)
        for start, given in _walk(target, tokens, wrong, rows, twin.num_hidden_layers):
            for what, value in given.items():
                compared.add(what, start, value, expected[what][:, start : start + value.shape[1]], expected[what])
    return compared


@contextmanager
def quiet_saving() -> Iterator[None]:
    """Without transformers' progress bar."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _reference(twin: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(deepcopy(twin), attn_implementation="eager")
    return model.float().eval().requires_grad_(False)


def _recomputed(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """Logits and states of a whole forward, by name: each [1, T, .]. A state is what a hook on the layer sees, since
    transformers hands out the last one normed."""
    states: dict[int, Tensor] = {}
    count = model.config.num_hidden_layers
    layers = next(each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == count)
    hooks = []
    for index, layer in enumerate(layers):

        def keep_input(module, args, kwargs, index=index):
            states[index] = args[0] if args else kwargs["hidden_states"]

        hooks.append(layer.register_forward_pre_hook(keep_input, with_kwargs=True))

    def keep_output(module, args, output):
        states[len(layers)] = output[0] if isinstance(output, tuple) else output

    hooks.append(layers[-1].register_forward_hook(keep_output))
    logits = model(tokens, use_cache=False).logits.float()
    for hook in hooks:
        hook.remove()
    return {"logits": logits} | {f"tap {index}": state for index, state in states.items()}


def _walk(
    target: nn.Module, tokens: Tensor, wrong: Tensor, rows: int, layers: int
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Our target over ``tokens`` as a runner calls it: the first position of a forward and what it gave."""
    taps = tuple(range(layers + 1))

    def forward(given: Tensor, start: int, end: int) -> dict[str, Tensor]:
        state, tapped = target(given[:, start:end], torch.arange(start, end), taps)
        return {"logits": target.logits(state).float()} | {
            f"tap {tap}": value for tap, value in zip(taps, tapped, strict=True)
        }

    length = tokens.shape[1]
    prompt = length - STEPS * STEP_ROWS
    for start in range(0, prompt, rows):
        yield start, forward(tokens, start, min(start + rows, prompt))
    for start in range(prompt, length, STEP_ROWS):
        forward(wrong, start, start + min(WRONG_ROWS, rows))
        step = min(STEP_ROWS, rows)
        for at in range(start, start + STEP_ROWS, step):
            yield at, forward(tokens, at, at + step)


def _culprits(spec: TargetSpec, twin: Any) -> str:
    """Each unusual field is put back to its default alone: those that then agree are the cause."""
    unusual = unusual_fields(twin)
    causes = {}
    for field in list(unusual)[:MOST_FIELDS_TRIED]:
        try:
            if compare(spec, reset(twin, field), SEEDS[0]).difference <= TOLERANCE:
                causes[field] = unusual[field]
        except Exception:  # without this field the rest makes no model: nothing is learnt
            continue
    if causes:
        return f"{_listed(causes)}: this value is not supported"
    return _named(unusual)


def _named(unusual: dict[str, Any]) -> str:
    return f"not at their defaults: {_listed(unusual)}" if unusual else "every field is at its default"


def _listed(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {value!r}" for name, value in fields.items())
