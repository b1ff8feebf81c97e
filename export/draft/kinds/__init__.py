"""The registry of the kinds of draft heads, a folder each. The ``__init__.py`` of a kind says how it is listed and
recognized. It names ``parts.py``, which says how a checkpoint is read, what is computed, which targets it fits and what
it is compared with (``common/kind.py``)."""

from eagle3.export.draft.common.kind import Kind
from eagle3.export.draft.kinds import dflash, eagle, gemma4_assistant, mlp_speculator, mtp

KINDS: dict[str, Kind] = {
    **eagle.KINDS,
    **gemma4_assistant.KINDS,
    **mlp_speculator.KINDS,
    **dflash.KINDS,
    **mtp.KINDS,
}
