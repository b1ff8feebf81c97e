"""Reads checkpoints strictly. Each format has a subclass of ``Source``, and ``SOURCES`` lists them."""

from pathlib import Path

from eagle3.export.checkpoints import pickled, safetensors_folder
from eagle3.export.checkpoints.float_folder import FloatFolder
from eagle3.export.checkpoints.fp8_folder import Fp8Folder
from eagle3.export.checkpoints.gguf_file import GGUFFile
from eagle3.export.checkpoints.json_fields import read_object
from eagle3.export.checkpoints.mxfp4_folder import Mxfp4Folder
from eagle3.export.checkpoints.packed_folder import PackedFolder
from eagle3.export.checkpoints.pickled import PickledFolder
from eagle3.export.checkpoints.safetensors_folder import SafetensorsFolder
from eagle3.export.checkpoints.source import Source

SOURCES: tuple[type[Source], ...] = (
    GGUFFile,
    Mxfp4Folder,
    Fp8Folder,
    FloatFolder,
    PackedFolder,
    SafetensorsFolder,
    PickledFolder,
)
WEIGHTS_KEY = "transformers_weights"
"""The key of ``config.json`` that tells transformers to load weights from a file with an unusual name."""


def open_source(path: Path) -> Source:
    """Return the checkpoint at ``path``. A path that no source recognizes is taken for a folder of safetensors, whose
    methods raise the error.

    Raises ValueError if ``config.json`` names a file of weights that is not the one that would be read.
    """
    _refuse_other_weights(path)
    return next((source for source in SOURCES if source.recognizes(path)), SafetensorsFolder)(path)


def _refuse_other_weights(path: Path) -> None:
    file = path / "config.json"
    named = read_object(file).get(WEIGHTS_KEY) if file.is_file() else None
    names = (safetensors_folder.SINGLE_FILE, safetensors_folder.INDEX_FILE, pickled.SINGLE_FILE, pickled.INDEX_FILE)
    usual = next((name for name in names if (path / name).is_file()), None)
    if named is not None and named != usual:
        instead = f"reads it in place of {usual}" if usual else "reads it alone"
        cure = f", or take the key out to export {usual}" if usual else ""
        raise ValueError(
            f"{file}: {WEIGHTS_KEY} is {named!r}, and transformers {instead}, but weights of that name are not read: "
            f"rename them to {names[0]}, or their index to {names[1]}, and take the key out{cure}"
        )


__all__ = ["SOURCES", "Source", "open_source"]
