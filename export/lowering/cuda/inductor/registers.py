"""Makes Inductor keep a configuration's limit of registers (``maxnreg``), which it drops where it writes a hand-written
kernel and where it compiles one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from triton import Config

from eagle3.export.patching.patches import all_replaced

HEURISTICS = "torch._inductor.runtime.triton_heuristics."


@contextmanager
def registers_kept() -> Iterator[None]:
    """Make Inductor compile each kernel with the limit of its configuration."""
    make_options, as_dict = CachingAutotuner._create_compile_options, triton_heuristics.config_to_dict

    def make_all_options(self: CachingAutotuner, config: Config, meta: dict[str, Any]) -> dict[str, Any]:
        return make_options(self, config, meta) | {"maxnreg": config.maxnreg}

    def with_registers(config: Config) -> dict[str, Any]:
        limit = {} if config.maxnreg is None else {"maxnreg": config.maxnreg}
        return as_dict(config) | limit

    with all_replaced(
        {
            f"{HEURISTICS}CachingAutotuner._create_compile_options": make_all_options,
            f"{HEURISTICS}config_to_dict": with_registers,
        }
    ):
        yield
