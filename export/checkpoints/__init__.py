"""Reading checkpoints, strictly. A kind of file is a ``Source`` and a place in ``SOURCES``."""

from pathlib import Path

from eagle3.export.checkpoints.gguf_file import GGUFFile
from eagle3.export.checkpoints.pickled import PickledFolder
from eagle3.export.checkpoints.safetensors_folder import SafetensorsFolder
from eagle3.export.checkpoints.source import Source

SOURCES: tuple[type[Source], ...] = (SafetensorsFolder, PickledFolder, GGUFFile)


def open_source(path: Path) -> Source:
    """The checkpoint at ``path``; one that no source recognizes fails as the first of them does."""
    return next((source for source in SOURCES if source.recognizes(path)), SOURCES[0])(path)


__all__ = ["SOURCES", "Source", "open_source"]
