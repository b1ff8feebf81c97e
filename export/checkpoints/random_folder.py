"""Makes a checkpoint with random weights from another checkpoint's headers; only headers are written to the disk."""

import json
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

from eagle3.export.checkpoints.safetensors_file import open_safetensors, save_header
from eagle3.export.checkpoints.safetensors_folder import INDEX_FILE, SINGLE_FILE, SafetensorsFolder, shard_paths

LAYER = re.compile(r"^((?:.+?\.)?(?:layers|h|blocks)\.)(\d+)(\..+)$")
"""The pattern of the name of a layer's tensor: the part before the layer's index, the index, and the rest."""
READ = ("d2t", "t2d", "weight_shape", "g_idx", "qzeros")
"""The last parts of the names of small tensors that describe other tensors; they are copied instead of made random.
GPTQ's ``qzeros`` must agree with ``sym`` in config.json."""

PACKED = {"embed_tokens_per_layer.weight": 1, "per_layer_model_projection.weight": 0}
"""Tensors of Gemma 4 E2B and E4B that hold a part for each layer: the end of the name, and the dimension along which
the parts lie."""


def random_folder(folder: Path, into: Path, layers: Sequence[int] | None = None, count: int = 0) -> Path:
    """Make ``into`` a checkpoint like that in ``folder``, with random weights, and return it.

    Files other than weights are links to those of ``folder``. With ``layers`` (ascending indices) the new checkpoint
    has only these layers, and the caller must write its config.json. ``count`` is the number of all layers; tensors
    that are ``PACKED`` need it.

    Raises FileNotFoundError or ValueError for a folder that holds no weights in safetensors.
    """
    if not SafetensorsFolder.recognizes(folder):
        raise ValueError(
            f"--random-weights takes the shapes of weights in safetensors, and {folder} has no {SINGLE_FILE} and no "
            f"{INDEX_FILE}: name a checkpoint that has one"
        )
    into.mkdir(parents=True)
    weights, rename = shard_paths(folder), _renaming(layers)
    share = Fraction(len(layers), count) if layers is not None and count else Fraction(1)
    for file in folder.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name != INDEX_FILE:
            (into / file.name).symlink_to(file.resolve())
    shards: dict[str, str] = {}
    for path in weights:
        shards |= dict.fromkeys(_save_random(path, into / path.name, rename, share), path.name)
    if (folder / INDEX_FILE).is_file():
        (into / INDEX_FILE).write_text(json.dumps({"weight_map": shards}))
    return into


def _renaming(layers: Sequence[int] | None) -> Callable[[str], str | None]:
    """Return a function that maps a tensor's name to its name in the model with fewer layers, and to None if its layer
    is left out."""
    places = None if layers is None else {index: place for place, index in enumerate(layers)}

    def rename(name: str) -> str | None:
        found = LAYER.match(name)
        if found is None or places is None:
            return name
        place = places.get(int(found[2]))
        return None if place is None else f"{found[1]}{place}{found[3]}"

    return rename


def _shape(name: str, shape: list[int], share: Fraction) -> list[int]:
    """Return a tensor's shape in a model that keeps this ``share`` of its layers."""
    dim = next((dim for end, dim in PACKED.items() if name.endswith(end)), None)
    return shape if dim is None else [*shape[:dim], int(shape[dim] * share), *shape[dim + 1 :]]


def _save_random(path: Path, random: Path, rename: Callable[[str], str | None], share: Fraction) -> list[str]:
    """Write the header file ``random`` for the file ``path``, and return the names of its tensors."""
    with open_safetensors(path) as file:
        names = {name: new for name in file.keys() if (new := rename(name)) is not None}  # noqa: SIM118 (not a dict)
        slices = {new: file.get_slice(name) for name, new in names.items()}
        tensors = {
            name: (_shape(name, list(piece.get_shape()), share), piece.get_dtype()) for name, piece in slices.items()
        }
        values = {new: file.get_tensor(name) for name, new in names.items() if name.rpartition(".")[2] in READ}
        metadata = dict(file.metadata() or {})
    # torchao's list of names, each with an entry in the metadata
    described = json.loads(metadata.get("tensor_names", "[]"))
    kept = {name: new for name in described if (new := rename(name)) is not None}
    entries = {new: metadata[name] for name, new in kept.items()}
    others = {name: value for name, value in metadata.items() if name not in described}
    if described:
        others["tensor_names"] = json.dumps(list(entries))
    save_header(random, tensors, others | entries, values, random=True)
    return list(tensors)
