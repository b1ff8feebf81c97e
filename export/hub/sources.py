"""Replaces hub names in the flags of an export by paths, before anything else reads the flags."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from eagle3.export.configuration.config import NO_HEAD, OWN_LAYER, ExportConfig
from eagle3.export.configuration.hub_names import HubName, hub_name, of_address
from eagle3.export.planning.paths import (
    check_context,
    draft_folder,
    target_paths,
    uses_own_layer,
    written_context,
)
from eagle3.runner.system.machine import size_text
from eagle3.targets import TARGETS

if TYPE_CHECKING:
    from eagle3.export.hub.needed import Role
    from eagle3.export.hub.snapshots import Snapshot

FLAGS = {"checkpoint": "--checkpoint", "config_folder": "--config", "draft": "--draft"}
"""Maps the fields of ``ExportConfig`` that may be names on the hub to their flags."""


@dataclass(frozen=True)
class Sources:
    """The flags of an export and the repositories that they name, by field of ``config``."""

    config: ExportConfig
    snapshots: Mapping[str, "Snapshot"] = field(default_factory=dict)

    @property
    def missing(self) -> list["Snapshot"]:
        """The repositories that the cache does not hold completely."""
        return [snapshot for snapshot in self.snapshots.values() if snapshot.folder is None]

    @property
    def headers_suffice(self) -> bool:
        """True if the headers of the missing weights are enough to plan with."""
        return all(snapshot.kind in ("safetensors", "") for snapshot in self.missing)

    @contextmanager
    def local(self) -> Iterator[ExportConfig]:
        """Yield the flags with paths. A missing repository becomes a folder of configurations and headers, which is
        removed afterwards. Raises ValueError if headers are not enough."""
        from eagle3.export.hub.headers import header_folder

        if not self.headers_suffice:
            which = next(snapshot for snapshot in self.missing if snapshot.kind not in ("safetensors", ""))
            raise ValueError(
                f"{which.name} has {which.kind} weights, and a dry run cannot fetch their headers alone: type "
                f"--download to fetch {size_text(which.missing_bytes)} first, or name a repository of safetensors"
            )
        if not self.missing:  # no folder that a killed process would leave
            yield self._with_paths(
                {name: snapshot.folder for name, snapshot in self.snapshots.items() if snapshot.folder}
            )
            return
        with TemporaryDirectory(prefix="eagle3-headers-") as folder, named_as_typed(folder):
            yield self._with_paths(
                {
                    name: snapshot.folder or header_folder(snapshot, Path(folder) / name)
                    for name, snapshot in self.snapshots.items()
                }
            )

    def check_disk(self) -> None:
        """Raise OSError if the cache's disk has too little room for the missing files."""
        if self.missing:
            from eagle3.export.hub.snapshots import check_disk

            check_disk(self.missing)

    def downloaded(self) -> "Sources":
        """Download the missing files. Raises what ``download`` raises."""
        from eagle3.export.hub.snapshots import download

        whole = {name: snapshot if snapshot.folder else download(snapshot) for name, snapshot in self.snapshots.items()}
        return replace(self, snapshots=whole)

    def _with_paths(self, folders: Mapping[str, Path]) -> ExportConfig:
        paths: dict[str, Any] = dict(folders)
        names = {}
        for name, snapshot in self.snapshots.items():
            names[name] = replace(snapshot.name, revision=snapshot.commit)
            if snapshot.name.file is not None:
                paths[name] = folders[name] / snapshot.name.file
                if self.config.config_folder is None and (folders[name] / "config.json").is_file():
                    paths["config_folder"] = folders[name]
        return replace(self.config, **paths, repositories=names)

    def as_json(self) -> dict[str, Any]:
        """Return each repository's id and commit, and the bytes that are still to download."""
        return {
            name: {
                "id": snapshot.name.repository,
                "commit": snapshot.commit,
                "download_bytes": snapshot.missing_bytes,
            }
            for name, snapshot in self.snapshots.items()
        }

    def lines(self) -> Iterator[str]:
        """Yield a line on each repository, and warnings about adapters that are not read and tokenizers that are not
        compared."""
        for name, snapshot in self.snapshots.items():
            takes = f"{size_text(snapshot.missing_bytes)} to download" if snapshot.missing else "in the cache"
            yield f"hub      {FLAGS[name]} {snapshot}: {takes}"
            if snapshot.adapter and name == "draft":
                yield f"hub      {snapshot.name} has a LoRA for its target: merge the two, or less is accepted"
        if self._tokenizers_uncompared():
            yield "hub      target and draft have different tokenizer files: an export compares them token by token"

    def without_tokenizer(self, checkpoint: Path) -> Iterator[str]:
        """Yield a line if the target has no tokenizer.json. For a repository this is known from its listing, since a
        dry run does not fetch the file. ``checkpoint`` is the folder with the target's configuration."""
        snapshot = self.snapshots.get("config_folder") or self.snapshots.get("checkpoint")
        if not (checkpoint / "tokenizer.json").is_file() and (snapshot is None or snapshot.tokenizer is None):
            from eagle3.export.planning.tokenizer import no_tokenizer

            yield no_tokenizer(checkpoint, str(checkpoint if snapshot is None else snapshot.name))

    def _tokenizers_uncompared(self) -> bool:
        """Return True if both models have a tokenizer.json, the two may differ, and one of them is not on this
        machine."""
        both = [self._tokenizer("config_folder") or self._tokenizer("checkpoint"), self._tokenizer("draft")]
        return bool(self.missing) and None not in both and both[0] != both[1]

    def _tokenizer(self, name: str) -> str | None:
        """Return an identifier of the contents of a model's tokenizer.json, or None if it has none."""
        snapshot, path = self.snapshots.get(name), getattr(self.config, name)
        if snapshot is not None:
            return snapshot.tokenizer
        file = path and (path if path.is_dir() else path.parent) / "tokenizer.json"
        return str(file) if file and file.is_file() else None


@contextmanager
def named_as_typed(folder: str) -> Iterator[None]:
    """Remove the temporary ``folder`` from the messages of errors, so that their paths begin with the repository."""
    try:
        yield
    except (ValueError, OSError) as error:
        if len(error.args) == 1 and isinstance(error.args[0], str):
            error.args = (re.sub(rf"{re.escape(folder)}/\w+/", "", error.args[0]),)
        raise


def check_typed(config: ExportConfig) -> None:
    """Raise ValueError or FileNotFoundError for typed values that are wrong whatever the weights are: a path that does
    not exist, a head's number that the target does not have, a context longer than the checkpoint's. Imports neither
    torch nor transformers, so the error is immediate."""
    config = with_shipped_head(config)
    named, _ = names_of(config if config.draft is not None else replace(config, draft=Path(NO_HEAD)))
    if not named.keys() & {"checkpoint", "config_folder"}:
        _, folder = target_paths(config, TARGETS[config.target_model])
        if config.max_seq_len is not None:
            check_context(config.max_seq_len, written_context(folder))
    if "draft" not in named and config.draft not in (None, Path(NO_HEAD), Path(OWN_LAYER)):
        draft_folder(config)


def find_sources(config: ExportConfig, download: bool = False) -> Sources:
    """Look up the hub names in the flags and in the target's entry, in the cache first.

    No request is made if all flags are paths.

    Args:
        download: allow the download of repositories that only the entry names

    Raises:
        FileNotFoundError: a repository does not exist, or only the entry names it and the cache is not complete
        OSError, ValueError: see ``listed``
    """
    config = with_shipped_head(config)
    if config.draft is None and uses_own_layer(config):  # so that later stages need not look into the checkpoint again
        config = replace(config, draft=Path(OWN_LAYER))
    named, given = names_of(config)
    if not named:
        return Sources(config)
    from eagle3.export.hub.needed import CONFIGURATION, DRAFT, TARGET

    roles = {"checkpoint": TARGET, "config_folder": CONFIGURATION, "draft": DRAFT}
    found, unasked = {}, []
    for name, written in named.items():
        allowed = name in given or download or not config.reads_weights
        found[name] = _look_up(written, roles[name], allowed)
        if found[name].missing and not allowed:
            unasked.append(found[name])
    if unasked:
        raise FileNotFoundError(_not_here(config.target_model, unasked))
    return Sources(config, found)


def with_shipped_head(config: ExportConfig) -> ExportConfig:
    """Replace the number or the name of a head that ships with the target by its folder. Raises ValueError for a number
    that the target does not have."""
    drafts, text = TARGETS[config.target_model].drafts, str(config.draft)
    if not drafts or config.draft is None or config.draft.exists():
        return config
    if text.isdecimal() and not 1 <= int(text) <= len(drafts):
        raise _no_such_head(text, config.target_model, len(drafts))
    chosen = [path for number, path in enumerate(drafts, 1) if text in (str(number), path.name)]
    return replace(config, draft=chosen[0]) if chosen else config


def names_of(config: ExportConfig) -> tuple[dict[str, HubName], set[str]]:
    """Return the names on the hub by field, and the fields that the user typed. An existing path is not taken for a
    name.

    Raises ValueError for the address of a repository, for a head's number that the target's entry does not have, and if
    no head is known.
    """
    spec, named = TARGETS[config.target_model], {}
    for name in FLAGS:
        written = getattr(config, name)
        if written is None or os.path.exists(written):
            continue
        if (address := of_address(str(written))) is not None:
            raise ValueError(
                f"{FLAGS[name]} takes the name of a repository, not its address: type {FLAGS[name]} {address}"
            )
        if (found := hub_name(str(written))) is not None:
            named[name] = found
    if config.checkpoint is None and spec.repository is not None:
        named["checkpoint"] = HubName(spec.repository, named_by=f"--target-model {config.target_model}")
    heads = spec.heads or _heads_for(named.get("checkpoint"))
    if config.draft == Path(NO_HEAD) or uses_own_layer(config):
        named.pop("draft", None)
    elif config.draft is not None and not os.path.exists(config.draft):
        head = _head(str(config.draft), heads, config.target_model)
        named |= {"draft": head} if head else {}
    elif config.draft is None and spec.draft is None:
        if not heads:
            raise ValueError(
                f"no draft head is known for {config.target_model}: type --draft FOLDER or ORG/NAME, --draft none to "
                "export the target alone, or --draft mtp if its checkpoint has an MTP layer"
            )
        by = f"--target-model {config.target_model}" if spec.heads else f"--checkpoint {config.checkpoint}"
        named["draft"] = HubName(heads[0], named_by=by)
    return named, {name for name in named if getattr(config, name) is not None}


def _heads_for(checkpoint: HubName | None) -> tuple[str, ...]:
    """Return the published heads of the target whose repository ``checkpoint`` is; empty if no entry has it."""
    entries = (spec.heads for spec in TARGETS.values() if checkpoint and spec.repository == checkpoint.repository)
    return next(entries, ())


def _head(text: str, heads: tuple[str, ...], target: str) -> HubName | None:
    """Return the head that ``text`` selects, by its number in the list or by its name without the organization. Returns
    None if there is no such name."""
    if text.isdecimal():
        if not 1 <= int(text) <= len(heads):
            raise _no_such_head(text, target, len(heads))
        return HubName(heads[int(text) - 1], named_by=f"--draft {text}")
    return next((HubName(head, named_by=f"--draft {text}") for head in heads if text == head.partition("/")[2]), None)


def _no_such_head(text: str, target: str, count: int) -> ValueError:
    has = f"has {count} heads" if count else "has no heads"
    return ValueError(f"--draft {text}: {target} {has}: eagle3-export --list-targets lists them")


def _look_up(name: HubName, role: "Role", allowed: bool) -> "Snapshot":
    from eagle3.export.hub.errors import Unreachable
    from eagle3.export.hub.snapshots import cached, listed

    whole = cached(name, role)
    if whole is not None:
        return whole
    try:
        return listed(name, role, with_index=allowed)
    except Unreachable:
        whole = cached(name, role, lenient=True)
        if whole is None:
            raise
        return whole


def _not_here(target: str, snapshots: list["Snapshot"]) -> str:
    total = size_text(sum(snapshot.missing_bytes for snapshot in snapshots))
    which = " and ".join(f"{s.name} ({size_text(s.missing_bytes)})" for s in snapshots)
    flags = " and ".join(s.role.flag for s in snapshots)
    return (
        f"{target} takes {which}, which the cache lacks: type --download to fetch {total}, --dry-run to print the "
        f"plan, or {flags} with a folder or a name of your own"
    )
