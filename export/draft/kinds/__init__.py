"""The kinds of draft heads, an entry each. Adding one is a module and an entry: the module says how a checkpoint is
read, what is computed, which targets it fits and what it is compared with (``kind.py``)."""

from eagle3.export.draft.dialects.dialect import EAGLE, EAGLE3, P_EAGLE
from eagle3.export.draft.kinds.kind import Kind, KindModule

GEMMA4_ASSISTANT, MLP_SPECULATOR = "Gemma 4 assistant", "MLP speculator"
DFLASH, DFLASH2, DSPARK, XPRESS, DOMINO = "DFlash", "DFlash2", "DSpark", "xPress", "Domino"
MTP = "MTP"
_EAGLE = "eagle3.export.draft.kinds.eagle"

KINDS: dict[str, Kind] = {
    EAGLE3: Kind(
        "hidden states of several target layers (taps); a KV cache of its own; a step for each proposal", _EAGLE
    ),
    P_EAGLE: Kind(
        "hidden states of several target layers (taps); a KV cache of its own; all proposals in one step",
        _EAGLE,
        published=("RedHatAI/Qwen3-8B-speculator.peagle",),
    ),
    EAGLE: Kind(
        "the target's final state; a KV cache of its own; a step for each proposal",
        _EAGLE,
        published=("yuhuili/EAGLE-LLaMA3.1-Instruct-8B",),
    ),
    GEMMA4_ASSISTANT: Kind(
        "the target's final state and KV caches; no cache; a step for each proposal",
        "eagle3.export.draft.kinds.gemma4_assistant",
        published=tuple(f"google/gemma-4-{size}-it-assistant" for size in ("31B", "E2B", "E4B", "26B-A4B")),
        model_types=("gemma4_assistant", "gemma4_unified_assistant"),
        architectures="^Gemma4(Unified)?Assistant",
    ),
    MLP_SPECULATOR: Kind(
        "the target's final state; no cache; all proposals in one step",
        "eagle3.export.draft.kinds.mlp_speculator",
        published=("ibm-ai-platform/llama3-8b-accelerator",),
        model_types=("mlp_speculator",),
        architectures="MLPSpeculator",
    ),
    DFLASH: Kind(
        "hidden states of several target layers (taps); a KV cache of its own; a block of proposals in one step",
        "eagle3.export.draft.kinds.dflash",
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
        architectures="^(Qwen3?)?DFlash(Speculator|DraftModel)$|^MuseGlimmerAssistantModel$",
    ),
    DFLASH2: Kind(
        "as DFlash, with convolutions and a choice among the best tokens",
        "eagle3.export.draft.kinds.dflash",
        published=("z-lab/Qwen3.8-27B-DFlash2",),
        speculators_type="dflash2",
        architectures="^DFlash2",
    ),
    DSPARK: Kind(
        "as DFlash, with a bias by the token before",
        "eagle3.export.draft.kinds.dflash",
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
        architectures="^DSpark(Speculator|DraftModel)$|^(Qwen3|Gemma4)DSparkModel$",
    ),
    XPRESS: Kind(
        "as DFlash, with a bias by the token before, refined in parallel passes",
        "eagle3.export.draft.kinds.dflash",
        speculators_type="xpress",
        architectures="^XPress",
    ),
    DOMINO: Kind(
        "as DFlash, with a bias by a GRU over the block's tokens",
        "eagle3.export.draft.kinds.dflash",
        published=(
            "Huang2020/Qwen3-4B-Domino-b16",
            "Huang2020/Qwen3-8B-Domino-b16",
            "orestis-z/dflash-qwen3-8b-120k-domino",
        ),
        architectures="^Domino(Speculator|DraftModel)",
    ),
    MTP: Kind(
        "the target's last state; a KV cache of its own; a step for each proposal. --draft mtp: the target's own layer",
        "eagle3.export.draft.kinds.mtp",
        published=("zai-org/GLM-4.5", "zai-org/GLM-4.7-Flash", "deepseek-ai/DeepSeek-V3"),
        speculators_type="mtp",
        architectures="^MTPDraftModel",
    ),
}

__all__ = [
    "DFLASH",
    "DFLASH2",
    "DOMINO",
    "DSPARK",
    "EAGLE",
    "EAGLE3",
    "GEMMA4_ASSISTANT",
    "KINDS",
    "MLP_SPECULATOR",
    "MTP",
    "P_EAGLE",
    "XPRESS",
    "Kind",
    "KindModule",
]
