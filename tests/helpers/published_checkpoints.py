"""Gemma 4 31B and its head as published, on a stand-in for the hub; golden checkpoints by quantizer."""

import json
import struct
from pathlib import Path

import torch
from places import TESTS
from published import PublishedHead, gemma4_config

from eagle3.targets import gemma4

GOLDEN = TESTS / "golden" / "quantized"


SHARD = 5e9
"""The bytes of a shard, as in the checkpoints that transformers saves."""


def save_sparse(path: Path, shapes: dict[str, tuple[tuple[int, ...], str, int]], values=None) -> None:
    """Write a sparse safetensors file. ``shapes`` maps names to (shape, dtype, bytes of an element). The data takes no
    disk space, except for the tensors in ``values``, which maps names to bytes."""
    header, end = {}, 0
    for name, (shape, dtype, size) in shapes.items():
        begin, end = end, end + size * int(torch.Size(shape).numel())
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
        for name, data in (values or {}).items():
            file.seek(8 + len(text) + header[name]["data_offsets"][0])
            file.write(data)


def save_gemma4_31b(folder: Path) -> int:
    """Save Gemma 4 31B as published, in bfloat16 and without its vision tower. Returns the number of bytes of its
    weights."""
    folder.mkdir()
    config = gemma4_config(60)
    config.save_pretrained(folder)
    shards, total = [{}], 0
    for name, value in gemma4.skeleton(config, max_seq_len=1024).model.state_dict().items():
        if name == "lm_head.weight":  # a tied lm_head is not stored
            continue
        if total + 2 * value.numel() > SHARD * len(shards):
            shards.append({})
        total += 2 * value.numel()
        shards[-1][f"model.{name}"] = tuple(value.shape), "BF16", 2
    weight_map = {}
    for number, shapes in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_sparse(folder / file, shapes)
        weight_map |= dict.fromkeys(shapes, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


def save_head(folder: Path, head: PublishedHead) -> int:
    """Save a head in bfloat16, with the map of its vocabulary. Returns the size of its file in bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(head.fields))
    shapes = {name: (shape, "BF16", 2) for name, shape in head.shapes.items()}
    sizes = {torch.int64: ("I64", 8), torch.bool: ("BOOL", 1)}
    shapes |= {name: (tuple(value.shape), *sizes[value.dtype]) for name, value in head.vocabulary.items()}
    file = folder / "model.safetensors"
    save_sparse(file, shapes, {name: value.numpy().tobytes() for name, value in head.vocabulary.items()})
    return file.stat().st_size


def packed(method: str) -> list[str]:
    return sorted(f"{method}/{folder.name}" for folder in (GOLDEN / method).iterdir())
