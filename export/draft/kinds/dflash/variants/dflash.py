"""DFlash itself: a block without a further module."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.export.draft.kinds.dflash.block.keys import ANCHOR, SHIFT
from eagle3.export.draft.kinds.dflash.block.variant import Variant
from eagle3.export.draft.kinds.dflash.variants import DFLASH


@dataclass(frozen=True)
class DFlash(Variant):
    """The variant without further parts."""

    kind = DFLASH
    embeds_as_target = True

    @classmethod
    def check_keys(cls, own: Mapping[str, Any], config: Mapping[str, Any], file: Path) -> None:
        if own.get(SHIFT) or config.get(SHIFT):
            raise ValueError(f"{file}: {SHIFT} is true in a {DFLASH} head: type {ANCHOR} in its place")


VARIANT = DFlash
