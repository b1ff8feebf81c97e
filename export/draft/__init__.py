"""Draft heads: ``head.py`` is the module, ``description.py`` what it is told, the rest are checkpoint formats.

A format is a module with ``recognizes(config)`` and ``describe(source, config, headers)``; it belongs in ``FORMATS``.
"""

from pathlib import Path

from eagle3.export.checkpoints import open_source
from eagle3.export.checkpoints.json_fields import read_object
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
    config = read_object(config_file)
    source = open_source(folder)
    headers = source.headers()
    for draft_format in FORMATS:
        if draft_format.recognizes(config):
            return draft_format.describe(source, config, headers)
    if "model_type" in config and "fc.weight" not in {name.removeprefix("model.") for name in headers}:
        raise ValueError(
            f"{config_file} is of a {config['model_type']} model, and it has no fc.weight as a draft head has: is it "
            f"the target? Then type --checkpoint {folder}"
        )
    architectures = config.get("architectures") or "none"
    raise ValueError(
        f"{config_file}: no draft format that we read (architectures: {architectures}); "
        "speculators' Eagle3DraftModel is the one supported"
    )


__all__ = ["FORMATS", "DraftDescription", "read_draft"]
