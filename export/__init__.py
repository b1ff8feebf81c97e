"""Makes artifacts, as the command ``eagle3-export`` does::

    from eagle3.export import ExportConfig, export

    exported = export(ExportConfig("gemma4-tiny", backend="xnnpack"))
    print(exported.folder, exported.record["check"])

``prepare`` plans an export and checks the pair without making it. All other names in this package may change.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eagle3.export.configuration.config import ExportConfig
    from eagle3.export.exporting import Exported, Prepared, export, prepare

    __version__: str

__all__ = ["ExportConfig", "Exported", "Prepared", "export", "prepare"]

_MODULES = dict.fromkeys(("Exported", "Prepared", "export", "prepare"), "exporting")
_MODULES |= {"ExportConfig": "configuration.config"}


def __getattr__(name: str) -> object:
    """Import a public name, and with it torch, on its first use. Importing this package alone takes no time."""
    if name == "__version__":
        return importlib.metadata.version("eagle3-export")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
