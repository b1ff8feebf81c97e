"""The types that describe a kind of draft head: ``Kind``, its entry in the table, and ``KindModule``, the protocol of
its module."""

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


class KindModule(Protocol):
    """The module of a kind: the names that it must define."""

    FIELDS: "Sequence[Field]"
    """The fields that may be read in more than one way (``--read``). A measurement tries these."""

    def read(self, folder: Path, config: dict[str, Any], source: "Source") -> "DraftDescription":
        """Describe a head from its configuration and tensor headers. Raises ValueError with one line. EAGLE heads,
        which have dialects, are read by ``read_eagle``."""

    def Head(self, draft: "DraftDescription", max_seq_len: int, proposals: int = 1) -> "Head":  # noqa: N802 - a class
        """Make the head's module without weights and without the parts that ``attach`` adds."""

    def check_pair(
        self, draft: "DraftDescription", target_config: "PreTrainedConfig", taps: tuple[int, ...], trained_for: str
    ) -> None:
        """Raise ValueError if the head's tensors cannot belong to a target with transformers' text configuration
        ``target_config``. ``trained_for`` is the end of the message: it names the target that the head was trained for,
        or is empty."""


@dataclass(frozen=True)
class Kind:
    """The entry of a kind in ``KINDS``. It imports nothing heavy: ``module`` is the name of the kind's ``KindModule``,
    which is imported on use."""

    takes: str
    """The target's states that heads of this kind take, and the state that they keep: a line for ``--list-drafts``."""
    module: str
    published: tuple[str, ...] = ()
    """Heads of this kind on the Hugging Face hub."""
    model_types: tuple[str, ...] = ()
    speculators_type: str = ""
    """The ``speculators_model_type`` of a head that speculators trained."""
    architectures: str = ""
    """A pattern of the names in ``architectures``. A kind with neither this nor ``model_types`` is recognized by its
    tensors."""

    def recognizes(self, config: Mapping[str, Any]) -> bool:
        if config.get("speculators_model_type") is not None:
            return config["speculators_model_type"] == self.speculators_type
        named = config.get("architectures") or []
        by_name = bool(self.architectures) and any(re.search(self.architectures, each) for each in named)
        return by_name or config.get("model_type") in self.model_types

    def load(self) -> KindModule:
        return cast(KindModule, importlib.import_module(self.module))
