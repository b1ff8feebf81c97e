"""Keeps the vectors of recurrent layers in float32 where a model is loaded in another dtype.

A layer of a delta rule, or of Mamba 2, has a decay rate and a bias for each head (``A_log``, ``dt_bias``) and
the weight of a norm. The rate is exponentiated twice, and its effect on the state adds up over all tokens. Published
checkpoints have some of these vectors in float32.
"""

from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from eagle3.targets.state_mixers import form_of


class ExactVectors:
    """Notes the vectors of a model's recurrent layers while a checkpoint is read, and gives them back in float32."""

    def __init__(self, model: nn.Module):
        self.owners: dict[str, tuple[nn.Module, str]] = {}
        """The module and the attribute of each vector, by its name in the model."""
        for prefix, layer in model.named_modules():
            form = form_of(layer)
            if form is not None:
                self.owners |= _vectors(layer.get_submodule(form.place), f"{prefix}.{form.place}")
        self.values: dict[str, Tensor] = {}

    def seen(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield ``tensors`` (by their names in the model) unchanged, and note the vectors among them."""
        for name, value in tensors:
            if name in self.owners:
                self.values[name] = value.float()
            yield name, value

    def restore(self) -> None:
        """Assign the noted vectors to the model."""
        for name, value in self.values.items():
            owner, attribute = self.owners[name]
            setattr(owner, attribute, nn.Parameter(value, requires_grad=False))


def _vectors(mixer: nn.Module, prefix: str) -> dict[str, tuple[nn.Module, str]]:
    """Return the parameters of a mixer that have at most one dimension longer than 1, without those of its linears and
    of its convolution."""
    found = {}
    for place, module in mixer.named_modules():
        if not isinstance(module, nn.Linear | nn.Conv1d):
            for attribute, value in module.named_parameters(recurse=False):
                if value.numel() == max(value.shape, default=1):
                    found[".".join(filter(None, (prefix, place, attribute)))] = module, attribute
    return found
