"""Command lines that name the shipped target and its head on the stand-in for the hub."""

from pathlib import Path

from eagle3.export.configuration.config import ExportConfig
from eagle3.export.hub.sources import find_sources

TARGET, HEAD = "org/tiny", "org/tiny-eagle3"
CPU = ("--backend", "xnnpack", "--output-dir", "out")


def flags(checkpoint=TARGET, draft=HEAD, target="auto", **others) -> ExportConfig:
    paths = {name: value and Path(value) for name, value in {"checkpoint": checkpoint, "draft": draft}.items()}
    return ExportConfig(target, output_dir=Path("out"), backend="xnnpack", **paths, **others)


def fetched(config: ExportConfig, download: bool = False) -> ExportConfig:
    """Return the flags with local paths, after downloading everything that they name."""
    with find_sources(config, download).downloaded().local() as here:
        return here
