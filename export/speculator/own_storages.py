"""Gives each tensor of a model a storage of its own, and refuses a traced program with a tensor that has none.

A checkpoint's conversion may split a stored tensor into views of one storage, and the views reach the model wherever
loading does not change the dtype. ExecuTorch writes the storage of a weight from its first byte, not from the view's
(``NodeVisitor.get_serialized_buffer_index`` of XNNPACK), so the artifact would have another tensor's values.
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from torch import Tensor, nn
from torch.export import ExportedProgram

from eagle3.export.speculator import tensor_files
from eagle3.export.speculator.tensor_files import parts


def own_storages(model: nn.Module, folder: Path) -> None:
    """Copy, in place, each parameter, buffer and part of a quantized weight that does not fill a storage by itself.

    Tensors that are equal views stay one tensor, so tied weights stay tied. Of different tensors that share a storage,
    one that fills it is not copied. Large copies are kept in files on the disk of ``folder``.
    """
    for sharing in _by_storage(chain(model.parameters(), model.buffers())):
        kept = next((_view(tensor) for tensor in sharing if _fills_storage(tensor)), None)
        copies: dict[tuple, Tensor] = {}
        for tensor in sharing:
            view = _view(tensor)
            if view == kept:
                continue
            if view not in copies:
                copies[view] = tensor_files.empty(tensor.shape, tensor.dtype, folder).copy_(tensor)
            tensor.data = copies[view]


def check_storages(program: ExportedProgram) -> None:
    """Raise ValueError if a parameter, buffer or constant of a traced program does not fill a storage, or if another
    one shares it and is not the same tensor."""
    named = {**program.state_dict, **program.constants}
    names = {id(part): name for name, value in named.items() if isinstance(value, Tensor) for part in parts(value)}
    for sharing in _by_storage(value for value in named.values() if isinstance(value, Tensor)):
        if len({_view(tensor) for tensor in sharing}) > 1 or not _fills_storage(sharing[0]):
            shared = ", ".join(sorted({names[id(tensor)] for tensor in sharing}))
            raise ValueError(
                f"{shared}: parts of one storage of {sharing[0].untyped_storage().nbytes()} bytes, which lowering "
                "would confuse with each other: this is a fault of the exporter, please report it"
            )


def _by_storage(values: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the plain tensors of ``values``, grouped by their storages."""
    found: dict[int, list[Tensor]] = defaultdict(list)
    for part in chain.from_iterable(map(parts, values)):
        found[part.untyped_storage()._cdata].append(part)
    return list(found.values())


def _fills_storage(tensor: Tensor) -> bool:
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == tensor.nbytes


def _view(tensor: Tensor) -> tuple:
    """Return what distinguishes a tensor from others that share its storage."""
    return tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
