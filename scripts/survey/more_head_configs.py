"""More configurations of draft heads, in the form of ``head_configs.py``: by NeMo, ModelOpt, vLLM's model registry,
speculators and DeepSpec, and of the DFlash family.

The facts come from NVIDIA-NeMo/Automodel (``components/speculative``, ``recipes/llm``), NVIDIA ModelOpt, vLLM
(``model_executor/models/registry.py``), vllm-project/speculators, deepseek-ai/DeepSpec, sgl-project/SpecForge
(``configs``) and heads on the hub, read 2026-11.
"""

from collections.abc import Iterator
from typing import Any

from head_sizes import HALF_M, IDS, LLAMA3, MILLION, PLAIN, SIZES, TEN_M, HeadConfig, Json


def heads() -> Iterator[HeadConfig]:
    """Yield the configurations, by trainer."""
    for trainer in (_nemo, _modelopt, _vllm, _speculators, _deepspec, _dflash):
        yield from trainer()


def _nemo() -> Iterator[HeadConfig]:
    """Yield NeMo's heads. Their files have the target's configuration with the head's own depth and kinds of layers."""

    def of(target: str, eagle1: bool = False, **keys: Any) -> Json:  # noqa: ANN401
        depth = SIZES[target].layers
        own: Json = {"rms_norm_eps": 1e-6, "num_hidden_layers": depth, "tie_word_embeddings": False}
        if eagle1:
            return own | {"architectures": ["LlamaEagleDraftModel"], "draft_num_hidden_layers": 1} | keys
        more = {"draft_vocab_size": 32000, "target_hidden_size": SIZES[target].hidden}
        more |= {"fc_norm": False, "norm_output": False, "parallel_drafting": False}
        return own | {"architectures": ["LlamaEagle3DraftModel"]} | more | keys

    qwen3 = {"model_type": "qwen3", "use_sliding_window": False, "layer_types": ["full_attention"] * 36}
    qwen3 |= {"rope_parameters": {"rope_type": "default", "rope_theta": MILLION}}
    llama = {"model_type": "llama", "rope_parameters": LLAMA3 | {"rope_theta": HALF_M}}
    phi = {"model_type": "phi3", "rope_parameters": {"rope_type": "default", "rope_theta": 250000.0}}
    yarn = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "truncate": False, "beta_fast": 32.0}
    yarn |= {"beta_slow": 1.0, "original_max_position_embeddings": 4096}
    oss = {"model_type": "gpt_oss", "attention_bias": False, "sliding_window": 128, "rope_parameters": yarn}
    oss |= {"layer_types": ["sliding_attention", "full_attention"] * 12}
    gemma = {"model_type": "gemma4_text", "hidden_act": "gelu_pytorch_tanh", "rope_theta": MILLION}
    gemma |= {"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10, "sliding_window": 1024}
    yield HeadConfig("llama3-8B", "NeMo", "llama3-8B", of("llama3-8B", **llama), "model.", HALF_M)
    yield HeadConfig("qwen3-8B", "NeMo", "qwen3-8B", of("qwen3-8B", **qwen3), "model.", MILLION)
    yield HeadConfig("phi4", "NeMo", "phi4", of("phi4", **phi), "model.", 250000.0)
    yield HeadConfig("gpt-oss-20B", "NeMo", "gpt-oss-20B", of("gpt-oss-20B", **oss), "model.", 150000.0)
    yield HeadConfig("gemma4-31B", "NeMo", "gemma4-31B", of("gemma4-31B", **gemma), "model.", MILLION)
    new = of("qwen3-8B", **qwen3 | {"fc_norm": True, "norm_output": True})
    yield HeadConfig("qwen3-8B, EAGLE 3.1", "NeMo", "qwen3-8B", new, "model. fc_norm", MILLION, normed=True)
    parallel = {"parallel_drafting": True, "mask_token_id": 151669, "num_hidden_layers": 4}
    parallel |= {"layer_types": ["full_attention"] * 4}
    keys = of("qwen3-8B", **qwen3 | parallel)
    yield HeadConfig("qwen3-8B, P-EAGLE", "NeMo", "qwen3-8B", keys, "model. peagle", MILLION)
    for target, keys, base in (("llama3-8B", llama, HALF_M), ("qwen3-8B", qwen3, MILLION), ("phi4", phi, 250000.0)):
        fields = of(target, True, **keys)
        yield HeadConfig(f"{target}, EAGLE 1", "NeMo", target, fields, "eagle normed", base, normed=True)


def _modelopt() -> Iterator[HeadConfig]:
    own = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "rms_norm_eps": 1e-5}
    variants = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False}
    variants |= {"use_aux_hidden_state": True, "next_layer_regular": True, "parallel_draft_step": 1}

    def head(name: str, target: str, form: str = "layers.0", of: Json | None = None, **keys: Any) -> HeadConfig:  # noqa: ANN401
        refused = keys.pop("refused", None)
        fields = own | {"draft_vocab_size": 32000, "eagle_config": variants | (of or {})} | keys
        normed = bool((of or {}).get("return_hidden_post_norm"))
        base = keys.get("rope_theta", PLAIN)
        return HeadConfig(name, "ModelOpt", target, fields, form, base, normed=normed, refused=refused)

    short = {"use_aux_hidden_state": False, IDS: []}
    yield head("gpt-oss-120b-Eagle3-short-context", "gpt-oss-120B", "final", of=short, rope_theta=150000.0)
    yield head("gpt-oss-120b-Eagle3-long-context", "gpt-oss-120B", of={IDS: [1, 17, 32]}, rope_theta=150000.0)
    before = {"norm_before_fc": True, IDS: [1, 17, 36]}
    yield head("gpt-oss-120b-Eagle3-v3", "gpt-oss-120B", "norm_before_fc", of=before, rope_theta=150000.0)
    post = {"return_hidden_post_norm": True, IDS: [1, 23, 44]}
    yield head("Llama-4-Maverick-17B-128E-Eagle3", "llama4", of=post, rope_theta=HALF_M)
    keys = {"rope_theta": HALF_M, "rope_scaling": LLAMA3}
    yield head("Llama-3.3-70B-Instruct-Eagle3", "llama3-70B", of={IDS: [1, 38, 75]}, **keys)
    yield head("Qwen3-235B-A22B-Eagle3", "qwen3-235B-A22B", of={IDS: [1, 46, 90]}, rope_theta=MILLION)
    medusa = {"parallel_draft_step": 4}
    yield head("a head with Medusa's layers", "llama3-8B", of=medusa, refused="parallel_draft_step is 4")
    yield head("MTP norms", "llama3-8B", of={"use_mtp_layernorm": True}, refused="use_mtp_layernorm is true")


def _vllm() -> Iterator[HeadConfig]:
    def named(name: str, refused: str | None = None, form: str = "midlayer", **keys: Any) -> HeadConfig:  # noqa: ANN401
        fields = {"architectures": [name], "model_type": "llama", "rms_norm_eps": 1e-5} | keys
        fields |= {} if "eagle" in form else {"draft_vocab_size": 32000}
        base = keys.get("rope_theta", PLAIN)
        untold = base != PLAIN and form == "midlayer"
        return HeadConfig(name, "vLLM", "llama3-8B", fields, form, base, untold=untold, refused=refused)

    yield named("EagleLlamaForCausalLM", form="eagle", rope_theta=HALF_M)
    yield named("EagleLlama4ForCausalLM", "Llama 4's layers", "eagle", model_type="llama4_text")
    yield named("EagleMiniCPMForCausalLM", "MiniCPM's layers", "eagle", model_type="minicpm")
    yield named("EagleMistralLarge3ForCausalLM", "Mistral Large 3's layers", "eagle")
    yield named("EagleDeepSeekMTPModel", "MLA attention", "eagle", model_type="deepseek_v3")
    yield named("Eagle3DeepseekV2ForCausalLM", "MLA attention")
    for name in ("Eagle3LlamaForCausalLM", "Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM"):
        yield named(name, rope_theta=HALF_M)
    yield named("MedusaModel", "a Medusa head", medusa_num_heads=3)
    inner = {"model_type": "llama", "rms_norm_eps": 1e-5}
    keys = {"architectures": ["EAGLEModel"], "model_type": "eagle", "model": inner, "truncated_vocab_size": 32000}
    yield HeadConfig("the eagle form", "vLLM", "llama2-7B", keys, "eagle", refused="in vLLM's own form")


def _speculators() -> Iterator[HeadConfig]:
    def head(
        name: str, target: str, layer: Json, base: float = PLAIN, form: str = "layers.0", **keys: Any
    ) -> HeadConfig:  # noqa: ANN401
        own = {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": 32000}
        own |= {"norm_before_residual": True, "norm_before_fc": False, IDS: [2, 15, 28]}
        proposal = {"proposal_type": "greedy", "speculative_tokens": 3}
        own |= {"speculators_config": {"proposal_methods": [proposal]}}
        window = layer["sliding_window"] if "sliding_attention" in layer.get("layer_types", ()) else 0
        layer = {"model_type": "llama", "rms_norm_eps": 1e-6, "num_hidden_layers": 1} | layer
        fields = own | {"transformer_layer_config": layer} | keys
        normed = bool(keys.get("norm_output"))
        return HeadConfig(name, "speculators", target, fields, form, base, window=window, normed=normed)

    def rope(base: float, **keys: Any) -> Json:  # noqa: ANN401
        return {"rope_parameters": {"rope_type": "default", "rope_theta": base} | keys}

    plain = rope(PLAIN)
    yield head("gemma-4-31B-it-speculator.eagle3", "gemma4-31B", plain, **{IDS: [2, 30, 57]})
    yield head("Llama-3.1-8B-Instruct-speculator.eagle3", "llama3-8B", rope(HALF_M), HALF_M)
    for target in ("qwen3-8B", "qwen3-14B", "qwen3-32B"):
        yield head(f"{target}-speculator.eagle3", target, rope(MILLION) | {"model_type": "llama"}, MILLION)
    sliding = {"layer_types": ["sliding_attention"], "sliding_window": 2048}
    new = {"norm_before_fc": True, "norm_output": True}
    keys = rope(150000.0) | sliding
    yield head("gpt-oss-20b-speculator.eagle3, 3.1", "gpt-oss-20B", keys, 150000.0, "norm_before_fc", **new)
    by_type = {"full_attention": rope(MILLION)["rope_parameters"], "sliding_attention": plain["rope_parameters"]}
    yield head("a RoPE by layer type", "gemma4-31B", sliding | {"rope_parameters": by_type}, PLAIN)
    yield head("a part of each head rotated", "llama3-8B", rope(PLAIN, partial_rotary_factor=0.5))
    yield head("a qwen3 layer", "qwen3-8B", rope(MILLION) | {"model_type": "qwen3"}, MILLION, "qk_norm")
    keys = {"architectures": ["PEagleDraftModel"], "speculators_model_type": "peagle", "mask_token_id": 151669}
    deep = rope(MILLION) | {"num_hidden_layers": 4}
    yield head("Qwen3-8B-speculator.peagle", "qwen3-8B", deep, MILLION, "peagle", **keys)
    keys = {"architectures": ["EagleSpeculator"], "speculators_model_type": "eagle", "draft_vocab_size": None}
    keys |= {"norm_before_residual": None, IDS: None, "layernorms": False, "fusion_bias": False}
    yield head("EAGLE by speculators 0.3", "llama3-8B", {"rope_theta": HALF_M}, HALF_M, "transformer.", **keys)


def _deepspec() -> Iterator[HeadConfig]:
    for target in ("qwen3-4B", "qwen3-8B", "qwen3-14B"):
        keys = {"architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "rms_norm_eps": 1e-6, "ttt_length": 7}
        keys |= {"target_layer_ids": [1, 9, 17, 25, 33], "target_model_name_or_path": f"Qwen/{target}"}
        keys |= {"rope_parameters": {"rope_type": "default", "rope_theta": MILLION}, "layer_types": ["full_attention"]}
        yield HeadConfig(f"eagle3_{target}_ttt7", "DeepSpec", target, keys, "five taps", MILLION)


def _dflash() -> Iterator[HeadConfig]:
    def head(
        target: str, ids: list[int], name: str = "", base: float = MILLION, layers: int = 5, **keys: Any
    ) -> HeadConfig:  # noqa: ANN401
        own = keys.pop("own", {})
        fields = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "rms_norm_eps": 1e-6}
        fields |= {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers, "rope_theta": base}
        fields |= {"block_size": 16, "dflash_config": {"mask_token_id": 4, "target_layer_ids": ids} | own} | keys
        form = own.get("projector_type", "dflash")
        window = max(0, fields.get("sliding_window", 0)) if "sliding_attention" in fields["layer_types"] else 0
        return HeadConfig(name or target, "DFlash family", target, fields, form, base, window)

    ids = [1, 9, 17, 25, 33]
    for target in ("qwen3-4B", "qwen3-8B"):
        yield head(target, ids, sliding_window=None, use_sliding_window=False)
    yield head("qwen2.5-0.5B", [1, 6, 11, 16, 21])
    yield head("longcat", [1, 7, 13, 19, 25])
    yield head("qwen3.5-35B-A3B", [1, 10, 19, 28, 37], base=TEN_M, layers=8)
    kinds = ["sliding_attention"] * 4 + ["full_attention"]
    keys = {"layer_types": kinds, "sliding_window": 2048, "use_sliding_window": True}
    yield head("gemma4-31B", [1, 16, 31, 46, 57], "gemma4-31B, sliding layers", TEN_M, **keys)
    dspark = {"projector_type": "dspark", "markov_rank": 256, "markov_head_type": "vanilla", "attention_mode": "gqa"}
    dspark |= {"enable_confidence_head": True, "confidence_head_with_markov": True, "confidence_head_alpha": 1.0}
    for target, block in (("qwen3-4B", 7), ("qwen3-8B", 7), ("qwen3-32B", 16)):
        keys = {"architectures": ["DSparkDraftModel"], "block_size": block, "own": dspark}
        yield head(target, ids, f"{target}, DSpark, a block of {block}", **keys)
    domino = {"projector_type": "domino", "pure_draft_prefix_len": 1, "emb_dim": 256, "gru_hidden_dim": 1024}
    for shift in (True, False):
        keys = {"architectures": ["DominoDraftModel"], "own": domino | {"shift_label": shift}}
        yield head("qwen3-8B", ids, f"qwen3-8B, Domino, shift_label {str(shift).lower()}", **keys)
