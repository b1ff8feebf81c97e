"""Draws random weights that make errors visible. No weight keeps its initial value of 0 or 1, or its small initial
spread of 0.02."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eagle3.targets.text_part import TextPart

GAIN = 1.5
"""The standard deviation of a projection's output, as a multiple of its input's."""
LOGITS = 3.0
"""The standard deviation of logits before scales and caps: a cap of 30 changes them without saturating."""
NOISE = 0.5
"""The largest change of an entry of a vector."""
STEPS = -6.0, -2.0
"""The range of a recurrent layer's ``dt_bias``: its state then decays over 5 to 50 tokens instead of one."""
FAINT, FAINT_EVERY = 1e-3, 8
"""Every eighth row of an embedding is multiplied by 1e-3: compared with such a row, a norm's epsilon of about 1e-6 is
not negligible."""


def randomize(model: PreTrainedModel | TextPart, seed: int) -> None:
    """Draw every parameter and every persistent floating-point buffer again, in place; a tied tensor is drawn once.

    ``model`` is a causal language model that transformers has just made: the initial values say which vectors are
    factors (1) and which are added (0).
    """
    generator = torch.Generator().manual_seed(seed)
    head = model.get_output_embeddings()
    rows = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding) or module is head}
    factors = _query_key_factors(model)
    done = set()
    with torch.no_grad():
        for module, name, tensor in _tensors(model):
            if id(tensor) in done:
                continue
            done.add(id(tensor))
            if name == "dt_bias":
                tensor.copy_(STEPS[0] + (STEPS[1] - STEPS[0]) * torch.rand(tensor.shape, generator=generator))
            elif tensor.dim() < 2:
                is_norm = name == "weight" and "norm" in type(module).__name__.lower()
                tensor.copy_(_vector(tensor, is_norm, factors.get(id(tensor), 1.0), generator))
            else:
                spread = LOGITS / math.sqrt(tensor.shape[-1]) if id(tensor) in rows else _spread(module, tensor)
                tensor.copy_(spread * torch.randn(tensor.shape, generator=generator))
                if isinstance(module, nn.Embedding):
                    tensor[::FAINT_EVERY] *= FAINT


def _tensors(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield module, name, parameter
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                yield module, name, buffer


def _spread(module: nn.Module, tensor: Tensor) -> float:
    """Return the standard deviation to draw a matrix [..., rows, columns] with.

    An ``nn.Linear`` sums over columns. For other modules the summed dimension is unknown, so the geometric mean of both
    takes its place.
    """
    rows, columns = (max(1, size) for size in tensor.shape[-2:])  # there may be no shared experts
    return GAIN / math.sqrt(columns if isinstance(module, nn.Linear) else math.sqrt(rows * columns))


def _query_key_factors(model: nn.Module) -> dict[int, float]:
    """Return, by id, the factor for the weights of each norm of queries or keys in attention that hardly scales its
    scores. Without the factor each position would attend to a single one, which amplifies rounding errors a
    hundredfold.
    """
    factors: dict[int, float] = {}
    for module in model.modules():
        scaling, head_dim = getattr(module, "scaling", None), getattr(module, "head_dim", None)
        norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
        if isinstance(scaling, int | float) and head_dim:
            factor = min(1.0, (scaling * math.sqrt(head_dim)) ** -0.5)
            weights = (getattr(norm, "weight", None) for norm in norms)
            factors |= {id(weight): factor for weight in weights if weight is not None}
    return factors


def _vector(tensor: Tensor, is_norm: bool, factor: float, generator: torch.Generator) -> Tensor:
    """Return a vector's random values. A norm's weights get random signs: otherwise a tied lm_head would find a token's
    own embedding in its state and repeat the token."""
    noise = (2 * torch.rand(tensor.shape, generator=generator) - 1) * NOISE
    if not is_norm:
        return tensor.float() + noise
    signs = 2 * torch.randint(0, 2, tensor.shape, generator=generator) - 1
    drawn = signs * factor * (1 + noise)
    return drawn if tensor.any() else drawn - 1  # a norm whose weights start as zeros adds 1 to them
