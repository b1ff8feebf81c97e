"""Replaces the checkpoints of an export by checkpoints with random weights, of which only headers are on the disk."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from eagle3.export.checkpoints.random_folder import random_folder
from eagle3.export.checkpoints.target_config import read_target_config
from eagle3.export.configuration.config import NO_HEAD, ExportConfig
from eagle3.export.draft.kinds.eagle.rope_reading import RopeFlags
from eagle3.export.draft.reading import read_draft
from eagle3.export.hub.sources import named_as_typed
from eagle3.export.planning.paths import draft_folder, target_paths, uses_own_layer
from eagle3.export.planning.taps import spread_taps
from eagle3.export.twin.layers import fewer_layers
from eagle3.export.twin.shrink import common_fields, from_common_fields
from eagle3.targets import TARGETS
from eagle3.targets.text_part import whole_config


@contextmanager
def random_weights(config: ExportConfig) -> Iterator[ExportConfig]:
    """Yield the flags with random checkpoints of the same shapes, and with ``config.layers`` layers if that is set. The
    checkpoints are removed at the end. If a draft head taps layers of a deeper target, its taps are spread over the
    layers that remain.

    Raises ValueError or FileNotFoundError if a checkpoint's shapes cannot be read, or if some kind of layer would be
    missing.
    """
    checkpoint, _ = target_paths(config, TARGETS[config.target_model])
    own = uses_own_layer(config)
    draft = None if own or config.draft == Path(NO_HEAD) else draft_folder(config)
    with TemporaryDirectory(prefix="eagle3-random-") as folder, named_as_typed(folder):
        target, head = _within(Path(folder, "target"), checkpoint), config.draft
        if draft is not None:
            random_folder(draft, head := _within(Path(folder, "draft"), draft))
        if config.layers is None:
            taps = config.aux_layers
            random_folder(checkpoint, target)
        else:
            taps = config.aux_layers
            if draft is not None and not taps:
                rope = RopeFlags(config.draft_rope_theta, config.draft_partial_rotary, config.publisher)
                taps = spread_taps(read_draft(draft, config.draft_dialect, rope=rope), config.layers)
            _save_fewer_layers(checkpoint, config, target, own)
        yield replace(config, checkpoint=target, draft=head, aux_layers=taps)


def _save_fewer_layers(checkpoint: Path, config: ExportConfig, into: Path, own: bool) -> None:
    """Write a random checkpoint with ``config.layers`` layers. If ``own`` is True, it also keeps
    the MTP layer after the last layer."""
    assert config.layers is not None
    whole = read_target_config(checkpoint, config.target_model)
    fewer, layers = fewer_layers(common_fields(whole), partial(from_common_fields, whole), config.layers)
    behind = [whole.num_hidden_layers] if own else []
    random_folder(checkpoint, into, [*layers, *behind], whole.num_hidden_layers)
    (into / "config.json").unlink()
    whole_config(fewer).save_pretrained(into)


def _within(folder: Path, of: Path) -> Path:
    """Return a path in ``folder`` that ends with the last two parts of ``of``; messages and the manifest name a
    checkpoint by them."""
    return folder.joinpath(*of.resolve().parts[-2:])
