"""Describes a target without a draft head (``--draft none``) by a description without tensors and a module that
computes nothing, so that the plan, the lowering and the report need no separate branch. The artifact then has
``prefill``, ``target_verify`` and ``decode``, which return no features, and the runner's prompt lookup proposes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from eagle3.export.checkpoints.source import Source, TensorHeader
from eagle3.export.configuration.config import NO_HEAD
from eagle3.export.draft.common.description import DraftDescription
from eagle3.export.draft.common.head import Head

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class NoFiles(Source):
    """A source without files, whose ``path`` is the target's folder or file."""

    @staticmethod
    def recognizes(path: Path) -> bool:  # noqa: ARG004 - as every source's
        return False

    def files(self) -> list[Path]:
        return []

    def headers(self) -> dict[str, TensorHeader]:
        return {}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())


def no_head(checkpoint: Path, target_config: "PreTrainedConfig") -> DraftDescription:
    """Return the description for a target with transformers' text configuration ``target_config``."""
    return DraftDescription(
        kind=NO_HEAD,
        dialect=NO_HEAD,
        source=NoFiles(checkpoint),
        layer=target_config,
        tensor_names={},
        headers={},
        target_vocab_size=target_config.vocab_size,
        takes_final_state=True,
        shares_lm_head=True,
        chain_len=0,
    )


class NoHead(Head):
    """A module without parameters, which is never called."""

    def attach(self, *_: Any) -> Self:  # noqa: ANN401 - it needs no parts
        return self
