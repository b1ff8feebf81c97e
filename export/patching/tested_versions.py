"""The versions of other packages that the patches (``patches.py``) were tested with."""

import importlib.metadata
from collections.abc import Mapping

TESTED: dict[str, tuple[str, ...]] = {
    "torch": ("2.13",),
    "triton": ("3.7",),
    "executorch": ("1.5",),
    "torchao": ("0.18",),
    "transformers": ("5",),
}
"""The versions that the patches were tested with, by package."""
TESTED_WITH_GPU = TESTED | {"torch": ("2.11", "2.13"), "triton": ("3.6", "3.7")}
"""The tested versions for lowering on a machine with a GPU, which applies fewer patches."""
FOR_CPU = ("torch", "executorch", "torchao", "transformers")
FOR_CUDA = ("torch", "triton", "executorch", "torchao")
"""The packages of which an export replaces parts, for each backend."""


def check_versions(packages: tuple[str, ...], tested: Mapping[str, tuple[str, ...]], what: str, advice: str) -> None:
    """Raise ValueError if a package has a version that the patches were not tested with.

    Args:
        packages: the packages whose parts are replaced
        tested: ``TESTED`` or ``TESTED_WITH_GPU``
        what: the activity, for the message, such as "lowering for CUDA without a GPU"
        advice: a further suggestion, appended to the version to install
    """
    for package in packages:
        wanted = tested[package]
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise ValueError(
                f"{package} is not installed, {what} needs {wanted[-1]}: type pip install '{package}=={wanted[-1]}.*'"
            ) from None
        if not any(found.startswith(f"{version}.") for version in wanted):
            raise ValueError(
                f"{package} {found}: {what} was tested only with {package} {' and '.join(wanted)}: "
                f"type pip install '{package}=={wanted[-1]}.*'{advice}"
            )
