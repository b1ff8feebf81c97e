"""Refuses checkpoints whose weights are not finite. A single NaN in the weights makes a model emit token 0 forever."""

from collections.abc import Callable, Iterator

import torch
from executorch.extension.llm.export.gguf import ExportableGGUFTensor
from torch import Tensor
from torchao.utils import TorchAOBaseTensor

from eagle3.export.checkpoints.gguf_file import super_scales
from eagle3.export.checkpoints.source import Source


def check_finite(source: Source, is_read: Callable[[str], bool]) -> None:
    """Read every floating-point tensor for whose name ``is_read`` returns True. Raises ValueError naming the first
    tensor that holds NaN or an infinity."""
    for name, value in source.tensors():
        for tensor in _parts(value) if is_read(name) else ():
            if tensor.is_floating_point() and tensor.numel() and not _finite(tensor):
                wrong = int((~torch.isfinite(tensor)).sum())
                raise ValueError(
                    f"{source.path}: {name} holds {wrong:,} values of {tensor.numel():,} that are NaN or infinite: the "
                    "file is damaged or the training diverged: copy it again, or name another checkpoint"
                )


def _parts(value: Tensor) -> Iterator[Tensor]:
    """Yield a plain tensor itself, or the plain tensors inside a tensor of torchao's."""
    if not isinstance(value, TorchAOBaseTensor):
        yield value
        return
    if isinstance(value, ExportableGGUFTensor):
        yield super_scales(value)
        return
    for name in value.__tensor_flatten__()[0]:
        yield from _parts(getattr(value, name))


def _finite(tensor: torch.Tensor) -> bool:
    """Return True if the tensor's minimum and maximum are finite: a NaN anywhere makes both NaN. The check reads the
    tensor once and allocates no copy of it."""
    wide = tensor if tensor.dtype.itemsize > 1 else tensor.float()  # aminmax does not take float8
    return all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(wide))
