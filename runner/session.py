"""A session: an opened artifact (or an eager speculator) whose methods run one step each.

Whatever runs the methods, ``loop.py`` sees the same four calls. A session has one KV cache: one generation at a time.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from eagle3.runner.contract import DECODE, DRAFT_DECODE, METHODS, PREFILL, TARGET_VERIFY, Metadata


class Session(Protocol):
    """Shapes as in ``eagle3.runner.contract``; H is the draft's hidden size. Ids and positions are on the host; a
    feature is where the session keeps it, and goes back as it came, whole or cut to its first rows."""

    metadata: Metadata
    positions: Tensor
    """int64 [max_seq_len], 0, 1, 2, ...: slices of it are every ``input_pos``, since making one anew costs 20 us."""
    has_decode: bool
    seconds: Counter
    """Seconds spent inside each method so far."""
    calls: Counter
    """Calls of each method so far."""

    def prefill(self, tokens: Tensor, input_pos: Tensor) -> tuple[Tensor, Tensor]: ...
    def target_verify(self, tokens: Tensor, input_pos: Tensor) -> tuple[Tensor, Tensor]: ...
    def draft_decode(self, tokens: Tensor, feature: Tensor, input_pos: Tensor) -> tuple[Tensor, Tensor]: ...
    def decode(self, tokens: Tensor, input_pos: Tensor) -> tuple[Tensor, Tensor]: ...

    def close(self) -> None:
        """Give back what the session holds; it cannot be used after that."""


class _TimedSession:
    """The four methods over one ``_call``, each call counted and timed."""

    def __init__(self, metadata: Metadata):
        self.metadata = metadata
        self.positions = torch.arange(metadata.max_seq_len)
        self.seconds, self.calls = Counter(), Counter()

    def _call(self, name: str, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _timed(self, name: str, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        start = time.perf_counter()
        outputs = self._call(name, *inputs)
        self.seconds[name] += time.perf_counter() - start
        self.calls[name] += 1
        return outputs

    def prefill(self, tokens, input_pos):
        return self._timed(PREFILL, tokens, input_pos)

    def target_verify(self, tokens, input_pos):
        return self._timed(TARGET_VERIFY, tokens, input_pos)

    def draft_decode(self, tokens, feature, input_pos):
        return self._timed(DRAFT_DECODE, tokens, feature, input_pos)

    def decode(self, tokens, input_pos):
        return self._timed(DECODE, tokens, input_pos)

    def close(self) -> None:
        pass


class ExecuTorchSession(_TimedSession):
    """Methods of a program that ``executorch.runtime`` has loaded. Inputs must be contiguous tensors on the host."""

    def __init__(self, program, metadata: Metadata):
        super().__init__(metadata)
        names = [name for name in (*METHODS, DECODE) if name in program.method_names]
        self._methods = {name: program.load_method(name) for name in names}
        self.has_decode = DECODE in names

    def _call(self, name, *inputs):
        try:
            return self._methods[name].execute(inputs)
        except KeyError:
            raise ValueError(f"the artifact has no method {name}: export it with --with-decode") from None
        except RuntimeError as error:
            raise RuntimeError(self._explain(name, inputs, error)) from error

    def _explain(self, name: str, inputs: tuple[Tensor, ...], error: RuntimeError) -> str:
        """ExecuTorch's errors are bare codes: put what was fed beside what the method declares."""
        declared = self._methods[name].metadata
        pairs = []
        for slot, value in enumerate(inputs):
            most = declared.input_tensor_meta(slot)
            pairs.append(f"slot {slot}: fed {value.dtype} {list(value.shape)}, declared up to {list(most.sizes())}")
        return f"{name} failed: {' '.join(str(error).split())} ({'; '.join(pairs)})"


class TorchSession(_TimedSession):
    """Methods that PyTorch hosts on ``device``. Features stay there; ids come to the host, which waits for the method,
    so that ``seconds`` are those of the device."""

    def __init__(
        self,
        methods: Mapping[str, Callable[[list[Tensor]], list[Tensor]]],
        rows: Mapping[str, tuple[int, int]],
        device: torch.device,
        metadata: Metadata,
        free: Callable[[], None],
    ):
        """``rows``: the fewest and the most of each method, which compiled code does not check by itself; ``free``
        gives back the memory of the weights."""
        super().__init__(metadata)
        self._methods, self._rows, self._device, self._free = dict(methods), rows, device, free
        self.has_decode = DECODE in methods

    def _call(self, name, *inputs):
        if name not in self._methods:
            why = "is closed" if not self._methods else f"has no method {name}: export it with --with-decode"
            raise ValueError(f"the artifact {why}")
        rows, (least, most) = inputs[0].shape[1], self._rows[name]
        if not least <= rows <= most:
            raise ValueError(f"{name} takes {least} to {most} rows, fed {rows}")
        try:
            ids, feature = self._methods[name]([self._fitting(value) for value in inputs])
            return ids.cpu(), feature
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise RuntimeError(f"{name} of {rows} rows failed on {self._device} ({reason})") from error

    def _fitting(self, value: Tensor) -> Tensor:
        """As compiled code takes it for granted: on the device, contiguous, at the start of its memory."""
        value = value.to(self._device).contiguous()
        return value.clone() if value.storage_offset() else value

    def close(self) -> None:
        if self._methods:
            self._methods.clear()
            self._free()


class EagerSession(_TimedSession):
    """The same methods of a PyTorch module, to hold an artifact against."""

    has_decode = True

    def __init__(self, speculator, metadata: Metadata):
        super().__init__(metadata)
        self._speculator = speculator

    def _call(self, name, *inputs):
        with torch.no_grad():
            return getattr(self._speculator, name)(*inputs)
