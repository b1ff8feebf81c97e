"""Packs a CUDA artifact into a small file, which is copied to a machine with a GPU to time the artifact there.

    python scripts/gpu/gpu_carry.py pack out out.tar.xz      # code, metadata, and the first bytes of each weight
    python scripts/gpu/gpu_carry.py unpack out.tar.xz out    # there: fills each weight with its first bytes
    ... gpu_run.py A with FOLDER/wide/tiles.tar.xz

Gemma 4 31B is packed into 6 MB. A step takes as long as with the true weights, except with experts, because a window
reads only the experts that its rows choose. The tokens are meaningless. An artifact of less than 200 MB is refused when
it is opened, because its files are then compared with their checksums.
"""

import io
import json
import lzma
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from eagle3.runner.artifact.cuda_weights import WEIGHTS_FILE, Extent, read_ptd_index
from eagle3.runner.contract import EXPORT_RECORD

SAMPLE = 4096
"""The number of bytes kept of a weight: whole blocks of every format that the export writes, but of records."""
RECORD = 4736
"""The bytes of a record of INT4 weights, one of which is kept of a weight that may consist of them."""
WRITTEN = 1 << 22
"""Bytes written at a time."""
INDEX, SAMPLES = "weights.index", "weights.samples"


@click.group(help=__doc__.replace("\n\n    ", "\n\n\b\n    "))
def main() -> None:
    pass


@main.command()
@click.argument("artifact", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("packed", type=click.Path(path_type=Path, dir_okay=False))
def pack(artifact: Path, packed: Path) -> None:
    """Pack ARTIFACT's files into the tar file PACKED; for the weights it has their index and a sample of each."""
    weights = artifact / WEIGHTS_FILE
    if not weights.is_file():
        raise click.ClickException(f"{artifact} has no {WEIGHTS_FILE}: it is no CUDA artifact")
    if not packed.parent.is_dir():
        raise click.ClickException(f"there is no folder {packed.parent}")
    places, samples = places_of(weights), []
    with weights.open("rb") as file, tarfile.open(packed, "w:xz") as tar:
        head = file.read(places[0].offset)
        for place in places:
            file.seek(place.offset)
            samples.append(file.read(kept_of(place)))
        for name, data in ((INDEX, head), (SAMPLES, b"".join(samples))):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
        for path in sorted(artifact.iterdir()):
            if path.name != WEIGHTS_FILE and path.resolve() != packed.resolve():
                tar.add(path, path.name)
    click.echo(f"{packed}: {packed.stat().st_size:,} bytes; the weights are {weights.stat().st_size:,}")


@main.command()
@click.argument("packed", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option(
    "--like", "others", type=click.Path(path_type=Path, exists=True, file_okay=False), multiple=True,
    help="Another artifact that was unpacked; may be repeated. If the weights of both were one and the same, its file "
    "is linked and not written again.",
)  # fmt: skip
def unpack(packed: Path, artifact: Path, others: tuple[Path, ...]) -> None:
    """Write the folder ARTIFACT from PACKED, each weight filled with its sample."""
    try:
        unpack_artifact(packed, artifact, others)
    except ValueError as error:
        raise click.ClickException(str(error)) from error


def unpack_artifact(packed: Path, artifact: Path, others: Sequence[Path] = ()) -> None:
    """Write the folder ``artifact``, whole or not at all. An empty one in its place is replaced. Raises ValueError if
    it has contents, or if ``packed`` is not what ``pack`` wrote."""
    if artifact.is_dir() and any(artifact.iterdir()):
        raise ValueError(f"{artifact} is there already")
    artifact.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=artifact.parent) as folder:
        whole = Path(folder) / "artifact"
        try:
            with tarfile.open(packed) as tar:
                tar.extractall(whole, filter="data")
            fill(whole, others)
        except (tarfile.TarError, lzma.LZMAError, EOFError, OSError, KeyError, ValueError) as error:
            raise ValueError(f"{packed} is not what pack wrote: {error}") from error
        whole.rename(artifact)


def is_whole(artifact: Path) -> bool:
    """Return True if the folder has all files of the export, in their sizes."""
    if not (artifact / EXPORT_RECORD).is_file():
        return False
    files = json.loads((artifact / EXPORT_RECORD).read_text())["files"]
    return all((file := artifact / name).is_file() and file.stat().st_size == of["bytes"] for name, of in files.items())


def fill(artifact: Path, others: Sequence[Path] = ()) -> None:
    """Make the file of the weights from the index and the samples that were unpacked, or link that of one of
    ``others`` with the same weights."""
    weights, samples, recorded = artifact / WEIGHTS_FILE, artifact / SAMPLES, weights_of(artifact)
    for other in others:
        if weights_of(other) == recorded:
            weights.hardlink_to(other / WEIGHTS_FILE)
            (artifact / INDEX).unlink()
            samples.unlink()
            return
    (artifact / INDEX).rename(weights)
    size = recorded["bytes"]
    with weights.open("r+b") as file, samples.open("rb") as kept:
        file.truncate(size)
        for place in places_of(weights):
            file.seek(place.offset)
            sample = kept.read(kept_of(place))
            several = sample * (WRITTEN // max(len(sample), 1))
            for start in range(0, place.size, len(several) or 1):
                file.write(several[: place.size - start])
    samples.unlink()


def weights_of(artifact: Path) -> dict[str, Any]:
    """Return the size and the checksum of an artifact's weights, as the export recorded them."""
    return json.loads((artifact / EXPORT_RECORD).read_text())["files"][WEIGHTS_FILE]


def kept_of(place: Extent) -> int:
    """Return the number of bytes that are kept of a weight."""
    return min(place.size, SAMPLE if place.size % RECORD else RECORD)


def places_of(weights: Path) -> list[Extent]:
    """Return the places of the weights in a ``.ptd``, in the order of the file."""
    return sorted(set(read_ptd_index(weights).values()), key=lambda place: place.offset)


if __name__ == "__main__":
    main()
