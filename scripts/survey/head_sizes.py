"""The sizes of targets, and the record of a head in ``head_configs.py`` and ``more_head_configs.py``."""

from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
IDS = "eagle_aux_hidden_state_layer_ids"
PLAIN, HALF_M, MILLION, FIVE_M, TEN_M = 1e4, 5e5, 1e6, 5e6, 1e7
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class Sizes:
    """A target's sizes, which its heads share."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layers: int


SIZES = {
    "llama2-7B": Sizes(4096, 11008, 32, 32, 128, 32000, 32),
    "llama2-13B": Sizes(5120, 13824, 40, 40, 128, 32000, 40),
    "llama3-8B": Sizes(4096, 14336, 32, 8, 128, 128256, 32),
    "llama3-70B": Sizes(8192, 28672, 64, 8, 128, 128256, 80),
    "llama4": Sizes(5120, 32768, 40, 8, 128, 202048, 48),
    "mixtral-8x7B": Sizes(4096, 14336, 32, 8, 128, 32000, 32),
    "phi4": Sizes(5120, 17920, 40, 10, 128, 100352, 40),
    "phi4-mini": Sizes(3072, 8192, 24, 8, 128, 200064, 32),
    "gpt-oss-20B": Sizes(2880, 17280, 64, 8, 64, 201088, 24),
    "gpt-oss-120B": Sizes(2880, 17280, 64, 8, 64, 201088, 36),
    "gemma3-1B": Sizes(1152, 6912, 4, 1, 256, 262144, 26),
    "gemma4-31B": Sizes(5376, 21504, 32, 16, 256, 262144, 60),
    "deepseek-v2-lite": Sizes(2048, 10944, 16, 16, 128, 102400, 27),
    "deepseek-v3": Sizes(7168, 40960, 64, 8, 112, 129280, 61),
    "ling-flash": Sizes(4096, 14336, 32, 8, 128, 157184, 32),
    "longcat": Sizes(6144, 12288, 48, 8, 128, 131072, 28),
    "qwen2.5-0.5B": Sizes(896, 4864, 14, 2, 64, 151936, 24),
    "qwen2.5-1.5B": Sizes(1536, 8960, 12, 2, 128, 151936, 28),
    "qwen2.5-3B": Sizes(2048, 11008, 16, 2, 128, 151936, 36),
    "qwen2.5-7B": Sizes(3584, 18944, 28, 4, 128, 152064, 28),
    "qwen2.5-32B": Sizes(5120, 27648, 40, 8, 128, 152064, 64),
    "qwen3-0.6B": Sizes(1024, 3072, 16, 8, 128, 151936, 28),
    "qwen3-1.7B": Sizes(2048, 6144, 16, 8, 128, 151936, 28),
    "qwen3-4B": Sizes(2560, 9728, 32, 8, 128, 151936, 36),
    "qwen3-8B": Sizes(4096, 12288, 32, 8, 128, 151936, 36),
    "qwen3-14B": Sizes(5120, 17408, 40, 8, 128, 151936, 40),
    "qwen3-32B": Sizes(5120, 25600, 64, 8, 128, 151936, 64),
    "qwen3-30B-A3B": Sizes(2048, 12288, 32, 4, 128, 151936, 48),
    "qwen3-235B-A22B": Sizes(4096, 24576, 64, 4, 128, 151936, 94),
    "qwen3-480B": Sizes(6144, 16384, 96, 8, 128, 151936, 62),
    "qwen3-next-80B": Sizes(2048, 12288, 16, 2, 256, 151936, 48),
    "qwen3.5-35B-A3B": Sizes(2048, 12288, 16, 2, 256, 248320, 40),
    "hunyuan-1.8B": Sizes(2048, 6144, 16, 4, 128, 120818, 32),
    "hunyuan-4B": Sizes(3072, 8192, 32, 8, 128, 120818, 36),
    "hunyuan-7B": Sizes(4096, 14336, 32, 8, 128, 128167, 32),
    "hunyuan-ocr": Sizes(1024, 3584, 16, 8, 128, 120818, 24),
    "qwen2-audio-7B": Sizes(4096, 11008, 32, 4, 128, 156032, 32),
    "cosyvoice3": Sizes(896, 4864, 14, 2, 64, 6761, 24),
}


@dataclass(frozen=True)
class HeadConfig:
    """A head as its trainer writes it, with the expected results of reading it."""

    name: str
    trainer: str
    target: str
    fields: Json
    """``config.json``, without the sizes."""
    form: str = "layers.0"
    """The form of its tensors, a name that ``shapes_of`` of ``survey_heads.py`` knows."""
    base: float = PLAIN
    """The RoPE base with which the trainer's code computes."""
    window: int = 0
    normed: bool = False
    """True if the trainer feeds the normed state."""
    untold: bool = False
    """True if the file does not determine the base, so that a warning line is required."""
    refused: str | None = None
    """Words that the refusal must contain, None for a head that must be read."""
