"""Versions of installed packages."""

import importlib.metadata


def version_of(package: str) -> str:
    """Return a version such as "2.13.0", or "not installed" if there is no metadata, as for an uninstalled source
    tree."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
