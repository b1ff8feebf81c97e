"""Chooses the files of a repository that an export reads: configurations, the tokenizer, the weights in one format."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from eagle3.export.checkpoints import pickled, safetensors_folder
from eagle3.export.checkpoints.gguf_file import SUFFIX, part_names
from eagle3.export.checkpoints.safetensors_folder import ADAPTER_CONFIG
from eagle3.export.configuration.hub_names import HubName
from eagle3.export.draft.other_heads import GGUF_HEAD, MISTRALS_FORM, PARAMS
from eagle3.export.output.contents import TOKENIZER, TOKENIZER_FILES

SAFETENSORS, PICKLED, GGUF = "safetensors", "pickled", "GGUF"
CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
SMALL = (CONFIG, GENERATION_CONFIG, ADAPTER_CONFIG)
"""The configurations that a dry run downloads. The tokenizer is not among them, since it takes up to 33 MB."""


@dataclass(frozen=True)
class Role:
    """The part that a repository plays in an export, and the configurations that are read from it.

    ``certain`` lists files that may be absent from a complete cache only if the cache records that the repository lacks
    them.
    """

    flag: str
    configurations: tuple[str, ...]
    weights: bool = True
    certain: tuple[str, ...] = ()


TARGET = Role(
    "--checkpoint",
    (CONFIG, ADAPTER_CONFIG, *TOKENIZER_FILES, "chat_template.json"),
    certain=(TOKENIZER, GENERATION_CONFIG),
)
CONFIGURATION = Role("--config", TARGET.configurations, weights=False, certain=TARGET.certain)
DRAFT = Role("--draft", (CONFIG, ADAPTER_CONFIG, TOKENIZER))


@dataclass(frozen=True)
class Needed:
    """The files to read. ``kind`` is the format of the weights; "" if there are none. ``index`` is the file that lists
    the shards of the weights."""

    files: tuple[str, ...]
    kind: str
    index: str | None = None


def needed(
    name: HubName, role: Role, listed: Collection[str], read_index: Callable[[str], Iterable[str]] | None
) -> Needed:
    """Choose among the files in ``listed``.

    Args:
        read_index: returns the files that an index names. If it is None, files named like shards are
            taken, which is enough to count their bytes.

    Raises:
        ValueError: the repository has no weights that are read; the message says what it has
    """
    configurations = tuple(file for file in role.configurations if file in listed)
    if not role.weights:
        return Needed(configurations, "")
    if name.file is not None:
        if role is DRAFT:
            raise ValueError(f"--draft {name}: {GGUF_HEAD}")
        return Needed((*configurations, *_gguf_parts(name.repository, name.file, listed)), GGUF)
    for kind, form in ((SAFETENSORS, safetensors_folder), (PICKLED, pickled)):
        if form.SINGLE_FILE in listed:
            return Needed((*configurations, form.SINGLE_FILE), kind)
        if form.INDEX_FILE in listed:
            files = _like_shards(form.SINGLE_FILE, listed) if read_index is None else set(read_index(form.INDEX_FILE))
            return Needed((*configurations, form.INDEX_FILE, *sorted(files)), kind, form.INDEX_FILE)
    raise ValueError(f"{name} {_without_weights(name, role, listed)}")


def _like_shards(single: str, listed: Collection[str]) -> list[str]:
    stem, _, suffix = single.rpartition(".")
    return [file for file in listed if file.startswith(f"{stem}-") and file.endswith(f".{suffix}")]


def _gguf_parts(repository: str, file: str, listed: Collection[str]) -> list[str]:
    if not file.lower().endswith(SUFFIX):
        raise ValueError(
            f"{repository}:{file}: a file may be named only if it is GGUF: type {repository} for the whole model"
        )
    if file not in listed:
        has = _ggufs(listed)
        raise ValueError(f"{repository} has no {file}" + (f", but {has}" if has else " and no other GGUF file"))
    folder, slash, own = file.rpartition("/")
    return [f"{folder}{slash}{part}" for part in part_names(own)]


def _without_weights(name: HubName, role: Role, listed: Collection[str]) -> str:
    if role is DRAFT and _ggufs(listed):
        return f"has GGUF weights only: {GGUF_HEAD}"
    if role is DRAFT and PARAMS in listed and CONFIG not in listed:
        return MISTRALS_FORM
    if ggufs := _ggufs(listed):
        return f"has GGUF weights only: type {name.repository}:FILE with one of {ggufs}"
    if has_adapter(listed):
        return f"holds only a LoRA adapter: {safetensors_folder.MERGE_ADAPTER}"
    other = [file for file in sorted(listed) if file.endswith((".safetensors", ".bin", ".pt", ".pth"))]
    has = f" but {', '.join(other[:3])}" if other else ""
    return f"has no weights that are read{has}: {safetensors_folder.SINGLE_FILE} or its index, or pytorch_model.bin"


def has_adapter(listed: Collection[str]) -> bool:
    return any(file.startswith("adapter_model.") for file in listed)


def _ggufs(listed: Collection[str]) -> str:
    found = sorted(file for file in listed if file.lower().endswith(SUFFIX))
    return ", ".join(found[:6]) + (f" and {len(found) - 6} others" if len(found) > 6 else "")
