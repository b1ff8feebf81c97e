"""DFlash heads and their kin, DFlash2, DSpark, xPress and Domino, which draft a block of tokens in one forward.

A block is the newest token and mask tokens behind it. Its rows attend to each other, and to keys and values that every
layer makes of the target's taps. Source: arXiv 2602.06036; speculators' classes of the same names, whose outputs are in
tests/golden_dflash; z-lab's ``dflash/model.py`` for the files of its own form.
"""

from eagle3.export.draft.common.kind import Kind

DFLASH, DFLASH2, DSPARK, XPRESS, DOMINO = "DFlash", "DFlash2", "DSpark", "xPress", "Domino"
_PARTS = "eagle3.export.draft.kinds.dflash.parts"

KINDS: dict[str, Kind] = {
    DFLASH: Kind(
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
        architectures="^(Qwen3?)?DFlash(Speculator|DraftModel)$|^MuseGlimmerAssistantModel$",
    ),
    DFLASH2: Kind(
        "as DFlash, with convolutions and a choice among the best tokens",
        _PARTS,
        published=("z-lab/Qwen3.8-27B-DFlash2",),
        speculators_type="dflash2",
        architectures="^DFlash2",
    ),
    DSPARK: Kind(
        "as DFlash, with a bias by the token before",
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
        architectures="^DSpark(Speculator|DraftModel)$|^(Qwen3|Gemma4)DSparkModel$",
    ),
    XPRESS: Kind(
        "as DFlash, with a bias by the token before, refined in parallel passes",
        _PARTS,
        speculators_type="xpress",
        architectures="^XPress",
    ),
    DOMINO: Kind(
        "as DFlash, with a bias by a GRU over the block's tokens",
        _PARTS,
        published=(
            "Huang2020/Qwen3-4B-Domino-b16",
            "Huang2020/Qwen3-8B-Domino-b16",
            "orestis-z/dflash-qwen3-8b-120k-domino",
        ),
        architectures="^Domino(Speculator|DraftModel)",
    ),
}
