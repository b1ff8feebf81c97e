"""Reads JSON configurations strictly: a field of another type than expected is refused by name.

A value such as ``"false"`` in place of ``false`` would load and run, and the model would compute something else.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

Default = TypeVar("Default")


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ValueError for anything else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deeply
        raise ValueError(f"{file} is not JSON ({error}): copy it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds {_kind(value)}, but a configuration is an object: copy it again")
    return value


def _kind(value: object) -> str:
    return {list: "a list", str: "text", bool: "true or false", type(None): "null"}.get(type(value), "a number")


@dataclass(frozen=True)
class Fields(Mapping[str, Any]):
    """The fields of a configuration, together with its file, which errors name. A part of a file has the same file.

    A key that is absent or null gives the default. Each method raises ValueError for a value of another kind.
    """

    file: Path
    content: Mapping[str, Any]
    part: str = ""
    """The key of the file's part that errors name as well; "" for the whole file."""

    @property
    def where(self) -> str:
        """Return what errors begin with: the file, and the part."""
        return f"{self.file}: {self.part}" if self.part else str(self.file)

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401 - a value of JSON
        return self.content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)

    def boolean(self, key: str, default: Default = None) -> bool | Default:  # type: ignore[assignment]
        """Return a field that is true or false."""
        value = self.content.get(key)
        if value is None:
            return default
        return value if isinstance(value, bool) else self._refuse(key, "true or false: correct it")

    def count(self, key: str, default: Default = None, least: int = 1) -> int | Default:  # type: ignore[assignment]
        """Return a whole number that is at least ``least``."""
        value = self.content.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self._refuse(key, f"a whole number from {least} on: correct it")
        return value

    def number(
        self,
        key: str,
        default: Default = None,  # type: ignore[assignment]
        most: float = math.inf,
    ) -> float | Default:
        """Return a finite number above 0 that is at most ``most``."""
        value = self.content.get(key)
        if value is None:
            return default
        real = isinstance(value, int | float) and not isinstance(value, bool)
        if not real or not 0 < value < math.inf or value > most:
            self._refuse(key, f"a number above 0{f' and at most {most}' if most < math.inf else ''}: correct it")
        return value

    def layer_ids(self, key: str) -> tuple[int, ...] | None:
        """Return a list of whole numbers; None if it is empty."""
        value = self.content.get(key)
        if value is None or value == []:
            return None
        if not isinstance(value, list) or any(isinstance(item, bool) or not isinstance(item, int) for item in value):
            self._refuse(key, "a list of layer ids such as [2, 30, 57]")
        return tuple(value)

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings."""
        value = self.content.get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            self._refuse(key, "a list of names: correct it")
        return tuple(value or ())

    def nested(self, key: str) -> "Fields":
        """Return an object; an empty one if the key is absent or null."""
        value = self.content.get(key)
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{self.where}: {key} is {_kind(value)}, but must be an object: correct it")
        return Fields(self.file, value or {}, self.part)

    def changed(self, values: Mapping[str, Any]) -> "Fields":
        """Return these fields with some replaced or added."""
        return Fields(self.file, {**self.content, **values}, self.part)

    def _refuse(self, key: str, wanted: str) -> NoReturn:
        raise ValueError(f"{self.where}: {key} is {json.dumps(self.content[key])}, but must be {wanted}")
