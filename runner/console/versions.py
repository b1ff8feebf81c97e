"""Versions of installed packages."""

import importlib.metadata


def version_of(package: str) -> str:
    """Such as "2.13.0"; "not installed" where there is no metadata, as of a source tree that runs where it lies."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
