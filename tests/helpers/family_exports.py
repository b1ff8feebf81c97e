"""Exports a random model of each kind with a random draft of each kind to the CPU, into a given folder. This takes
minutes of one core, while tests that do not need the exports run (``beforehand.py``)."""

import shutil
import sys
from pathlib import Path

import torch
from dflash_heads import GOLDEN as DFLASH
from dialect_files import IDS, PEAGLE, random_eagle, random_peagle, write
from family_configs import family_config
from mtp_heads import own_model, save_target
from random_checkpoints import (
    random_model,
    save_random_assistant,
    save_random_dflash,
    save_random_domino,
    save_random_draft,
    save_random_mlp,
    save_random_xpress,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from eagle3.export import ExportConfig, export
from eagle3.export.lowering.xnnpack import full_attention
from eagle3.export.planning.plan import Plan, make_plan
from eagle3.export.speculator import state
from eagle3.export.twin.randomize import randomize
from eagle3.targets import spec


def taps(config) -> tuple[int, ...]:
    return 0, config.num_hidden_layers - 1, config.num_hidden_layers


MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "use_sliding_window": True}
DRAFTS = {
    "gemma4-31B": lambda folder, config: save_random_draft(folder, config, taps(config)),
    "gemma4-E2B": lambda folder, config: save_random_mlp(folder, config),
    "llama3.1-8B": lambda folder, config: write(folder, "safeailab", random_eagle(), True, draft_vocab_size=None),
    "qwen3-4B": lambda folder, config: write(folder, "speculators", random_peagle(), **PEAGLE, **{IDS: [0, 2, 3]}),
    "auto": lambda folder, config: save_random_draft(folder, config, taps(config), window=12),
    "gpt-oss-20b": lambda folder, config: save_random_xpress(folder, config, taps(config), layer=MIXED),
    "llama4-maverick": lambda folder, config: save_random_domino(folder, config, taps(config), layer=MIXED),
    "assistant": lambda folder, config: save_random_assistant(folder, config, ordered=True),
    "dflash": lambda folder, config: save_random_dflash(folder, config, taps(config), layer=MIXED),
    "dflash2": lambda folder, config: shutil.copytree(DFLASH / "dflash2", folder),
    "dspark": lambda folder, config: shutil.copytree(DFLASH / "dspark_rnn", folder),
    "qwen3.5-9B": lambda folder, config: save_target(folder.parent / "target", config.model_type),
    "lfm2": lambda folder, config: save_random_draft(folder, config, taps(config)),
    "falcon_h1": lambda folder, config: save_random_draft(folder, config, taps(config)),
}
"""An EAGLE-3, an MLP speculator for a target with per-layer inputs and shared keys, an EAGLE that shares the target's
embedding and lm_head, a P-EAGLE, an EAGLE-3 with a window; an xPress for a target with sinks and experts with biases, a
Domino for one with chunks, rotations on complex numbers and experts in some of the layers; an assistant with centroids,
a DFlash2 and a DSpark with an rnn bias for ``TARGET_OF`` each; targets with recurrent layers, one for a DFlash and one
with an MTP layer of its own; others with short convolutions, and with attention and Mamba 2 in each layer."""
FOR_LLAMA = ("dflash2", "dspark")
TARGET_OF = {"assistant": "gemma4-31B", **dict.fromkeys(FOR_LLAMA, "llama3.1-8B")}
TARGET_OF |= dict.fromkeys(("lfm2", "falcon_h1"), "auto")
TARGET_OF |= {"dflash": "qwen3.5-4B"}  # z-lab publishes DFlash heads for targets with recurrent layers
TAPPED = {"dflash": 3, "dflash2": 4, "dspark": 4}
"""Heads whose target has as many layers as they tap."""
OWN_LAYER = {"qwen3.5-9B": "qwen3_5_text"}
"""Targets whose own checkpoint has the head, and their model types."""
EXPERTS = ("gpt-oss-20b", "llama4-maverick")
WITH_FORWARD = ("gemma4-31B", "llama4-maverick")
"""Rings and a softcap; chunks, complex rotations and experts."""
STACKED = {"num_attention_heads": 8}
"""Four query heads for each head of keys, two of which become rows of one on the CPU."""
WITHOUT_LOGITS = ("auto",)
"""Without logits and sessions, the first format."""
WITH_SPECULATE = ("llama3.1-8B", "qwen3-4B", "gemma4-E2B", *EXPERTS, *TARGET_OF, *OWN_LAYER)
"""Every kind of head but an EAGLE-3."""


def family_model(name: str):
    """Return a transformers model. ``auto`` is a family without an entry in a table: it has norms after attention and
    MLP, and sliding and full layers."""
    if name in OWN_LAYER:
        return own_model(OWN_LAYER[name])
    if name == "dflash":
        return own_model("qwen3_5_text")
    if name == "lfm2":
        return random_family(name, ["conv", "full_attention", "conv"])
    if name == "falcon_h1":
        return random_family(name)
    if name in TAPPED:
        return random_model(TARGET_OF[name], num_hidden_layers=TAPPED[name])
    if name == "gemma4-E2B":  # a layer of each kind, and one of each that shares its keys
        return random_model(name, num_hidden_layers=4, **STACKED)
    if name == "qwen3-4B":
        return random_model(name, num_hidden_layers=3, **STACKED)
    if name in TARGET_OF:
        return random_model(TARGET_OF[name])  # all six layers, since only the last has full attention
    if name != "auto":
        return random_model(name, num_hidden_layers=2 if name in EXPERTS else 3)
    return random_family("olmo3", ["sliding_attention", "full_attention", "sliding_attention"])


def random_family(family: str, kinds: list[str] | None = None):
    """Return a transformers model of ``family``, with layers of these kinds if they are given."""
    config = family_config(family)
    if kinds:
        config.num_hidden_layers, config.layer_types = len(kinds), kinds
        if getattr(config, "mlp_layer_types", None):
            config.mlp_layer_types = config.mlp_layer_types[: len(kinds)]
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    randomize(model, seed=5)
    return model


def character_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per character, for the 96 ids of a random model."""
    characters = [*"ĉĊčĠ", *map(chr, range(ord("!"), ord("}")))]
    tokenizer = Tokenizer(models.BPE({character: id_ for id_, character in enumerate(characters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def export_config(name: str, folder: Path) -> ExportConfig:
    """Return the flags of the export of ``name`` from ``folder``'s target and draft to its ``out``."""
    draft = Path("mtp") if name in OWN_LAYER else folder / "draft"
    paths = {"checkpoint": folder / "target", "draft": draft, "output_dir": folder / "out"}
    chunk = {"auto": 12, "dflash": 24, **dict.fromkeys(("qwen3.5-9B", "falcon_h1"), 40)}.get(name, 16)
    lengths = {"chain_len": 2, "max_seq_len": 128, "max_prefill": chunk}
    outputs = {"with_forward": name in WITH_FORWARD, "logits": name not in WITHOUT_LOGITS}
    outputs |= {"speculate": name in WITH_SPECULATE, "sessions": name not in WITHOUT_LOGITS}
    target = TARGET_OF.get(name, name)
    return ExportConfig(target, **paths, **lengths, **outputs, backend="xnnpack", draft_qlinear="none")


def family_plan(name: str, folder: Path) -> Plan:
    return make_plan(export_config(name, folder))


def main(output: Path) -> None:
    torch.set_num_threads(1)
    full_attention.LEAST_BYTES, full_attention.STEP = 0, 16  # so that they use the operators of large caches
    state.PIECE_BYTES = 1  # so that a state has several pieces
    spec.CONVOLUTION_WINDOW = 16  # so that they use the operators of long contexts
    for name, save_draft in DRAFTS.items():
        model, folder = family_model(name), output / name
        model.save_pretrained(folder / "target")
        save_draft(folder / "draft", model.config)
        if name in WITH_FORWARD:
            character_tokenizer().save(str(folder / "target" / "tokenizer.json"))
        export(export_config(name, folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
