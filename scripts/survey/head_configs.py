"""Configurations of draft heads as AngelSlim, SafeAILab and SpecForge write them: the keys and values that decide what
a head computes, and their meaning in the trainer's code.

The facts come from the public configurations and code of Tencent/AngelSlim (``speculative/train/configs``),
SafeAILab/EAGLE and sgl-project/SpecForge (``configs``) and of heads on the hub, read 2026-11. Keys that change nothing
here are left out.
"""

from collections.abc import Iterator
from typing import Any

from head_sizes import FIVE_M, HALF_M, IDS, LLAMA3, MILLION, PLAIN, TEN_M, HeadConfig


def heads() -> Iterator[HeadConfig]:
    """Yield the configurations, by trainer."""
    for trainer in (_angelslim, _safeailab, _specforge):
        yield from trainer()


def _angelslim() -> Iterator[HeadConfig]:
    own = {"architectures": ["Eagle3LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-6}
    off = {"sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 28}

    def head(target: str, of: str, base: float = PLAIN, name: str = "", **keys: Any) -> HeadConfig:  # noqa: ANN401
        fields = own | {"target_model_type": of, "draft_vocab_size": 32000} | keys
        return HeadConfig(name or target, "AngelSlim", target, fields, "midlayer", base)

    for target in ("qwen3-0.6B", "qwen3-1.7B", "qwen3-4B", "qwen3-8B", "qwen3-14B", "qwen3-32B"):
        yield head(target, "qwen3", rope_theta=MILLION, rope_scaling=None, tie_word_embeddings=target < "qwen3-8")
    yield head("qwen3-30B-A3B", "qwen3_moe", rope_theta=MILLION, rope_scaling=None)
    for target in ("qwen2.5-0.5B", "qwen2.5-1.5B", "qwen2.5-3B", "qwen2.5-7B"):
        yield head(target, "qwen2.5", rope_theta=MILLION, use_mrope=False, **off)
    mrope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    for target in ("qwen2.5-3B", "qwen2.5-7B"):
        keys = {"rope_theta": MILLION, "rope_scaling": mrope, "modal_type": "VLM"} | off
        yield head(target, "qwen2_5_vl", MILLION, f"{target} of VL, mrope", **keys)
    mrope = {"type": "default", "rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]}
    for target in ("qwen3-1.7B", "qwen3-4B", "qwen3-8B", "qwen3-30B-A3B"):
        keys = {"rope_theta": FIVE_M, "rope_scaling": mrope, "modal_type": "VLM"}
        yield head(target, "qwen3_vl", FIVE_M, f"{target} of VL, mrope", **keys)
    yield head("qwen3-4B", "qwen3_vl", name="qwen3-4B of VL", rope_theta=FIVE_M, rope_scaling=None, modal_type="VLM")
    parameters = {"rope_type": "default", "rope_theta": MILLION}
    yield head("qwen3-8B", "qwen3", name="qwen3-8B, transformers 5", rope_parameters=parameters)
    for target in ("hunyuan-4B", "hunyuan-7B"):
        yield head(target, "hunyuan_v1_dense", rope_theta=PLAIN)
    dynamic = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
    keys = own | {"target_model_type": "hunyuan_v1_dense", "rope_scaling": dynamic, "draft_vocab_size": 32000}
    yield HeadConfig("hunyuan-1.8B", "AngelSlim", "hunyuan-1.8B", keys, "midlayer", refused="rope_type dynamic")
    yield head("hunyuan-ocr", "hunyuan_vl", rope_theta=PLAIN, modal_type="VLM", tie_word_embeddings=True)
    yield head("qwen2-audio-7B", "qwen2_audio", rope_theta=10000, rope_scaling=None, modal_type="Audio")
    keys = own | {"architectures": ["CosyVoice3Eagle3LlamaForCausalLM"], "rope_theta": MILLION, "num_hidden_layers": 24}
    keys |= {"draft_vocab_size": 6761, "tie_word_embeddings": True} | off
    yield HeadConfig("cosyvoice3", "AngelSlim", "cosyvoice3", keys, "midlayer")
    keys = {"architectures": ["LlamaForCausalLMEagle3"], "rope_theta": MILLION, "draft_vocab_size": 32000}
    for target in ("qwen3-1.7B", "qwen3-8B", "qwen3-14B"):  # as published on the hub
        model_type = "qwen3" if target == "qwen3-1.7B" else "llama"
        fields = own | keys | {"model_type": model_type}
        yield HeadConfig(f"{target}, published", "AngelSlim", target, fields, "midlayer", MILLION, untold=True)


def _safeailab() -> Iterator[HeadConfig]:
    own = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
    spoken = {"draft_vocab_size": 32000}

    def head(name: str, target: str, form: str = "midlayer", **keys: Any) -> HeadConfig:  # noqa: ANN401
        base, untold = keys.get("rope_theta", PLAIN), form == "midlayer" and keys.get("rope_theta", PLAIN) != PLAIN
        refused = keys.pop("refused", None)
        fields = own | (spoken if form == "midlayer" else {}) | keys
        return HeadConfig(name, "SafeAILab", target, fields, form, base, untold=untold, refused=refused)

    yield head("EAGLE3-LLaMA3.1-8B", "llama3-8B", max_position_embeddings=2048)
    yield head("EAGLE3-LLaMA3.3-70B", "llama3-70B", max_position_embeddings=2048, target_hidden_size=8192)
    yield head("EAGLE3-Vicuna1.3-13B", "llama2-13B", num_hidden_layers=40)
    yield head("EAGLE3 of Qwen3-8B, its own keys", "qwen3-8B", rope_theta=MILLION)
    yield head("EAGLE3 of Qwen2-7B, model_type qwen2", "qwen2.5-7B", model_type="qwen2", use_sliding_window=False)
    derived = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 0}
    yield head("EAGLE3, a derived window", "qwen2.5-7B", **derived, refused="use_sliding_window is true")
    yield head("EAGLE3, a llama3 RoPE", "llama3-8B", rope_scaling=LLAMA3, refused='the type "llama3"')
    for name, target in (("LLaMA2-chat-7B", "llama2-7B"), ("Vicuna-13B", "llama2-13B"), ("LLaMA3-8B", "llama3-8B")):
        yield head(f"EAGLE-{name}", target, "eagle", rope_theta=HALF_M if "3-8B" in name else PLAIN)
    yield head("EAGLE-mixtral", "mixtral-8x7B", "eagle", model_type="mixtral", rope_theta=MILLION)
    yield head("EAGLE-Qwen2-7B, biases", "qwen2.5-7B", "eagle biases", model_type="qwen2", rope_theta=MILLION)


def _specforge() -> Iterator[HeadConfig]:
    own = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "rms_norm_eps": 1e-6}
    own |= {"draft_vocab_size": 32000, "tie_word_embeddings": False}
    off = {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 36}

    def head(target: str, name: str = "", base: float | None = None, **keys: Any) -> HeadConfig:  # noqa: ANN401
        base = keys.get("rope_theta", PLAIN) if base is None else base
        return HeadConfig(name or target, "SpecForge", target, own | keys, "midlayer", base, untold=base != PLAIN)

    for target in ("llama3-8B", "llama4", "ling-flash"):
        yield head(target)
    for target, ids in (("gpt-oss-20B", [1, 11, 21]), ("gpt-oss-120B", [1, 17, 33])):
        yield head(target, eagle_config={IDS: ids})
    ids = {"use_aux_hidden_state": True, IDS: [1, 29, 57]}
    yield head("deepseek-v3", eagle_config=ids)
    yield head("llama3-70B", rope_theta=HALF_M, rope_scaling=LLAMA3)
    yarn = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0}
    yarn |= {"beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707}
    yield head("deepseek-v2-lite", rope_theta=10000, rope_scaling=yarn, **off)
    gemma = {"rope_theta": 1000000, "sliding_window": 512, "use_sliding_window": False}
    yield head("gemma3-1B", target_model_type="gemma3_text", **gemma)
    yield head("phi4", model_type="phi3", rope_theta=250000.0)
    for target in ("qwen3-4B", "qwen3-8B", "qwen3-32B", "qwen3-30B-A3B", "qwen3-480B"):
        yield head(target, rope_theta=MILLION, rope_scaling=None, **off)
    ids = {IDS: [1, 46, 90], "use_aux_hidden_state": True}
    yield head("qwen3-235B-A22B", rope_theta=MILLION, eagle_config=ids)
    for target in ("qwen3-next-80B", "qwen3.5-35B-A3B"):
        yield head(target, rope_theta=10000000, use_sliding_window=False, decoder_sparse_step=1)
    for target in ("qwen2.5-0.5B", "qwen2.5-7B"):
        yield head(target, rope_theta=MILLION, sliding_window=131072, use_sliding_window=False)
    mrope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    for target in ("qwen2.5-7B", "qwen2.5-32B"):
        keys = {"target_model_type": "qwen2_5_vl", "rope_theta": 1000000, "rope_scaling": mrope}
        yield head(target, f"{target} of VL, mrope", **keys)
    yield head("longcat", rope_theta=TEN_M, **off)
    keys = {"model_type": "qwen2", "rope_theta": MILLION, "sliding_window": 32768, "use_sliding_window": False}
    yield head("qwen2.5-32B", "qwq-32B", **keys)
    new = own | {"fc_norm": True, "norm_output": True, "rope_theta": MILLION}
    yield HeadConfig("qwen3-30B-A3B, EAGLE 3.1", "SpecForge", "qwen3-30B-A3B", new, "fc_norm", MILLION, normed=True)
    keys = own | {"architectures": ["PEagleDraftModel"], "num_hidden_layers": 4, "rope_theta": 1000000}
    yield HeadConfig("qwen3-8B, P-EAGLE", "SpecForge", "qwen3-8B", keys | {"mask_token_id": 151669}, "peagle", MILLION)
    yield head("phi4-mini", model_type="phi3", rope_theta=PLAIN)
