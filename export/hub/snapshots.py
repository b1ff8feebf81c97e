"""A repository at a commit: what of it the cache has, what the hub lists, and the download of what is missing."""

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
from eagle3.export.hub.errors import one_line
from eagle3.export.hub.names import HubName
from eagle3.export.hub.needed import CONFIG, TOKENIZER, Role, has_adapter, needed


@dataclass(frozen=True)
class Snapshot:
    """``sizes``: bytes by file, of all that an export reads; 0 where a hub does not say. ``folder``: where the cache
    has them, None where it lacks those in ``missing``."""

    name: HubName
    role: Role
    commit: str
    kind: str
    """Of the weights: safetensors, pickled, GGUF; "" where configurations alone are read."""
    sizes: dict[str, int]
    index: str | None = None
    adapter: bool = False
    """Whether a LoRA lies beside the weights."""
    tokenizer: str | None = None
    """What only the same tokenizer.json has: its sha256, or git's sha1."""
    folder: Path | None = None
    missing: tuple[str, ...] = ()

    @property
    def missing_bytes(self) -> int:
        return sum(self.sizes[file] for file in self.missing)

    def __str__(self) -> str:
        """With the commit, as ``--checkpoint`` takes it."""
        return str(replace(self.name, revision=self.commit))


def cached(name: HubName, role: Role, lenient: bool = False) -> Snapshot | None:
    """The repository as the cache has it, where it has all that is needed; nobody is asked. None otherwise.

    ``lenient``: also where other files than weights and configuration may be missing, which the cache does not say of
    what other tools downloaded.
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
    except (ValueError, FileNotFoundError):  # an index that is not here, or no weights at all
        return None
    wanted = set(chosen.files)
    if tree is None and not lenient:
        known = (try_to_load_from_cache(name.repository, file, revision=folder.name) for file in role.certain)
        wanted |= {file for file, answer in zip(role.certain, known, strict=True) if answer is None}
    if any(here.get(file) != (tree or here).get(file) or file not in here for file in wanted):
        return None
    tokenizer = (folder / TOKENIZER).resolve().name if TOKENIZER in here else None  # the cache's files are called so
    sizes = {file: here[file] for file in chosen.files}
    adapter = has_adapter(tree or here)
    return Snapshot(name, role, folder.name, chosen.kind, sizes, chosen.index, adapter, tokenizer, folder)


def listed(name: HubName, role: Role, with_index: bool) -> Snapshot:
    """The repository as the hub lists it. ``with_index``: an index of shards is downloaded for their names.

    Raises what ``one_line`` raises, and ValueError for a repository that has no weights that are read.
    """
    with one_line(name, role.flag):
        info = HfApi().model_info(name.repository, revision=name.revision, files_metadata=True)
        siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}

        def read_index(index: str) -> list[str]:
            return list(weight_map(Path(hf_hub_download(name.repository, index, revision=info.sha))).values())

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
            if not isinstance(try_to_load_from_cache(name.repository, file, revision=info.sha), str)
        ]
    tokenizer = siblings.get(TOKENIZER)
    return Snapshot(
        name=name,
        role=role,
        commit=info.sha,
        kind=chosen.kind,
        sizes={file: siblings[file].size or 0 for file in chosen.files},
        index=chosen.index,
        adapter=has_adapter(siblings),
        tokenizer=tokenizer and (tokenizer.lfs.sha256 if tokenizer.lfs else tokenizer.blob_id),
        missing=tuple(missing),
    )


def check_disk(snapshots: list[Snapshot]) -> None:
    """Raises OSError where the cache's disk has not the room for what is missing."""
    takes, cache = sum(snapshot.missing_bytes for snapshot in snapshots), Path(constants.HF_HUB_CACHE).resolve()
    free = shutil.disk_usage(next(place for place in (cache, *cache.parents) if place.exists())).free
    if takes > free:
        raise OSError(
            f"the download takes {takes / 1e9:,.1f} GB, {free / 1e9:,.1f} GB are free for {cache}: make room, or set "
            "HF_HOME to a folder on a larger disk"
        )


def download(snapshot: Snapshot) -> Snapshot:
    """The snapshot with all of its files in the cache. Files that are there are not fetched again.

    Raises what ``one_line`` raises, OSError for a file that is not as long as the hub said.
    """
    name = snapshot.name
    patterns = [glob.escape(file) for file in snapshot.sizes]
    with one_line(name, snapshot.role.flag):
        HfApi().resolve_revision(name.repository, revision=name.revision)  # keeps in the cache which commit it means
        folder = Path(snapshot_download(name.repository, revision=snapshot.commit, allow_patterns=patterns))
    for file, size in snapshot.sizes.items():
        got = (folder / file).stat().st_size
        if size and got != size:
            raise OSError(
                f"{file} of {snapshot} has {got} bytes, the hub lists {size}: the upload is damaged or was replaced: "
                f"remove {(folder / file).resolve()} and type the command again, or name another revision"
            )
    return replace(snapshot, folder=folder, missing=())
