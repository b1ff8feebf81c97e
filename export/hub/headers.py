"""Fetches the parts of a repository that a dry run reads: small configurations, and the headers of safetensors files,
by range requests."""

import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from huggingface_hub import HfApi, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import SafetensorsParsingError
from huggingface_hub.utils import SafetensorsFileMetadata, build_hf_headers, get_session, hf_raise_for_status
from torch import Tensor

from eagle3.export.checkpoints.safetensors_file import save_header
from eagle3.export.hub.errors import one_line
from eagle3.export.hub.needed import SMALL
from eagle3.export.hub.snapshots import Snapshot

AT_ONCE = 8
"""The number of concurrent requests, huggingface_hub's own default."""
VALUES = ("d2t", "t2d", "token_ordering", "weight_shape")
"""The last parts of the names of small tensors whose values planning reads; for Gemma 4 31B's head the values take 0.5
MB."""
_DTYPES = {"I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool, "U8": torch.uint8}


def header_folder(snapshot: Snapshot, into: Path) -> Path:
    """Make a folder below ``into`` that can be planned like the checkpoint itself, and return it.

    Raises what ``one_line`` raises, and ValueError for a file that is incomplete or not safetensors.
    """
    folder = into / snapshot.name.repository / snapshot.commit[:12]
    folder.mkdir(parents=True)
    wanted = [
        file
        for file in snapshot.sizes
        if not snapshot.role.weights or file in (*SMALL, snapshot.index) or file.endswith(".safetensors")
    ]
    with one_line(snapshot.name, snapshot.role.flag), ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in pool.map(lambda file: _fetch(snapshot, file, folder / file), wanted):
            pass
    return folder


def _fetch(snapshot: Snapshot, file: str, path: Path) -> None:
    """Make ``path`` a link to the file in the cache, or a header file if the weights are not in the cache."""
    repository, commit = snapshot.name.repository, snapshot.commit
    found = try_to_load_from_cache(repository, file, revision=commit)
    if isinstance(found, str):
        path.symlink_to(Path(found).resolve())
    elif not file.endswith(".safetensors"):
        path.symlink_to(Path(hf_hub_download(repository, file, revision=commit)).resolve())
    else:
        _save_header(snapshot, file, path)


def _save_header(snapshot: Snapshot, file: str, path: Path) -> None:
    url = hf_hub_url(snapshot.name.repository, file, revision=snapshot.commit)
    try:
        header = HfApi().parse_safetensors_file_metadata(snapshot.name.repository, file, revision=snapshot.commit)
    except SafetensorsParsingError as error:
        raise ValueError(f"{file} of {snapshot} is no safetensors file: name another revision or repository") from error
    least = 8 + max((tensor.data_offsets[1] for tensor in header.tensors.values()), default=0)
    if 0 < snapshot.sizes[file] < least:
        raise ValueError(
            f"{file} of {snapshot} has {snapshot.sizes[file]} bytes on the hub, its header describes {least} or more: "
            "the upload is not complete: name another revision or repository"
        )
    tensors = {name: (tensor.shape, tensor.dtype) for name, tensor in header.tensors.items()}
    save_header(path, tensors, header.metadata, _values(url, header))


def _values(url: str, header: SafetensorsFileMetadata) -> dict[str, Tensor]:
    wanted = [name for name in header.tensors if name.rpartition(".")[2] in VALUES]
    wanted = [name for name in wanted if header.tensors[name].dtype in _DTYPES]
    if not wanted:
        return {}
    begin = 8 + struct.unpack("<Q", _bytes(url, 0, 8))[0]

    def read(name: str) -> Tensor:
        tensor = header.tensors[name]
        start, end = tensor.data_offsets
        return torch.frombuffer(_bytes(url, begin + start, begin + end), dtype=_DTYPES[tensor.dtype]).view(tensor.shape)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(wanted, pool.map(read, wanted), strict=True))


def _bytes(url: str, start: int, end: int) -> bytearray:
    response = get_session().get(url, headers={**build_hf_headers(), "range": f"bytes={start}-{end - 1}"})
    hf_raise_for_status(response)
    if len(response.content) != end - start:
        raise OSError(f"{url} gave {len(response.content)} bytes for a range of {end - start}: try again later")
    return bytearray(response.content)
