"""Finds a repository at a commit in the cache or on the hub, and downloads the files that are missing."""

import glob
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import (
    HfApi,
    constants,
    get_cached_repo_tree,
    hf_hub_download,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import CachedRepoTreeNotFoundError

from eagle3.export.checkpoints.safetensors_folder import weight_map
from eagle3.export.configuration.hub_names import HubName
from eagle3.export.hub.errors import one_line
from eagle3.export.hub.needed import CONFIG, Role, has_adapter, needed
from eagle3.export.output.contents import TOKENIZER
from eagle3.runner.system.machine import size_text


@dataclass(frozen=True)
class Snapshot:
    """The files that an export reads of a repository at a commit.

    ``sizes`` maps each file to its bytes, or to 0 if the hub does not say. ``folder`` is the folder of the cache that
    holds the files, or None if the cache is not known to be complete; ``missing`` lists the files that the cache lacks.
    """

    name: HubName
    role: Role
    commit: str
    kind: str
    """The format of the weights: safetensors, pickled, GGUF, or "" if only configurations are read."""
    sizes: dict[str, int]
    index: str | None = None
    adapter: bool = False
    """True if the repository has a LoRA adapter beside the weights."""
    tokenizer: str | None = None
    """The hash of tokenizer.json, sha256 or git's sha1. None if there is no such file."""
    folder: Path | None = None
    missing: tuple[str, ...] = ()

    @property
    def missing_bytes(self) -> int:
        return sum(self.sizes[file] for file in self.missing)

    def __str__(self) -> str:
        """Return the name with the commit, as ``--checkpoint`` takes it."""
        return str(replace(self.name, revision=self.commit))


def cached(name: HubName, role: Role, lenient: bool = False) -> Snapshot | None:
    """Return the snapshot if the cache holds all of its files, else None. Makes no request.

    The cache does not list the files of repositories that other tools downloaded. With ``lenient``, such a snapshot
    needs only its weights and config.json.
    """
    probe = name.file or CONFIG
    found = try_to_load_from_cache(name.repository, probe, revision=name.revision)
    if not isinstance(found, str):
        return None
    folder = Path(found).parents[probe.count("/")]
    try:
        tree = {file.path: file.size for file in get_cached_repo_tree(name.repository, revision=folder.name)}
    except CachedRepoTreeNotFoundError:
        tree = None
    here = {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    try:
        chosen = needed(name, role, tree or here, lambda index: weight_map(folder / index).values())
    except (ValueError, FileNotFoundError):  # the index is not in the cache, or there are no weights
        return None
    wanted = set(chosen.files)
    if tree is None and not lenient:
        known = (try_to_load_from_cache(name.repository, file, revision=folder.name) for file in role.certain)
        wanted |= {file for file, answer in zip(role.certain, known, strict=True) if answer is None}
    if any(here.get(file) != (tree or here).get(file) or file not in here for file in wanted):
        return None
    # the cache names files by their hash
    tokenizer = (folder / TOKENIZER).resolve().name if TOKENIZER in here else None
    sizes = {file: here[file] for file in chosen.files}
    adapter = has_adapter(tree or here)
    return Snapshot(name, role, folder.name, chosen.kind, sizes, chosen.index, adapter, tokenizer, folder)


def listed(name: HubName, role: Role, with_index: bool) -> Snapshot:
    """Return the snapshot as the hub lists it.

    ``with_index`` downloads an index of shards for the shards' names; without it they are guessed. Raises what
    ``one_line`` raises, and ValueError for a repository without weights that are read.
    """
    with one_line(name, role.flag):
        info = HfApi().model_info(name.repository, revision=name.revision, files_metadata=True)
        siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}

        def read_index(index: str) -> list[str]:
            return list(weight_map(Path(hf_hub_download(name.repository, index, revision=info.sha))).values())

        commit = str(info.sha)
        chosen = needed(name, role, siblings, read_index if with_index else None)
        gone = [file for file in chosen.files if file not in siblings]
        if gone:
            raise FileNotFoundError(
                f"{chosen.index or name} of {name.repository} names {gone[0]}, which is not in the repository: the "
                f"upload is not complete: type {role.flag} with another revision or repository"
            )
        missing = [
            file
            for file in chosen.files
            if not isinstance(try_to_load_from_cache(name.repository, file, revision=commit), str)
        ]
    tokenizer = siblings.get(TOKENIZER)
    return Snapshot(
        name=name,
        role=role,
        commit=commit,
        kind=chosen.kind,
        sizes={file: siblings[file].size or 0 for file in chosen.files},
        index=chosen.index,
        adapter=has_adapter(siblings),
        tokenizer=None if tokenizer is None else tokenizer.lfs.sha256 if tokenizer.lfs else tokenizer.blob_id,
        missing=tuple(missing),
    )


def check_disk(snapshots: list[Snapshot]) -> None:
    """Raise OSError if the cache's disk has too little room for the missing files."""
    takes, cache = sum(snapshot.missing_bytes for snapshot in snapshots), Path(constants.HF_HUB_CACHE).resolve()
    free = shutil.disk_usage(next(place for place in (cache, *cache.parents) if place.exists())).free
    if takes > free:
        raise OSError(
            f"the download takes {size_text(takes)}, {size_text(free)} are free for {cache}: make room, or set "
            "HF_HOME to a folder on a larger disk"
        )


def download(snapshot: Snapshot) -> Snapshot:
    """Download the missing files and return the complete snapshot.

    Raises what ``one_line`` raises, and OSError for a file whose length differs from the hub's listing.
    """
    name = snapshot.name
    patterns = [glob.escape(file) for file in snapshot.sizes]
    with one_line(name, snapshot.role.flag):
        # the cache then records the revision's commit
        HfApi().resolve_revision(name.repository, revision=name.revision)
        folder = Path(snapshot_download(name.repository, revision=snapshot.commit, allow_patterns=patterns))
    for file, size in snapshot.sizes.items():
        got = (folder / file).stat().st_size
        if size and got != size:
            raise OSError(
                f"{file} of {snapshot} has {got} bytes, the hub lists {size}: the upload is damaged or was replaced: "
                f"remove {(folder / file).resolve()} and type the command again, or name another revision"
            )
    return replace(snapshot, folder=folder, missing=())
