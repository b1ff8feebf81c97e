"""The registry of the kinds of draft heads, a folder each. The ``__init__.py`` of a kind says how it is listed and
recognized. It names ``parts.py``, which collects the reader, the module and the check of a pair of the
kind (``common/kind.py``)."""

from eagle3.export.draft.common.kind import Kind
from eagle3.export.draft.kinds import dflash, eagle, gemma4_assistant, mlp_speculator, mtp

KINDS: dict[str, Kind] = {
    **eagle.KINDS,
    **gemma4_assistant.KINDS,
    **mlp_speculator.KINDS,
    **dflash.KINDS,
    **mtp.KINDS,
}
