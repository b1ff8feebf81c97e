"""Draft heads: ``head.py`` is the module, ``description.py`` what it is told, the rest are checkpoint formats.

A format is a module with ``recognizes(config)`` and ``describe(folder, config, headers)``; it belongs in ``FORMATS``.
"""

import json
from pathlib import Path

from eagle3.export.checkpoints.safetensors_folder import read_headers
from eagle3.export.draft import speculators
from eagle3.export.draft.description import DraftDescription

FORMATS = (speculators,)


def read_draft(folder: Path) -> DraftDescription:
    """Describe the draft head in ``folder`` from its configuration and tensor headers alone.

    Raises FileNotFoundError for a folder that lacks a file, ValueError for a format or a variant we do not read.
    """
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise FileNotFoundError(f"{config_file} is missing: --draft wants the folder of an EAGLE-3 draft head")
    try:
        config = json.loads(config_file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{config_file} is not JSON ({error})") from error
    headers = read_headers(folder)
    for draft_format in FORMATS:
        if draft_format.recognizes(config):
            return draft_format.describe(folder, config, headers)
    architectures = ", ".join(config.get("architectures") or ["none"])
    raise ValueError(
        f"{config_file}: no draft format that we read (architectures: {architectures}); "
        "speculators' Eagle3DraftModel is the one supported"
    )


__all__ = ["FORMATS", "DraftDescription", "read_draft"]
