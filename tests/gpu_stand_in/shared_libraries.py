"""Reads the libraries that a shared library lists as needed, with binutils."""

import re
import subprocess
from pathlib import Path


def loaded_by(library: Path) -> list[str]:
    """Return the names of the libraries that the loader loads with ``library``."""
    dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
