"""The targets that ``eagle3-export --target-model`` knows.

A new target is a file and an entry. The file defines a family: ``skeleton``, and ``load``, which returns a
``TapTarget`` (``spec.py``). A model of transformers needs no file, since ``decoder_layers.py`` runs it unchanged, and
``auto`` takes any of them. The entry goes into ``TARGETS``, from which ``--list-targets`` and the choices of the
command line are read.
"""

from eagle3.targets.spec import SHIPPED, TapTarget, TargetSpec

DECODER_LAYERS = "eagle3.targets.decoder_layers"

TARGETS: dict[str, TargetSpec] = {
    "gemma4-31B": TargetSpec(
        "Gemma 4 31B, text only",
        "eagle3.targets.gemma4",
        model_types=("gemma4_text",),
        repository="google/gemma-4-31B-it",
        heads=(
            "RedHatAI/gemma-4-31B-it-speculator.eagle3",
            "google/gemma-4-31B-it-assistant",
            "RedHatAI/gemma-4-31B-it-speculator.dflash",
            "z-lab/gemma-4-31B-it-DFlash",
            "RedHatAI/gemma-4-31B-it-speculator.dspark",
        ),
    ),
    "gemma4-E2B": TargetSpec(
        "Gemma 4 E2B, text only",
        "eagle3.targets.gemma4",
        model_types=("gemma4_text",),
        repository="google/gemma-4-E2B-it",
        heads=("google/gemma-4-E2B-it-assistant",),
    ),
    "gemma4-E4B": TargetSpec(
        "Gemma 4 E4B, text only",
        "eagle3.targets.gemma4",
        model_types=("gemma4_text",),
        repository="google/gemma-4-E4B-it",
        heads=("google/gemma-4-E4B-it-assistant",),
    ),
    "gemma4-26B-A4B": TargetSpec(
        "Gemma 4 26B-A4B, 128 experts, text only",
        "eagle3.targets.gemma4",
        model_types=("gemma4_text",),
        repository="google/gemma-4-26B-A4B-it",
        heads=(
            "google/gemma-4-26B-A4B-it-assistant",
            "RedHatAI/gemma-4-26B-A4B-it-speculator.eagle3",
            "z-lab/gemma-4-26B-A4B-it-DFlash",
            "JetSpec/jetspec-gemma4-26B-A4B0-it",
            "makora-ai/gemma4-26b-a4b-dspark",
        ),
    ),
    "gemma4-tiny": TargetSpec(
        "5.3 M parameters of Gemma 4 trained on Python's standard library; shipped, with draft heads",
        "eagle3.targets.gemma4",
        model_types=("gemma4_text",),
        checkpoint=SHIPPED / "gemma4_tiny" / "target",
        drafts=tuple(SHIPPED / "gemma4_tiny" / name for name in ("draft", "assistant", "dflash", "peagle")),
        max_seq_len=1024,
    ),
    "gemma3-27B": TargetSpec(
        "Gemma 3 27B, text only",
        DECODER_LAYERS,
        model_types=("gemma3_text",),
        repository="google/gemma-3-27b-it",
        heads=("witcheer/gemma-3-27b-eagle3-drafter",),
    ),
    "gpt-oss-20b": TargetSpec(
        "gpt-oss 20B, 32 experts",
        DECODER_LAYERS,
        model_types=("gpt_oss",),
        repository="openai/gpt-oss-20b",
        heads=(
            "RedHatAI/gpt-oss-20b-speculator.eagle3",
            "z-lab/gpt-oss-20b-DFlash",
            "JetSpec/jetspec-gpt-oss-20b",
        ),
    ),
    "granite3-8B": TargetSpec(
        "Granite 3 8B", DECODER_LAYERS, model_types=("granite",), repository="ibm-granite/granite-3.3-8b-instruct"
    ),
    "llama3.1-8B": TargetSpec(
        "Llama 3.1 8B",
        DECODER_LAYERS,
        model_types=("llama",),
        repository="meta-llama/Llama-3.1-8B-Instruct",
        heads=(
            "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
            "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
            "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
        ),
    ),
    "llama3.3-70B": TargetSpec(
        "Llama 3.3 70B",
        DECODER_LAYERS,
        model_types=("llama",),
        repository="meta-llama/Llama-3.3-70B-Instruct",
        heads=(
            "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3",
            "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",
            "lmsys/SGLang-EAGLE3-Llama-3.3-70B-Instruct-SpecForge",
        ),
    ),
    "llama4-maverick": TargetSpec(
        "Llama 4 Maverick 17B, 128 experts, text only",
        DECODER_LAYERS,
        model_types=("llama4_text",),
        repository="meta-llama/Llama-4-Maverick-17B-128E-Instruct",
        heads=(
            "RedHatAI/Llama-4-Maverick-17B-128E-Instruct-speculator.eagle3",
            "nvidia/Llama-4-Maverick-17B-128E-Eagle3",
            "lmsys/sglang-EAGLE3-Llama-4-Maverick-17B-128E-Instruct-v1",
        ),
    ),
    "llama4-scout": TargetSpec(
        "Llama 4 Scout 17B, 16 experts, text only",
        DECODER_LAYERS,
        model_types=("llama4_text",),
        repository="meta-llama/Llama-4-Scout-17B-16E-Instruct",
        heads=(
            "lmsys/SGLang-EAGLE3-Llama-4-Scout-17B-16E-Instruct-SpecForge",
            "lmsys/sglang-EAGLE3-Llama-4-Scout-17B-16E-Instruct-v1",
        ),
    ),
    "mistral-7B": TargetSpec(
        "Mistral 7B", DECODER_LAYERS, model_types=("mistral",), repository="mistralai/Mistral-7B-Instruct-v0.3"
    ),
    "muse-glimmer-30B": TargetSpec(
        "Muse Glimmer 30B, text only",
        DECODER_LAYERS,
        model_types=("muse_glimmer_text",),
        repository="meta-models/Muse-Glimmer-30B",
        heads=("meta-models/Muse-Glimmer-30B-assistant",),
    ),
    "phi4": TargetSpec("Phi-4 14B", DECODER_LAYERS, model_types=("phi3",), repository="microsoft/phi-4"),
    "qwen3-4B": TargetSpec(
        "Qwen3 4B",
        DECODER_LAYERS,
        model_types=("qwen3",),
        repository="Qwen/Qwen3-4B",
        heads=(
            "AngelSlim/Qwen3-4B_eagle3",
            "z-lab/Qwen3-4B-DFlash-b16",
            "deepseek-ai/eagle3_qwen3_4b_ttt7",
            "deepseek-ai/dflash_qwen3_4b_block7",
            "deepseek-ai/dspark_qwen3_4b_block7",
        ),
    ),
    "qwen3-8B": TargetSpec(
        "Qwen3 8B",
        DECODER_LAYERS,
        model_types=("qwen3",),
        repository="Qwen/Qwen3-8B",
        heads=(
            "RedHatAI/Qwen3-8B-speculator.eagle3",
            "AngelSlim/Qwen3-8B_eagle3",
            "Tengyunw/qwen3_8b_eagle3",
            "RedHatAI/Qwen3-8B-speculator.peagle",
            "z-lab/Qwen3-8B-DFlash-b16",
            "deepseek-ai/eagle3_qwen3_8b_ttt7",
            "deepseek-ai/dflash_qwen3_8b_block7",
            "deepseek-ai/dspark_qwen3_8b_block7",
            "JetSpec/jetspec-qwen3-8b",
            "mgoin/Qwen3-8B-speculator.dspark",
            "Dogacel/Qwen3-8B-DSpark",
        ),
    ),
    "qwen3-30B-A3B": TargetSpec(
        "Qwen3 30B-A3B, 128 experts",
        DECODER_LAYERS,
        model_types=("qwen3_moe",),
        repository="Qwen/Qwen3-30B-A3B",
        heads=("Tengyunw/qwen3_30b_moe_eagle3", "AngelSlim/Qwen3-a3B_eagle3", "JetSpec/jetspec-qwen3-30b-a3b"),
    ),
    "qwen3-32B": TargetSpec(
        "Qwen3 32B",
        DECODER_LAYERS,
        model_types=("qwen3",),
        repository="Qwen/Qwen3-32B",
        heads=("RedHatAI/Qwen3-32B-speculator.eagle3", "AngelSlim/Qwen3-32B_eagle3"),
    ),
    "qwen3-next-80B-A3B": TargetSpec(
        "Qwen3-Next 80B-A3B, 512 experts, recurrent layers",
        DECODER_LAYERS,
        model_types=("qwen3_next",),
        repository="Qwen/Qwen3-Next-80B-A3B-Instruct",
    ),
    "qwen3.5-4B": TargetSpec(
        "Qwen3.5 4B, recurrent layers, text only",
        DECODER_LAYERS,
        model_types=("qwen3_5_text",),
        repository="Qwen/Qwen3.5-4B",
    ),
    "qwen3.5-9B": TargetSpec(
        "Qwen3.5 9B, recurrent layers, text only",
        DECODER_LAYERS,
        model_types=("qwen3_5_text",),
        repository="Qwen/Qwen3.5-9B",
        heads=("BLR2/Qwen3.5-9B-Eagle3-ShareGPT", "z-lab/Qwen3.5-9B-DFlash"),
    ),
    "qwen3.5-27B": TargetSpec(
        "Qwen3.5 27B, recurrent layers, text only",
        DECODER_LAYERS,
        model_types=("qwen3_5_text",),
        repository="Qwen/Qwen3.5-27B",
        heads=("z-lab/Qwen3.5-27B-DFlash",),
    ),
    "qwen3.5-35B-A3B": TargetSpec(
        "Qwen3.5 35B-A3B, experts, recurrent layers, text only",
        DECODER_LAYERS,
        model_types=("qwen3_5_moe_text",),
        repository="Qwen/Qwen3.5-35B-A3B",
        heads=("z-lab/Qwen3.5-35B-A3B-DFlash",),
    ),
    "qwen3.6-27B": TargetSpec(
        "Qwen3.6 27B, recurrent layers, text only",
        DECODER_LAYERS,
        model_types=("qwen3_5_text",),
        repository="Qwen/Qwen3.6-27B",
        heads=("z-lab/Qwen3.6-27B-DFlash", "Ex0bit/Qwen3.6-27B-PRISM-EAGLE3"),
    ),
    "qwen3.6-35B-A3B": TargetSpec(
        "Qwen3.6 35B-A3B, experts, recurrent layers, text only",
        DECODER_LAYERS,
        model_types=("qwen3_5_moe_text",),
        repository="Qwen/Qwen3.6-35B-A3B",
        heads=("z-lab/Qwen3.6-35B-A3B-DFlash",),
    ),
    "qwen3.8-27B": TargetSpec(
        "Qwen3.8 27B, recurrent layers, text only",
        DECODER_LAYERS,
        model_types=("qwen3_5_text",),
        repository="Qwen/Qwen3.8-27B",
        heads=("z-lab/Qwen3.8-27B-DFlash2",),
    ),
    "lfm2-1.2B": TargetSpec(
        "LFM2 1.2B, short convolutions",
        DECODER_LAYERS,
        model_types=("lfm2",),
        repository="LiquidAI/LFM2-1.2B",
    ),
    "lfm2-8B-A1B": TargetSpec(
        "LFM2 8B-A1B, 32 experts, short convolutions",
        DECODER_LAYERS,
        model_types=("lfm2_moe",),
        repository="LiquidAI/LFM2-8B-A1B",
    ),
    "kimi-linear-48B-A3B": TargetSpec(
        "Kimi Linear 48B-A3B, 256 experts, recurrent layers",
        DECODER_LAYERS,
        model_types=("kimi_linear",),
        repository="moonshotai/Kimi-Linear-48B-A3B-Instruct",
    ),
    "bamba-9B": TargetSpec(
        "Bamba 9B, Mamba 2 layers",
        DECODER_LAYERS,
        model_types=("bamba",),
        repository="ibm-ai-platform/Bamba-9B-v1",
    ),
    "falcon-h1-7B": TargetSpec(
        "Falcon-H1 7B, attention and Mamba 2 in each layer",
        DECODER_LAYERS,
        model_types=("falcon_h1",),
        repository="tiiuae/Falcon-H1-7B-Instruct",
    ),
    "granite4-h-tiny": TargetSpec(
        "Granite 4.0 H Tiny, 64 experts, Mamba 2 layers",
        DECODER_LAYERS,
        model_types=("granitemoehybrid",),
        repository="ibm-granite/granite-4.0-h-tiny",
    ),
    "granite4-h-small": TargetSpec(
        "Granite 4.0 H Small, 72 experts, Mamba 2 layers",
        DECODER_LAYERS,
        model_types=("granitemoehybrid",),
        repository="ibm-granite/granite-4.0-h-small",
    ),
    "nemotron-h-8B": TargetSpec(
        "Nemotron-H 8B, Mamba 2 layers",
        DECODER_LAYERS,
        model_types=("nemotron_h",),
        repository="nvidia/Nemotron-H-8B-Base-8K",
    ),
    "nemotron3-nano-30B-A3B": TargetSpec(
        "Nemotron 3 Nano 30B-A3B, experts, Mamba 2 layers",
        DECODER_LAYERS,
        model_types=("nemotron_h",),
        repository="nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    ),
    "auto": TargetSpec(
        "by config.json: any decoder-only model of transformers whose small random copy gives transformers' logits",
        DECODER_LAYERS,
    ),
}
"""The registered targets. Repositories have the names under which they were published. A dry run tells whether a head
still exists and fits."""


def spec_for(name: str, model_type: str) -> TargetSpec:
    """Return the entry of target ``name``. For ``auto`` it is the entry of the family that has the text configuration's
    ``model_type``, if there is one."""
    spec = TARGETS[name]
    if spec.model_types:
        return spec
    own = (other for other in TARGETS.values() if model_type in other.model_types and other.checkpoint is None)
    return next(own, spec)


__all__ = ["TARGETS", "TapTarget", "TargetSpec", "spec_for"]
