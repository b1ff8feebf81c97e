"""The variants of the block family. Each has a file with the lower-case name of its kind: its keys with their defaults,
the names of its tensors, and the module after the block. ``KINDS`` here says how each is listed and
recognized."""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eagle3.export.draft.common.kind import Kind

if TYPE_CHECKING:
    from eagle3.export.draft.kinds.dflash.block.variant import Variant

DFLASH, DFLASH2, DSPARK, XPRESS, DOMINO = "DFlash", "DFlash2", "DSpark", "xPress", "Domino"
_PARTS = "eagle3.export.draft.kinds.dflash.parts"


@dataclass(frozen=True)
class Member(Kind):
    """The entry of a variant."""

    projector_type: str | None = None
    """The value of ``projector_type`` that names the variant in z-lab's dialect."""


KINDS: dict[str, Member] = {
    DFLASH: Member(
        "hidden states of several target layers (taps); a KV cache of its own; a block of proposals in one step",
        _PARTS,
        published=(
            "RedHatAI/gemma-4-31B-it-speculator.dflash",
            "z-lab/gemma-4-31B-it-DFlash",
            "z-lab/gemma-4-26B-A4B-it-DFlash",
            "z-lab/gpt-oss-20b-DFlash",
            "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
            "z-lab/Qwen3-4B-DFlash-b16",
            "z-lab/Qwen3-8B-DFlash-b16",
            "z-lab/Qwen3.5-9B-DFlash",
            "z-lab/Qwen3.5-27B-DFlash",
            "z-lab/Qwen3.5-35B-A3B-DFlash",
            "z-lab/Qwen3.6-27B-DFlash",
            "z-lab/Qwen3.6-35B-A3B-DFlash",
            "deepseek-ai/dflash_qwen3_4b_block7",
            "deepseek-ai/dflash_qwen3_8b_block7",
            "deepseek-ai/dflash_gemma4_12b_block7",
            "meta-models/Muse-Glimmer-30B-assistant",
            "JetSpec/jetspec-qwen3-8b",
            "JetSpec/jetspec-qwen3-30b-a3b",
            "JetSpec/jetspec-gemma4-26B-A4B0-it",
            "JetSpec/jetspec-gpt-oss-20b",
        ),
        speculators_type="dflash",
        projector_type="dflash",
        architectures="^(Qwen3?)?DFlash(Speculator|DraftModel)$|^MuseGlimmerAssistantModel$",
    ),
    DFLASH2: Member(
        "as DFlash, with convolutions and a choice among the best tokens",
        _PARTS,
        published=("z-lab/Qwen3.8-27B-DFlash2",),
        speculators_type="dflash2",
        projector_type="dflash2",
        architectures="^DFlash2",
    ),
    DSPARK: Member(
        "as DFlash, with a bias by the previous token",
        _PARTS,
        published=(
            "RedHatAI/gemma-4-31B-it-speculator.dspark",
            "deepseek-ai/dspark_qwen3_4b_block7",
            "deepseek-ai/dspark_qwen3_8b_block7",
            "deepseek-ai/dspark_gemma4_12b_block7",
            "mgoin/Qwen3-8B-speculator.dspark",
            "makora-ai/gemma4-26b-a4b-dspark",
            "Dogacel/Qwen3-8B-DSpark",
        ),
        speculators_type="dspark",
        projector_type="dspark",
        architectures="^DSpark(Speculator|DraftModel)$|^(Qwen3|Gemma4)DSparkModel$",
    ),
    XPRESS: Member(
        "as DFlash, with a bias by the previous token, refined in parallel passes",
        _PARTS,
        speculators_type="xpress",
        architectures="^XPress",
    ),
    DOMINO: Member(
        "as DFlash, with a bias by a GRU over the block's tokens",
        _PARTS,
        published=(
            "Huang2020/Qwen3-4B-Domino-b16",
            "Huang2020/Qwen3-8B-Domino-b16",
            "orestis-z/dflash-qwen3-8b-120k-domino",
        ),
        architectures="^Domino(Speculator|DraftModel)",
        projector_type="domino",
    ),
}


def variant_of(kind: str) -> "type[Variant]":
    """Return the variant of a kind of ``KINDS``."""
    return importlib.import_module(f"{__name__}.{kind.lower()}").VARIANT


def every_variant() -> "list[type[Variant]]":
    """Return all variants, in the order of ``KINDS``."""
    return [variant_of(kind) for kind in KINDS]
