"""Reads JSON configurations strictly: a field of another type than expected is refused by name.

A value such as ``"false"`` in place of ``false`` would load and run, and the model would compute something else.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

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


def boolean(config: Mapping[str, Any], key: str, default: Default, where: object) -> bool | Default:
    """Return a field that is true or false. ``where`` names the file in errors. An absent or null key gives the
    default."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{where}: {key} is {json.dumps(value)}, but must be true or false: correct it")
    return value


def count(config: Mapping[str, Any], key: str, default: Default, where: object, least: int = 1) -> int | Default:
    """Return a whole number that is at least ``least``."""
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(
            f"{where}: {key} is {json.dumps(value)}, but must be a whole number from {least} on: correct it"
        )
    return value


def number(
    config: Mapping[str, Any], key: str, default: Default, where: object, most: float = math.inf
) -> float | Default:
    """Return a finite number above 0 that is at most ``most``."""
    value = config.get(key)
    if value is None:
        return default
    real = isinstance(value, int | float) and not isinstance(value, bool)
    if not real or not 0 < value < math.inf or value > most:
        bound = f" and at most {most}" if most < math.inf else ""
        raise ValueError(f"{where}: {key} is {json.dumps(value)}, but must be a number above 0{bound}: correct it")
    return value


def layer_ids(config: Mapping[str, Any], key: str, where: object) -> tuple[int, ...] | None:
    """Return a list of whole numbers; None if it is absent, null or empty."""
    value = config.get(key)
    if value is None or value == []:
        return None
    if not isinstance(value, list) or any(isinstance(item, bool) or not isinstance(item, int) for item in value):
        raise ValueError(f"{where}: {key} is {json.dumps(value)}, but must be a list of layer ids such as [2, 30, 57]")
    return tuple(value)


def texts(config: Mapping[str, Any], key: str, where: object) -> tuple[str, ...]:
    """Return a list of strings; an empty one if the key is absent or null."""
    value = config.get(key)
    if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        raise ValueError(f"{where}: {key} is {json.dumps(value)}, but must be a list of names: correct it")
    return tuple(value or ())


def nested(config: Mapping[str, Any], key: str, where: object) -> dict[str, Any]:
    """Return an object; an empty one if the key is absent or null."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {key} is {_kind(value)}, but must be an object: correct it")
    return value


def _kind(value: object) -> str:
    return {list: "a list", str: "text", bool: "true or false", type(None): "null"}.get(type(value), "a number")


@dataclass(frozen=True)
class Fields(Mapping[str, Any]):
    """The fields of a configuration, together with its file, which errors name. A part of a file has the same file."""

    file: Path
    content: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401 - a value of JSON
        return self.content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)

    def boolean(self, key: str, default: Default = None) -> bool | Default:  # type: ignore[assignment]
        return boolean(self.content, key, default, self.file)

    def count(self, key: str, default: Default = None, least: int = 1) -> int | Default:  # type: ignore[assignment]
        return count(self.content, key, default, self.file, least)

    def number(
        self,
        key: str,
        default: Default = None,  # type: ignore[assignment]
        most: float = math.inf,
    ) -> float | Default:
        return number(self.content, key, default, self.file, most)

    def layer_ids(self, key: str) -> tuple[int, ...] | None:
        return layer_ids(self.content, key, self.file)

    def texts(self, key: str) -> tuple[str, ...]:
        return texts(self.content, key, self.file)

    def nested(self, key: str) -> "Fields":
        return Fields(self.file, nested(self.content, key, self.file))

    def changed(self, values: Mapping[str, Any]) -> "Fields":
        """Return these fields with some replaced or added."""
        return Fields(self.file, {**self.content, **values})
