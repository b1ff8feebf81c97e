"""Makes the flatbuffer code that ExecuTorch's wheels for Linux lack, in a cache folder outside the installed package.

The wheel has the schema of MLX's programs, the generator and flatc, but not what the generator writes, so
``executorch.backends.mlx`` cannot be imported. The wheel for macOS has all of it.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "executorch.backends.mlx.serialization"
SCHEMA, SERIALIZERS = "mlx_graph_schema.py", "_generated_serializers.py"


def use_generated() -> None:
    """Make ``executorch.backends.mlx`` importable. The code is generated once for each version of ExecuTorch, within a
    second. Raises OSError if the cache folder cannot be written."""
    if PACKAGE in sys.modules or (_installed() / SCHEMA).exists():
        return
    folder = _cache() / f"mlx-of-executorch-{importlib.metadata.version('executorch')}"
    if not folder.exists():
        _generate(folder)
    served = ModuleType(PACKAGE)
    served.__path__ = [str(folder)]
    sys.modules[PACKAGE] = served


def schema_and_flatc() -> tuple[Path, Path]:
    """Return the schema of MLX's programs and the flatbuffer compiler of the installed package."""
    return _installed() / "schema.fbs", _executorch() / "data" / "bin" / "flatc"


def _executorch() -> Path:
    spec = importlib.util.find_spec("executorch")
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations)))


def _installed() -> Path:
    return _executorch() / "backends" / "mlx" / "serialization"


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eagle3-export"


def _generate(folder: Path) -> None:
    """Run the generator on a copy of the package that appears in ``folder`` as a whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as parent:
        made = Path(parent) / "serialization"
        shutil.copytree(_installed(), made, ignore=shutil.ignore_patterns("__pycache__"))
        spec = importlib.util.spec_from_file_location("mlx_schema_generator", made / "generate.py")
        assert spec is not None and spec.loader is not None
        generator: Any = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = generator  # its dataclasses look their module up
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):  # it prints each step
            spec.loader.exec_module(generator)
            vars(generator)["RUNTIME_DIR"] = made / "cpp"  # the wheel lacks the folder of the C++ code
            schema, flatc = schema_and_flatc()
            if not generator.run_flatc(str(flatc)):
                raise OSError(f"{flatc} does not run, which makes code for MLX: install executorch again")
            generator._fixup_flatc_imports()
            (made / "_generated" / "__init__.py").touch()
            parsed = generator.parse_fbs(schema)
        (made / SCHEMA).write_text(generator.generate_python_schema(parsed))
        (made / SERIALIZERS).write_text(generator.generate_python_serializers(parsed))
        shutil.rmtree(generator.RUNTIME_DIR, ignore_errors=True)
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            if not folder.exists():
                raise
