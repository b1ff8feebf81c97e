"""Reading checkpoints, strictly. A kind of file is a ``Source`` and a place in ``SOURCES``."""

from pathlib import Path

from eagle3.export.checkpoints.gguf_file import GGUFFile
from eagle3.export.checkpoints.mxfp4_folder import Mxfp4Folder
from eagle3.export.checkpoints.packed_folder import PackedFolder
from eagle3.export.checkpoints.pickled import PickledFolder
from eagle3.export.checkpoints.safetensors_folder import SafetensorsFolder
from eagle3.export.checkpoints.source import Source

SOURCES: tuple[type[Source], ...] = (GGUFFile, Mxfp4Folder, PackedFolder, SafetensorsFolder, PickledFolder)


def open_source(path: Path) -> Source:
    """Return the checkpoint at ``path``; one that no source recognizes fails as a folder of safetensors does."""
    return next((source for source in SOURCES if source.recognizes(path)), SafetensorsFolder)(path)


__all__ = ["SOURCES", "Source", "open_source"]
