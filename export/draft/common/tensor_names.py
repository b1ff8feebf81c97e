"""Names of tensors that heads of several kinds have, and a check of names that were mapped to a module's."""

from collections.abc import Mapping
from pathlib import Path

SELECTOR = "t2d"


def check_named_once(folder: Path, names: Mapping[str, str]) -> None:
    """Raise ValueError where two tensors of a checkpoint have one name in the module, which ``names`` maps them to."""
    own = list(names.values())
    twice = next((name for name, each in names.items() if own.count(each) > 1), None)
    if twice is not None:
        raise ValueError(f"{folder} has {names[twice]} twice, once as {twice}: which one is meant?")
