"""Names of tensors that several kinds of heads have, and a check of names mapped to those of a module."""

from collections.abc import Mapping
from pathlib import Path

SELECTOR = "t2d"


def check_named_once(folder: Path, names: Mapping[str, str]) -> None:
    """Raise ValueError if ``names`` maps two tensors of a checkpoint to the same name in the module."""
    own = list(names.values())
    twice = next((name for name, each in names.items() if own.count(each) > 1), None)
    if twice is not None:
        raise ValueError(f"{folder} has {names[twice]} twice, once as {twice}: which one is meant?")
