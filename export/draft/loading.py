"""Loads a draft head of any kind, and checks before that that it can be computed."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from eagle3.export.checkpoints.source import Source, TensorHeader
from eagle3.export.configuration.config import NO_HEAD
from eagle3.export.draft.common.description import DraftDescription
from eagle3.export.draft.common.head import Head, filled, unfilled_head
from eagle3.export.draft.kinds import KINDS
from eagle3.export.draft.kinds.gemma4_assistant.reading import AssistantDescription
from eagle3.export.twin.comparison import TOLERANCE
from eagle3.targets import TapTarget
from eagle3.targets.attention import AttentionFactory, EagerAttention, KVCacheShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_NOT_COMPUTED = "describes a draft head that cannot be computed"
SLOTS, ROWS = 32, 3
"""The slots and rows of the forward that ``check_computed`` tries."""


def unfilled(draft: DraftDescription, max_seq_len: int = 1, proposals: int = 1) -> Head:
    """Return the head on the meta device, without the parts that no checkpoint holds."""
    if draft.kind == NO_HEAD:
        return NoHead()
    return unfilled_head(KINDS[draft.kind].head(), draft, max_seq_len, proposals)


def load_draft(
    draft: DraftDescription,
    max_seq_len: int,
    dtype: torch.dtype,
    attention: AttentionFactory,
    target: TapTarget,
    proposals: int = 1,
) -> Head:
    """Load a draft head. It shares ``target``'s embedding and lm_head if it has none of its own."""
    return filled(unfilled(draft, max_seq_len, proposals), draft, dtype, attention, target)


def check_head(draft: DraftDescription, taps: int) -> dict[str, Any] | None:
    """Check that a head which fuses ``taps`` states of its target can be computed, and that a small copy of a Gemma 4
    assistant, whose layers are ExecuTorch's, equals transformers' own. Return the manifest's entry on that comparison,
    None for other kinds. Raises ValueError with one line."""
    check_computed(draft, taps)
    if not isinstance(draft, AssistantDescription):
        return None
    from eagle3.export.draft.kinds.gemma4_assistant.twin import compare

    file = draft.folder / "config.json"
    try:
        compared = compare(draft)
    except OSError:  # a fault of the disk, not of the head
        raise
    except Exception as error:
        raise ValueError(f"{file} {_NOT_COMPUTED}: {_reason(error)}") from error
    if compared.difference > TOLERANCE:
        raise ValueError(
            f"{file} describes a draft head that would not be computed as transformers computes it: {compared.worst()} "
            "in a small copy with random weights: this head is not supported"
        )
    return compared.as_json()


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def check_computed(draft: DraftDescription, taps: int) -> None:
    """Compute one forward of a head that fuses ``taps`` states of its target, on the meta device: shapes without
    values. Raises ValueError for a head that cannot be computed, for example because its sizes do not fit together."""
    try:
        with torch.no_grad(), torch.device("meta"):
            head = unfilled(draft, SLOTS, draft.longest_chain or ROWS)
            target: Any = _Shapes(draft)
            head.attach(draft, EagerAttention, torch.float32, target)
            head.checks_positions = False
            rows = ROWS if head.has_cache else 1
            states = torch.empty(1, rows, draft.taps_width)
            feature = states if draft.takes_final_state else head.fuse(states.chunk(taps, dim=-1))
            positions = torch.arange(rows)
            head(torch.zeros(1, rows, dtype=torch.long), head.joined(feature, positions), positions)
    except Exception as error:
        raise ValueError(f"{draft.folder / 'config.json'} {_NOT_COMPUTED}: {_reason(error)}") from error


class _Shapes(nn.Module):
    """The parts of a target that a head may share, on the meta device."""

    def __init__(self, draft: DraftDescription):
        super().__init__()
        self.layer = draft.layer
        self.embed_tokens = nn.Embedding(draft.target_vocab_size, draft.hidden_size)
        self.lm_head = nn.Linear(draft.hidden_size, draft.target_vocab_size, bias=False)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embed_tokens(tokens)

    def kept(self, kind: str) -> nn.Module:
        """Return the cache of the target's last layer of a kind, for a head without keys of its own."""
        config = self.layer.per_layer_config[self.layer.layer_types.index(kind)]
        window = self.layer.sliding_window if kind == "sliding_attention" else 0
        return EagerAttention(KVCacheShape(config.num_key_value_heads, config.head_dim, SLOTS, window))


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
