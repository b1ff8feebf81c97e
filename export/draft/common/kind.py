"""The types that describe a kind of draft head: a record for the table, a protocol for its module."""

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from eagle3.export.checkpoints.source import Source
    from eagle3.export.draft.common.description import DraftDescription
    from eagle3.export.draft.common.field import Field
    from eagle3.export.draft.common.head import Head
    from eagle3.export.twin.comparison import Comparison


class KindModule(Protocol):
    """The module of a kind: the names that it must define."""

    FIELDS: "Sequence[Field]"
    """The fields that may be read in more than one way (``--read``). A measurement tries these."""

    def read(self, folder: Path, config: dict[str, Any], source: "Source") -> "DraftDescription":
        """Describe a head from its configuration and tensor headers. Raises ValueError with one line. EAGLE heads,
        which have dialects, are read by ``read_eagle``."""

    def Head(self, draft: "DraftDescription", max_seq_len: int, proposals: int = 1) -> "Head":  # noqa: N802 - a class
        """Make the head without its attached parts."""

    def check_pair(
        self, draft: "DraftDescription", target_config: "PreTrainedConfig", taps: tuple[int, ...], trained_for: str
    ) -> None:
        """Raise ValueError where the head's tensors cannot belong to a target with transformers' text configuration
        ``target_config``. ``trained_for`` ends the line: the target that the head names, or nothing."""

    def compare(self, draft: "DraftDescription", taps: int, overridden: bool | None = None) -> "Comparison":
        """Compare a shrunken twin of the head with code that is not its own, over several chunks, steps and
        rollbacks."""


@dataclass(frozen=True)
class Kind:
    """The entry of a kind in ``KINDS``. Nothing heavy is imported for it: ``module`` names the rest, a
    ``KindModule``."""

    takes: str
    """The states that it takes of the target, and what it keeps: a line for ``--list-drafts``."""
    module: str
    published: tuple[str, ...] = ()
    """Heads of this kind on the Hugging Face hub."""
    model_types: tuple[str, ...] = ()
    speculators_type: str = ""
    """The ``speculators_model_type`` of a head that speculators trained."""
    architectures: str = ""
    """A pattern of the names in ``architectures``. Without it and ``model_types``, tensors tell the kind."""

    def recognizes(self, config: Mapping[str, Any]) -> bool:
        if config.get("speculators_model_type") is not None:
            return config["speculators_model_type"] == self.speculators_type
        named = config.get("architectures") or []
        by_name = bool(self.architectures) and any(re.search(self.architectures, each) for each in named)
        return by_name or config.get("model_type") in self.model_types

    def load(self) -> KindModule:
        return cast(KindModule, importlib.import_module(self.module))
