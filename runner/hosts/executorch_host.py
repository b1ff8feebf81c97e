"""Runs an artifact by ``executorch.runtime``: imports it quickly and silently, with ExecuTorch's LLM operators."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from eagle3.runner.artifact.light_imports import without_compiler
from eagle3.runner.contract import DECODE, METHODS, PREFILL, READ_STATE, SPECULATE, TARGET_ROWS, WRITE_STATE, Metadata
from eagle3.runner.hosts.session import TimedSession, missing_method
from eagle3.runner.system.command import calm_stderr

if TYPE_CHECKING:
    from executorch.runtime import Method, Program, Runtime


def load_runtime() -> "Runtime":
    """Return the ``Runtime`` singleton."""
    with calm_stderr():
        with without_compiler():
            from executorch.runtime import Runtime
        return Runtime.get()


def load_llm_ops(runtime: "Runtime") -> None:
    """Register ``llama::custom_sdpa`` and the cache updates, which only artifacts for the CPU call.

    Importing ``executorch.extension.llm.custom_ops`` would do the same, but it imports all of Inductor too (2 s). This
    loads its library directly. Raises ValueError if that library was built for another PyTorch.
    """
    with calm_stderr():
        import executorch
        import torch

        if "llama::custom_sdpa.out" in runtime.operator_registry.operator_names:
            return
        folder = Path(executorch.__path__[0]) / "extension" / "llm" / "custom_ops"
        try:
            for library in folder.glob("*custom_ops_aot_lib.*"):
                torch.ops.load_library(library)
        except OSError as error:
            raise ValueError(
                f"ExecuTorch's custom ops, which artifacts for the CPU call, do not load with PyTorch "
                f"{torch.__version__} ({' '.join(str(error).split())}): type pip install 'torch==2.13.*'"
            ) from error


class ExecuTorchSession(TimedSession):
    """The methods ``names`` of a program that ``executorch.runtime`` has loaded. Inputs must be contiguous tensors on
    the host.

    Methods are loaded within a context that ``loading`` returns: all at once, or each at its first call if ``lazily``.
    Those that read and write the state are always loaded at their first call.
    """

    def __init__(
        self,
        program: "Program",
        metadata: Metadata,
        names: Iterable[str] = (*METHODS, SPECULATE, DECODE, TARGET_ROWS, READ_STATE, WRITE_STATE),
        loading: Callable[[], AbstractContextManager[object]] = nullcontext,
        lazily: bool = False,
    ):
        super().__init__(metadata)
        self._program, self._loading = program, loading
        self._names = [name for name in names if name in program.method_names]
        self._methods: dict[str, Method] = {}
        self.has_decode = metadata.method_for(DECODE) in self._names
        self.has_speculate = SPECULATE in self._names
        for name in () if lazily else self._names:
            if name not in (READ_STATE, WRITE_STATE):
                self._load(name)

    def _load(self, name: str) -> None:
        if name in self._names and name not in self._methods:
            if name in (READ_STATE, WRITE_STATE):
                self._load(PREFILL)  # which starts the threads, whose log is kept from stderr only while methods load
            with self._loading():
                self._methods[name] = self._program.load_method(name)

    def _call(self, name: str, *inputs: Tensor) -> Iterable[Tensor]:
        try:
            return self._methods[name].execute(inputs)
        except KeyError:
            raise ValueError(missing_method(name, closed=not self._names)) from None
        except RuntimeError as error:
            raise RuntimeError(self._explain(name, inputs, error)) from error

    def close(self) -> None:
        self._names.clear()
        self._methods.clear()

    def _explain(self, name: str, inputs: tuple[Tensor, ...], error: RuntimeError) -> str:
        """Return a message that shows dtype and shape of each input beside the declared ones, because ExecuTorch's
        errors are bare codes."""
        declared = self._methods[name].metadata
        pairs = []
        for slot, value in enumerate(inputs):
            most = declared.input_tensor_meta(slot)
            pairs.append(f"slot {slot}: fed {value.dtype} {list(value.shape)}, declared up to {list(most.sizes())}")
        return f"{name} failed: {' '.join(str(error).split())} ({'; '.join(pairs)})"
