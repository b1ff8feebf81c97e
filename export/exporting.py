"""Makes an export from its flags to the artifact, as the command ``eagle3-export`` does.

Modules that import torch are imported on use: invalid flags are refused at once, and a dry run imports nothing that
lowers programs.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.export.configuration.backends import BACKENDS
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.configuration.flags import check_flags
from eagle3.export.configuration.hub_names import hub_name
from eagle3.export.hub.sources import Sources, check_typed, find_sources
from eagle3.export.output.folder import check_output, refuse_a_second
from eagle3.export.output.progress import Progress
from eagle3.runner.system.command import calm_libraries
from eagle3.runner.system.gpus import ALL, archs_of
from eagle3.targets import TARGETS

if TYPE_CHECKING:
    from eagle3.export.planning.plan import Plan

Twin = dict[str, Any]


@dataclass(frozen=True)
class Prepared:
    """An export that has been planned and checked without reading any weight."""

    plan: "Plan"
    twin: Twin
    """The result of the twin check, as the manifest has it."""
    sources: Sources


@dataclass(frozen=True)
class Exported:
    """A finished artifact in ``plan.config.output_dir``."""

    plan: "Plan"
    record: dict[str, Any]
    """The contents of ``export.json``."""

    @property
    def folder(self) -> Path:
        return self.plan.config.folder


def export(config: ExportConfig, *, download: bool = False, progress: Progress | None = None) -> Exported:
    """Make an artifact.

    Args:
        config: the command's flags
        download: fetch what the hub's cache lacks of the target's own repositories; repositories that ``config`` names
            are fetched in any case
        progress: prints a line per stage on stderr, and keeps the stages' times; None makes a new one

    Raises:
        FileNotFoundError, FileExistsError: a checkpoint is missing, or the output folder is in use
        ValueError: the flags, the target and the draft head do not fit each other, or this machine cannot make the
            artifact
        OSError: the hub or the disk failed
    """
    if config.dry_run:
        raise ValueError("dry_run is for prepare, which plans an export without making it: leave it out")
    progress = progress or Progress()
    with calm_libraries(), _prepared(config, download, progress) as known:
        from eagle3.export.pipeline import run_export

        return Exported(known.plan, run_export(known.plan, known.twin, progress))


def prepare(config: ExportConfig, *, download: bool = False, progress: Progress | None = None) -> Prepared:
    """Plan an export and check everything that can be checked before any weight is read.

    With ``config.dry_run`` no weights are downloaded unless ``download`` is True: configurations and headers are
    enough. Arguments and errors are those of ``export``.
    """
    with calm_libraries(), _prepared(config, download, progress or Progress()) as known:
        return known


@contextmanager
def weights_at_hand(config: ExportConfig, download: bool) -> Iterator["Plan"]:
    """Yield a plan whose weights are on this machine, for a measurement without an export. Arguments and errors are
    those of ``export``; neither a GPU nor an output folder is needed."""
    check_names(config)
    check_flags(config)
    check_typed(config)
    sources = find_sources(config, download)
    from eagle3.export.planning.plan import make_plan

    if sources.missing:
        sources.check_disk()
        sources = sources.downloaded()
    with sources.local() as here:
        yield make_plan(here)


@contextmanager
def _prepared(config: ExportConfig, download: bool, progress: Progress) -> Iterator[Prepared]:
    """Yield the plan; the files that it names exist until the context ends. Headers stand in for weights that are not
    needed. If the checks need headers only, weights are downloaded after the checks, so that a wrong pair is not
    downloaded."""
    config = settled(config)
    sources, twin = find_sources(config, download), None
    if sources.missing and (download or config.reads_weights):
        sources.check_disk()
        if sources.headers_suffice:
            try:
                with sources.local() as here:
                    twin = _checked(here, sources, progress).twin
            except ValueError as error:
                from eagle3.export.checkpoints.safetensors_file import needs_values

                if not needs_values(error):
                    raise
        _say_sources(sources, progress)
        sources = sources.downloaded()
        with sources.local() as here:
            yield _checked(here, sources, progress, twin)
    else:
        with sources.local() as local, _random(local) as here:
            known = _checked(here, sources, progress)
            _say_sources(sources, progress)
            yield known


def _random(config: ExportConfig) -> AbstractContextManager[ExportConfig]:
    if not config.random_weights:
        return nullcontext(config)
    from eagle3.export.random_weights import random_weights

    return random_weights(config)


def _checked(config: ExportConfig, sources: Sources, progress: Progress, twin: Twin | None = None) -> Prepared:
    """Plan and check the export. With ``twin``, the result of earlier checks, only the plan is made."""
    from eagle3.export.checks.preflight import preflight
    from eagle3.export.planning.plan import make_plan

    plan = make_plan(config)
    if twin is None:
        for warning in (*plan.warnings, *sources.without_tokenizer(plan.checkpoint)):
            progress.say(f"Warning: {warning}")
        if config.dry_run:  # its plan may be for another machine
            with progress.warned_of(OSError):
                sources.check_disk()
        twin = preflight(plan, progress)
    return Prepared(plan, twin, sources)


def _say_sources(sources: Sources, progress: Progress) -> None:
    for line in () if sources.config.dry_run else sources.lines():
        progress.say(line)


def settled(config: ExportConfig) -> ExportConfig:
    """Return the flags with the output folder filled in. Raises ValueError or OSError for names, numbers, paths or
    folders that cannot be used."""
    check_names(config)
    check_flags(config)
    check_typed(config)
    config = with_output(config)
    check_output(config.folder, config.overwrite)
    config = with_arch(config)  # looking for a GPU imports torch
    if not config.dry_run:
        refuse_a_second(config.folder)
    return config


def with_arch(config: ExportConfig) -> ExportConfig:
    """Return the flags with every known architecture, if the backend needs one, none is given, and this machine has no
    GPU to take it from."""
    backend = BACKENDS[config.backend]
    if backend.gpu is None or config.cuda_arch is not None or backend.local_arch() is not None:
        return config
    return replace(config, cuda_arch=",".join(archs_of(ALL)))


def with_output(config: ExportConfig) -> ExportConfig:
    """Return the flags with an output folder; the default is named after target, backend and architecture."""
    if config.output_dir is not None:
        return config
    name = output_name(config.target_model, config.checkpoint, config.backend, config.cuda_arch)
    return replace(config, output_dir=name)


def output_name(target: str, checkpoint: Path | None, backend: str, cuda_arch: str | None) -> Path:
    """Return TARGET-BACKEND-ARCHITECTURE, a folder in the working folder. For ``auto`` it begins with the checkpoint's
    own name. Several architectures have dashes between them; every one that is known is "all"."""
    if cuda_arch is None:
        cuda_arch = BACKENDS[backend].local_arch() or (ALL if BACKENDS[backend].gpu else None)
    elif archs_of(cuda_arch) == archs_of(ALL):
        cuda_arch = ALL
    else:
        cuda_arch = cuda_arch.replace(",", "-")
    if target == "auto" and checkpoint is not None:
        target = own_name(checkpoint)
    return Path("-".join(filter(None, (target, backend, cuda_arch))))


def own_name(checkpoint: Path) -> str:
    """Return a checkpoint's name: of a folder, of a GGUF file without its suffix, or of a repository on the hub without
    its owner."""
    name = None if os.path.exists(checkpoint) else hub_name(str(checkpoint))
    if name is not None and name.file is None:
        return name.repository.partition("/")[2]
    path = checkpoint.resolve() if name is None or name.file is None else Path(name.file)
    return path.stem if path.suffix.lower() == ".gguf" else path.name


def check_names(config: ExportConfig) -> None:
    """Raise ValueError for an unknown target or backend, and for ``layers`` without random weights."""
    if config.layers is not None and not config.random_weights:
        raise ValueError(f"--layers {config.layers} needs --random-weights: type both, or leave --layers out")
    known: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
        ("target_model", config.target_model, TARGETS),
        ("backend", config.backend, BACKENDS),
    )
    for field, name, entries in known:
        if name not in entries:
            raise ValueError(f"{field} {name!r} is unknown: there are {', '.join(entries)}")
