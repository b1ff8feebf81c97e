"""DFlash heads for tests: golden heads, random heads for a random target, and changed copies."""

import json
import shutil
from pathlib import Path

import torch
from places import TESTS
from random_checkpoints import random_model, save_random_dflash
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from eagle3.export.configuration.config import ExportConfig
from eagle3.export.planning.plan import make_plan

GOLDEN = TESTS / "golden" / "dflash"
TARGET = LlamaConfig(hidden_size=64, vocab_size=96, num_hidden_layers=6)
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7, "use_sliding_window": True}
WINDOW = {"layer": SLIDING | {"sliding_window": 6}}
KINDS = {
    "full": {},
    "causal": WINDOW | {"sample_from_anchor": True},
    "window": WINDOW | {"sliding_window_non_causal": True, "draft_vocab": 96},
}


def random_target():
    return random_model("llama3.1-8B", num_hidden_layers=3)


def save_pair(folder: Path) -> Path:
    """Write ``random_target`` and, for it, a head of each of ``KINDS``."""
    target = random_target()
    target.save_pretrained(folder / "target")
    for name, keys in KINDS.items():
        save_random_dflash(folder / name, target.config, (0, 2, 3), **keys)
    return folder


def plan_of(folder: Path, kind: str, **flags):
    given = {"checkpoint": folder / "target", "draft": folder / kind, "max_seq_len": 128, "max_prefill": 16}
    arch = None if torch.cuda.is_available() else "sm_90"
    return make_plan(ExportConfig("llama3.1-8B", **{"output_dir": None, "cuda_arch": arch} | given | flags))


def z_lab(folder: Path, source: Path = GOLDEN / "dflash_full", own=None, **keys) -> Path:
    """Write the head in ``source`` in z-lab's form: with a flat configuration, without a vocabulary map, and with tap
    ids that mean outputs."""
    config = json.loads((source / "config.json").read_text())
    flat = config["transformer_layer_config"] | {"architectures": ["DFlashDraftModel"]}
    given = {"target_layer_ids": [0, 2, 3], "mask_token_id": config["mask_token_id"]}
    flat |= {"block_size": config["block_size"], "dflash_config": given | (own or {})} | keys
    tensors = load_file(source / "model.safetensors")
    for name in ("lm_head.weight", "d2t", "t2d"):
        tensors.pop(name, None)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(flat))
    save_file(tensors, folder / "model.safetensors")
    return folder


def changed(source: Path, into: Path, keys=None, tensors=None, layer=None) -> Path:
    """Write a copy of a head with changed keys and changed tensors (None removes one), and return its folder."""
    shutil.copytree(source, into)
    config = json.loads((into / "config.json").read_text()) | (keys or {})
    if layer:
        config["transformer_layer_config"] |= layer
    (into / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    held = load_file(into / "model.safetensors") | (tensors or {})
    save_file({name: value for name, value in held.items() if value is not None}, into / "model.safetensors")
    return into
