"""The registry of the kinds of draft heads: their names, and how each is listed and recognized. It imports no kind, so
that ``--help`` is quick.

The folder of a kind has ``reading.py`` with ``read``, ``check_pair`` and ``FIELDS``, the fields that may be read in
more than one way (``--read``), and ``head.py`` with the module ``Head``. The kinds of a folder share them.
"""

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EAGLE, EAGLE3, P_EAGLE = "EAGLE", "EAGLE-3", "P-EAGLE"
"""EAGLE (1, 2, HASS) fuses a token's embedding and the target's final state in its fc. EAGLE-3 fuses taps in its fc,
and embedding and feature in its first layer's attention. P-EAGLE is an EAGLE-3 head whose later proposals come from
mask tokens in the same forward."""
GEMMA4_ASSISTANT, MLP_SPECULATOR, MTP = "Gemma 4 assistant", "MLP speculator", "MTP"
DFLASH, DFLASH2, DSPARK, XPRESS, DOMINO = "DFlash", "DFlash2", "DSpark", "xPress", "Domino"
DIALECTS = ("speculators", "deepspec", "modelopt", "nemo", "specforge", "sglang", "angelslim", "safeailab")
"""The dialects of EAGLE heads, functions of ``eagle/dialects.py``. The first that recognizes a head reads it;
``safeailab``, the last, takes any with an ``fc``."""


@dataclass(frozen=True)
class Kind:
    """The entry of a kind."""

    takes: str
    """The target's states that heads of this kind take, and the state that they keep: a line for ``--list-drafts``."""
    folder: str
    published: tuple[str, ...] = ()
    """Heads of this kind on the Hugging Face hub."""
    model_types: tuple[str, ...] = ()
    speculators_type: str = ""
    """The ``speculators_model_type`` of a head that speculators trained."""
    architectures: str = ""
    """A pattern of the names in ``architectures``."""
    projector_type: str = ""
    """The value of ``projector_type`` that names a variant of DFlash in z-lab's dialect."""

    def recognizes(self, config: Mapping[str, Any]) -> bool:
        if config.get("speculators_model_type") is not None:
            return config["speculators_model_type"] == self.speculators_type
        named = config.get("architectures") or []
        by_name = bool(self.architectures) and any(re.search(self.architectures, each) for each in named)
        return by_name or config.get("model_type") in self.model_types

    def load(self) -> Any:  # noqa: ANN401 - a module
        """Return the module ``reading`` of the kind's folder."""
        return importlib.import_module(f"{__name__}.{self.folder}.reading")

    def head(self) -> Any:  # noqa: ANN401 - a class
        """Return the class of the kind's module."""
        return importlib.import_module(f"{__name__}.{self.folder}.head").Head


KINDS: dict[str, Kind] = {
    EAGLE3: Kind(
        "hidden states of several target layers (taps); a KV cache of its own; a step for each proposal", "eagle"
    ),
    P_EAGLE: Kind(
        "hidden states of several target layers (taps); a KV cache of its own; all proposals in one step",
        "eagle",
        published=("RedHatAI/Qwen3-8B-speculator.peagle",),
    ),
    EAGLE: Kind(
        "the target's final state; a KV cache of its own; a step for each proposal",
        "eagle",
        published=("yuhuili/EAGLE-LLaMA3.1-Instruct-8B",),
    ),
    GEMMA4_ASSISTANT: Kind(
        "the target's final state and KV caches; no cache; a step for each proposal",
        "gemma4_assistant",
        published=tuple(f"google/gemma-4-{size}-it-assistant" for size in ("31B", "E2B", "E4B", "26B-A4B")),
        model_types=("gemma4_assistant", "gemma4_unified_assistant"),
        architectures="^Gemma4(Unified)?Assistant",
    ),
    MLP_SPECULATOR: Kind(
        "the target's final state; no cache; all proposals in one step",
        "mlp_speculator",
        published=("ibm-ai-platform/llama3-8b-accelerator",),
        model_types=("mlp_speculator",),
        architectures="MLPSpeculator",
    ),
    DFLASH: Kind(
        "hidden states of several target layers (taps); a KV cache of its own; a block of proposals in one step",
        "dflash",
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
    DFLASH2: Kind(
        "as DFlash, with convolutions and a choice among the best tokens",
        "dflash",
        published=("z-lab/Qwen3.8-27B-DFlash2",),
        speculators_type="dflash2",
        projector_type="dflash2",
        architectures="^DFlash2",
    ),
    DSPARK: Kind(
        "as DFlash, with a bias by the previous token",
        "dflash",
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
    XPRESS: Kind(
        "as DFlash, with a bias by the previous token, refined in parallel passes",
        "dflash",
        speculators_type="xpress",
        architectures="^XPress",
    ),
    DOMINO: Kind(
        "as DFlash, with a bias by a GRU over the block's tokens",
        "dflash",
        published=(
            "Huang2020/Qwen3-4B-Domino-b16",
            "Huang2020/Qwen3-8B-Domino-b16",
            "orestis-z/dflash-qwen3-8b-120k-domino",
        ),
        architectures="^Domino(Speculator|DraftModel)",
        projector_type="domino",
    ),
    MTP: Kind(
        "the target's last state; a KV cache of its own; a step for each proposal. --draft mtp: the target's own layer",
        "mtp",
        published=("zai-org/GLM-4.5", "zai-org/GLM-4.7-Flash", "deepseek-ai/DeepSeek-V3"),
        speculators_type="mtp",
        architectures="^MTPDraftModel",
    ),
}


def kind_of(config: Mapping[str, Any]) -> str | None:
    """Return the kind that a ``config.json`` names. None means that a head's tensors show its kind, as those of EAGLE
    heads do."""
    return next((name for name, kind in KINDS.items() if kind.recognizes(config)), None)
