"""Whether the installed packages are those that the substitution was tested with."""

import importlib.metadata

TESTED = {"torch": "2.13", "triton": "3.7"}


def check_versions() -> None:
    """Raise ValueError for a version outside ``TESTED``, or none at all."""
    for package, tested in TESTED.items():
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise ValueError(
                f"{package} is not installed, lowering for CUDA needs {tested}: type pip install 'eagle3-export[cuda]'"
            ) from None
        if not found.startswith(f"{tested}."):
            raise ValueError(
                f"{package} {found}: lowering for CUDA without a GPU is tested with {package} {tested} alone: "
                f"type pip install '{package}=={tested}.*', or export on a machine with a GPU"
            )
