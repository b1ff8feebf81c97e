"""The methods of an artifact as modules, which compute a target and its draft head with tensor operations only. The
runner does acceptance, rollback and stopping. ``eagle3.runner.contract`` has the methods' shapes.

It also gives each tensor of a model a storage of its own, and refuses a traced program with a tensor that has none.

A checkpoint's conversion may split a stored tensor into views of one storage, and the views reach the model wherever
loading does not change the dtype. ExecuTorch writes the storage of a weight from its first byte, not from the view's
(``NodeVisitor.get_serialized_buffer_index`` of XNNPACK), so the artifact would have another tensor's values.
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from eagle3.export.draft.common.head import Head
from eagle3.export.draft.loading import NoHead
from eagle3.export.speculator import tensor_files
from eagle3.export.speculator.tensor_files import parts
from eagle3.runner.contract import DRAFT_DECODE
from eagle3.targets import TapTarget


class Eagle3Speculator(nn.Module):
    """Runs the methods of an artifact. ``taps`` are the target's layers whose inputs the draft head fuses, in ascending
    order. If ``gives_logits``, the last output of a method is logits in float32. Without a head, ``draft`` is a
    ``NoHead`` and no method returns a feature. ``window`` is the number of last rows of which ``target_rows`` computes
    ids."""

    def __init__(
        self, target: TapTarget, draft: Head, taps: tuple[int, ...], gives_logits: bool = True, window: int = 1
    ):
        super().__init__()
        self.target, self.draft, self.taps, self.gives_logits = target, draft, taps, gives_logits
        self.window = window

    def prefill(self, tokens: Tensor, input_pos: Tensor) -> tuple[Tensor, ...]:
        """Map tokens [1,T] and input_pos [T] to the greedy next token [1,1], the feature [1,T,H] and logits [1,1,V]."""
        state, taps = self.target(tokens, input_pos, self.taps)
        scores = self.target.scores(state[:, -1:])
        return self._greedy(scores), *self._features(state, taps, input_pos), *self._given_target(scores)

    def target_verify(self, tokens: Tensor, input_pos: Tensor) -> tuple[Tensor, ...]:
        """Map tokens [1,C] and input_pos [C] to greedy ids [1,C] (the token after each row), the feature [1,C,H] and
        logits [1,C,V]."""
        state, taps = self.target(tokens, input_pos, self.taps)
        scores = self.target.scores(state)
        return self._greedy(scores), *self._features(state, taps, input_pos), *self._given_target(scores)

    def target_rows(self, tokens: Tensor, input_pos: Tensor) -> tuple[Tensor, ...]:
        """Map tokens [1,T] and input_pos [T] to the greedy ids [1,R] of the last R rows, the feature [1,T,H] and logits
        [1,R,V]. R is ``window``. If T is less, the first row stands in for the rows before it."""
        state, taps = self.target(tokens, input_pos, self.taps)
        last = input_pos[-1:] - input_pos[:1]  # the number of the last row
        rows = (last + torch.arange(1 - self.window, 1)).clamp_min(0)
        scores = self.target.scores(state.index_select(1, rows))
        return self._greedy(scores), *self._features(state, taps, input_pos), *self._given_target(scores)

    def draft_decode(self, tokens: Tensor, feature: Tensor, input_pos: Tensor) -> tuple[Tensor, ...]:
        """Map tokens [1,T], feature [1,T,H] and input_pos [T] to the last row's proposal [1,1] (for a P-EAGLE [1,K]),
        the recurrent feature [1,1,H], and the logits [1,1 or K,V_draft]."""
        logits, recurrent = self.draft(tokens, feature, input_pos, last=True)
        return self.draft.target_ids(logits), recurrent[:, -1:], *self._given(logits)

    def speculate(self, tokens: Tensor, input_pos: Tensor) -> tuple[Tensor, ...]:
        """Map tokens [1,C] and input_pos [C] to the greedy ids and the next window [2,C], that window [1,C], and its
        positions [C].

        Every shape is static. Draft slots after the accepted tokens are written as well, and overwritten before any row
        attends to them. The chain length is C - 1.
        """
        state, taps = self.target(tokens, input_pos, self.taps)
        ids = self._greedy(self.target.scores(state))
        differing = (ids[:, :-1] != tokens[:, 1:]).long().cumsum(1)  # ExecuTorch has no kernel for cumprod
        accepted = (differing == 0).sum(1)
        logits, recurrent = self.draft(ids, self.feature(state, taps, input_pos), input_pos, accepted=accepted)
        following = input_pos + accepted + 1
        chain = [ids.gather(1, accepted[None]), self.draft.target_ids(logits)]
        for step in range(tokens.shape[1] - 1 - self.draft.proposals):
            slot = following[:1] + step if self.draft.has_cache else following[:1] - 1
            logits, recurrent = self.draft(chain[-1], recurrent, slot, last=True)
            chain.append(self.draft.target_ids(logits))
        window = torch.cat(chain, dim=1)
        return torch.cat((ids, window)), window, following

    def forward(self, tokens: Tensor, input_pos: Tensor) -> tuple[Tensor]:
        """Map tokens [1,T] and input_pos [T] to logits [1,1,V] only, as ExecuTorch's own runner expects."""
        state, _ = self.target(tokens, input_pos, ())
        return (self.target.logits(state[:, -1:]).float(),)

    def _greedy(self, scores: Tensor) -> Tensor:
        """Return the greedy ids [1,R] of scores [1,R,V]. The id is -1 in a row that recurrent layers cannot compute,
        since they have already committed its position."""
        ids = scores.argmax(-1)
        return ids if self.target.recurrent is None else torch.where(scores[..., 0].isnan(), -1, ids)

    def _given_target(self, scores: Tensor) -> tuple[Tensor, ...]:
        return self._given(self.target.capped(scores)) if self.gives_logits else ()

    def _given(self, logits: Tensor) -> tuple[Tensor, ...]:
        return (logits.float(),) if self.gives_logits else ()

    def feature(self, state: Tensor, taps: tuple[Tensor, ...], input_pos: Tensor) -> Tensor:
        """Return the head's feature [1,T,H] of the target's rows, which have just been computed."""
        return self.draft.joined(self.draft.fuse((state,) if self.draft.takes_final_state else taps), input_pos)

    def _features(self, state: Tensor, taps: tuple[Tensor, ...], input_pos: Tensor) -> tuple[Tensor, ...]:
        """Return the feature as a tuple of one, or an empty tuple without a head."""
        return () if isinstance(self.draft, NoHead) else (self.feature(state, taps, input_pos),)

    decode = prefill


class SpeculatorMethod(nn.Module):
    """One method as a module, for ``torch.export``.

    Every method holds the same speculator under the same name, since backends share weights and caches between methods
    by qualified name.
    """

    def __init__(self, speculator: Eagle3Speculator, name: str):
        super().__init__()
        self.speculator, self.name = speculator, name

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return getattr(self.speculator, self.name)(*inputs)


def trace_inputs(name: str, length: int, feature_size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return example inputs of a method with ``length`` rows."""
    tokens, input_pos = torch.zeros(1, length, dtype=torch.long), torch.arange(length)
    if name == DRAFT_DECODE:
        return tokens, torch.zeros(1, length, feature_size, dtype=dtype), input_pos
    return tokens, input_pos


def own_storages(model: nn.Module, folder: Path) -> None:
    """Copy, in place, each parameter, buffer and part of a quantized weight that does not fill a storage by itself.

    Tensors that are equal views stay one tensor, so tied weights stay tied. Of different tensors that share a storage,
    one that fills it is not copied. Large copies are kept in files on the disk of ``folder``.
    """
    for sharing in _by_storage(chain(model.parameters(), model.buffers())):
        kept = next((_view(tensor) for tensor in sharing if _fills_storage(tensor)), None)
        copies: dict[tuple, Tensor] = {}
        for tensor in sharing:
            view = _view(tensor)
            if view == kept:
                continue
            if view not in copies:
                copies[view] = tensor_files.empty(tensor.shape, tensor.dtype, folder).copy_(tensor)
            tensor.data = copies[view]


def check_storages(program: ExportedProgram) -> None:
    """Raise ValueError if a parameter, buffer or constant of a traced program does not fill a storage, or if another
    one shares it and is not the same tensor."""
    named = {**program.state_dict, **program.constants}
    names = {id(part): name for name, value in named.items() if isinstance(value, Tensor) for part in parts(value)}
    for sharing in _by_storage(value for value in named.values() if isinstance(value, Tensor)):
        if len({_view(tensor) for tensor in sharing}) > 1 or not _fills_storage(sharing[0]):
            shared = ", ".join(sorted({names[id(tensor)] for tensor in sharing}))
            raise ValueError(
                f"{shared}: parts of one storage of {sharing[0].untyped_storage().nbytes()} bytes, which lowering "
                "would confuse with each other: this is a fault of the exporter, please report it"
            )


def _by_storage(values: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the plain tensors of ``values``, grouped by their storages."""
    found: dict[int, list[Tensor]] = defaultdict(list)
    for part in chain.from_iterable(map(parts, values)):
        found[part.untyped_storage()._cdata].append(part)
    return list(found.values())


def _fills_storage(tensor: Tensor) -> bool:
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == tensor.nbytes


def _view(tensor: Tensor) -> tuple:
    """Return what distinguishes a tensor from others that share its storage."""
    return tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
