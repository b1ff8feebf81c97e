"""GGUF files of families that transformers' code computes give the weights that transformers' loader reads."""

from pathlib import Path

import pytest
import torch
from gguf_files import as_read, transformers_gguf
from random_checkpoints import random_model, save_random_draft
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from eagle3.export.configuration.config import ExportConfig
from eagle3.export.lowering.xnnpack.backend import BACKEND as xnnpack
from eagle3.export.pipeline import load_speculator
from eagle3.export.planning.plan import make_plan
from eagle3.targets.attention import EagerAttention

SIZE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64}
KINDS = {"attn_v.weight": "Q6_K", "ffn_down.weight": "Q6_K", "output.weight": "Q6_K", "attn_k.weight": "Q5_K"}
KINDS |= {"token_embd.weight": "Q8_0", ".weight": "Q4_K"}
FAMILIES = {
    "llama3.1-8B": "llama",
    "qwen3-4B": "qwen3",
    "phi4": "phi3",
    "gemma3-27B": "gemma3",
    "auto": "qwen2",
}


def made(target: str, folder: Path):
    """Return a random model of ``target``'s family, its folder, its GGUF file and a draft head for it."""
    if target == "auto":
        torch.manual_seed(7)
        config = Qwen2Config(vocab_size=96, num_attention_heads=4, num_key_value_heads=2, **SIZE)
        model = Qwen2ForCausalLM(config).eval().requires_grad_(False)
        for name, value in model.named_parameters():
            if name.endswith("bias"):
                value.normal_()
    else:
        model = random_model(target, **SIZE)
    model.config.save_pretrained(folder)
    file = transformers_gguf(folder / "model.gguf", model, FAMILIES[target], KINDS)
    return model, file, save_random_draft(folder / "draft", model.config)


@pytest.mark.first(1)
@pytest.mark.parametrize("target", FAMILIES)
def test_gguf_weights_equal_those_that_transformers_reads(target, tmp_path):
    model, file, draft = made(target, tmp_path)
    plan = make_plan(ExportConfig(target, None, file, draft, backend="xnnpack", max_seq_len=64))
    loaded = load_speculator(
        plan, EagerAttention, torch.float32, xnnpack.conversion(plan)
    ).target.causal_lm.state_dict()
    others = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"]
    assert others.keys() <= loaded.keys() and len(others) >= 4 * 6
    own = {header.dtype for header in plan.target_headers.values()}
    assert own >= {"Q4_K", "Q8_0", "F32"}
    for name, value in others.items():
        assert torch.equal(loaded[name], value), name
    kinds = {name: header.dtype for name, header in plan.target_headers.items()}
    for name, value in model.state_dict().items():
        if value.ndim == 2 and name in kinds:
            assert torch.equal(loaded[name], as_read(value, kinds[name])), name


def test_a_gguf_file_without_an_untied_lm_head_is_refused(tmp_path):
    model, _, draft = made("llama3.1-8B", tmp_path)
    model.config.tie_word_embeddings = True  # so that the file has no output.weight; config.json says otherwise
    file = transformers_gguf(tmp_path / "tied.gguf", model, "llama", KINDS)
    with pytest.raises(ValueError, match=r"tied\.gguf lacks lm_head\.weight, which its config\.json implies"):
        make_plan(ExportConfig("llama3.1-8B", None, file, draft, backend="xnnpack", max_seq_len=64))


def test_llama_3_rope_factors_in_a_gguf_file_must_equal_the_config(tmp_path):
    model, _, draft = made("llama3.1-8B", tmp_path)
    rotary = model.model.rotary_emb
    plain = 10000.0 ** -(torch.arange(32) / 32)
    for scale, fits in ((1, True), (1.5, False)):
        factors = plain / rotary.inv_freq * scale
        file = transformers_gguf(tmp_path / f"{fits}.gguf", model, "llama", KINDS, factors)
        flags = ExportConfig("llama3.1-8B", None, file, draft, backend="xnnpack", max_seq_len=64)
        if fits:
            make_plan(flags)
        else:
            with pytest.raises(ValueError, match="rope_freqs are not those of the llama3 rope"):
                make_plan(flags)
