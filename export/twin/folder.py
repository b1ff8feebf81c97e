"""Makes the temporary folder into which a small copy's checkpoint is written, to be read back by the loader."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle3.export.output.folder import is_full_disk
from eagle3.runner.system.memory import size_text


@contextmanager
def twin_folder() -> Iterator[Path]:
    """Yield a folder that is deleted at the end. Raises OSError if the disk is too full for the files written there.
    The error must name the disk, so that a full disk is not reported as a fault of the model.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="eagle3-twin-") as folder:
            yield Path(folder)
    except Exception as error:
        if not is_full_disk(error):
            raise
        place = tempfile.gettempdir()
        raise OSError(
            f"{place} is full ({size_text(shutil.disk_usage(place).free)} free), and the twin check writes small "
            "copies of the models there: make room, or set TMPDIR to another folder"
        ) from error
